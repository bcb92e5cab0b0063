"""Running a sweep's jobs so that a worker which is killed takes no other job with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.experiment.messages import one_line
from kvxfer.experiment.sweeps.jobs import Outcome
from kvxfer.files import read_json, write_json

log = logging.getLogger("kvxfer")

Launch = Callable[[list[list[str]], int], Sequence[Any]]
"""Runs some jobs, given by their overrides and the number of the first; gives Hydra's word on each."""


def outcome_file(home: Path, number: int) -> Path:
    """Where a job says that it has begun, and then what came of it: a process that is killed can tell nobody else."""
    return home / "jobs" / f"{number}.json"


def tell(home: Path, number: int, outcome: Outcome | None) -> None:
    """Write down what became of a job, or (None) that it has begun; what can't be written ends no job."""
    with suppress(OSError):
        write_json(outcome_file(home, number), None if outcome is None else asdict(outcome))


def run_all(launch: Launch, jobs: Sequence[list[str]], first: int, home: Path) -> list[tuple[Any, Outcome]]:
    """What Hydra says of each job, if it does, and what came of it.

    A launcher that breaks off, as joblib's does when one of its workers is killed, has lost the others' answers too.
    Jobs that had ended have written theirs down; those that had not begun are launched again, and those that were
    running once more one by one, so that only a job that breaks its worker a second time has failed.
    """
    known: dict[int, tuple[Any, Outcome]] = {}
    waiting, suspects = list(range(first, first + len(jobs))), set[int]()
    for number in waiting:
        outcome_file(home, number).unlink(missing_ok=True)
    while waiting:
        numbers = next(_batches(waiting, suspects))
        try:
            returns = launch([jobs[number - first] for number in numbers], numbers[0])
            known |= {number: (each, each.return_value) for number, each in zip(numbers, returns, strict=True)}
        except Exception as error:
            begun = {number: _told(home, number) for number in numbers if outcome_file(home, number).is_file()}
            if not begun:
                raise
            # Of joblib's advice the first sentence will do.
            reason = f"{type(error).__name__}: {one_line(error).partition('. ')[0]}"
            said = f"its worker was killed, or left without a word ({reason})"
            for number, outcome in begun.items():
                if outcome is None and number in suspects:
                    outcome = Outcome(error=f"{said}; give it more memory, or fewer jobs at a time")
                if outcome is not None:
                    known[number] = None, outcome
            suspects |= set(begun) - set(known)
            log.warning("the launcher broke off: %s; what is left is launched again", said)
        waiting = [number for number in waiting if number not in known]
    return [known[number] for number in range(first, first + len(jobs))]


def _batches(waiting: Iterable[int], suspects: set[int]) -> Iterator[list[int]]:
    """Jobs to launch together: neighbours, since a launcher counts from one number on, and suspects alone, at last."""
    unsuspected = [number for number in waiting if number not in suspects]
    for _, group in groupby(enumerate(unsuspected), lambda item: item[1] - item[0]):
        yield [number for _, number in group]
    yield from ([number] for number in waiting if number in suspects)


def _told(home: Path, number: int) -> Outcome | None:
    try:
        told = read_json(outcome_file(home, number))
    except KvxferError:
        return None
    return None if told is None else Outcome(**told)
