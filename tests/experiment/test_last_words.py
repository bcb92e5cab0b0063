"""The end of a command, and of a sweep: nothing is lost to a terminal, a closed pipe or a killed worker."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.text import Text

from kvxfer.errors import KvxferError
from kvxfer.experiment.sweeps.jobs import Job, Outcome
from kvxfer.experiment.sweeps.launching import run_all, tell
from kvxfer.experiment.sweeps.summary import SUMMARY, summarise
from kvxfer.report import console
from kvxfer.report.console import say
from kvxfer.report.table import Table

JOBS = [[f"a={number}"] for number in range(5)]


def test_a_terminal_that_knows_ascii_is_given_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    say(Table(("R²",), [("−1 %",)]).terminal(), Text("λ"), "ä", Path("/ö"))
    assert out.getvalue().decode("ascii").split()[-3:] == ["?", "?", "/?"]


@pytest.mark.parametrize("thing", ["a line", Text("a text"), Table(("a",), [("b",)]).terminal()], ids=type)
def test_a_pipe_that_is_closed_ends_nothing(thing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        say(thing)
        say("more")


def test_a_full_disk_behind_stdout_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(console.log, "warning", lambda text, *given: said.append(text % given))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("a line")
    assert said == ["standard output takes no more (No space left on device); the files are complete"]


def test_a_sweep_is_written_before_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        assert (tmp_path / SUMMARY).is_file()
        raise ZeroDivisionError

    monkeypatch.setattr("kvxfer.experiment.sweeps.summary.say", never)
    with pytest.raises(ZeroDivisionError):
        summarise("train", tmp_path, [Job(0, {"a": 1}, {})], [Outcome(error="no")])


def test_a_sweep_whose_files_cannot_be_written_is_still_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KvxferError, match=r"1 of 1 jobs failed"):
        summarise("train", tmp_path / "file", [Job(0, {"a": 1}, {})], [Outcome(error="no memory")])
    assert "no memory" in capsys.readouterr().out


class Pool:
    """A launcher whose workers some jobs kill: each so many times."""

    def __init__(self, home: Path, kills: dict[int, int], together: int = 2) -> None:
        self.home, self.kills, self.together = home, kills, together
        self.launched: list[list[int]] = []
        (home / "jobs").mkdir()

    def __call__(self, jobs: list[list[str]], initial_job_idx: int) -> Sequence[Any]:
        numbers = list(range(initial_job_idx, initial_job_idx + len(jobs)))
        assert jobs == [JOBS[number] for number in numbers]
        self.launched.append(numbers)
        returns = []
        for start in range(0, len(numbers), self.together):
            running = numbers[start : start + self.together]
            for number in running:
                tell(self.home, number, None)
            for number in running:
                if self.kills.get(number, 0):
                    self.kills[number] -= 1
                    raise RuntimeError("A worker was terminated")
            for number in running:
                tell(self.home, number, outcome := Outcome(run=f"run {number}"))
                returns.append(SimpleNamespace(return_value=outcome))
        return returns


@pytest.mark.parametrize("kills", [{}, {2: 1}, {2: 9}, {3: 9}, {0: 9, 4: 1}])
def test_a_killed_worker_costs_its_own_job_alone(kills: dict[int, int], tmp_path: Path) -> None:
    """Jobs that ran beside it run again, one by one; one that kills its worker twice has failed."""
    pool = Pool(tmp_path, dict(kills))
    outcomes = [outcome for _, outcome in run_all(pool, JOBS, 0, tmp_path)]
    for number, outcome in enumerate(outcomes):
        if kills.get(number, 0) > 1:
            assert outcome.error is not None
            assert "its worker was killed" in outcome.error
        else:
            assert outcome == Outcome(run=f"run {number}")
    assert sum(1 in numbers for numbers in pool.launched) == (2 if 0 in kills else 1)


def test_a_launcher_that_starts_no_job_is_no_killed_worker(tmp_path: Path) -> None:
    def launch(jobs: list[list[str]], initial_job_idx: int) -> Sequence[Any]:
        raise ValueError("n_jobs == 0 has no meaning")

    with pytest.raises(ValueError, match="n_jobs"):
        run_all(launch, JOBS, 0, tmp_path)
