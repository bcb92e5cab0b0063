"""Combinations that a grid leaves out: a product of choices may hold some that no command accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.report.swept import write

Combination = dict[str, frozenset[str]]

KEY = "hydra.sweeper.skip"


def read_skip(given: Sequence[Any]) -> list[Combination]:
    """``hydra.sweeper.skip`` as texts: for each combination, the values of each of its keys.

    Raises:
        KvxferError: an entry is no mapping of keys to values, or an empty one, which would leave out everything.
    """
    combinations = []
    for entry in given:
        if not isinstance(entry, Mapping) or not entry:
            raise KvxferError(f"{KEY}: {entry} is no combination; write e.g. {{solver: head_local, features: [relu]}}")
        combinations.append({str(key): _texts(value) for key, value in entry.items()})
    return combinations


def _texts(value: Any) -> frozenset[str]:
    single = isinstance(value, str) or not isinstance(value, Sequence)
    return frozenset(_plain(write(item)) for item in ([value] if single else value))


def _plain(text: str) -> str:
    """A value's one spelling: 1 for 1.0, None for null."""
    try:
        return write(float(text))
    except ValueError:
        return "None" if text == "null" else text


def without_skipped(batches: list[list[list[str]]], combinations: Sequence[Combination]) -> list[list[list[str]]]:
    """Batches of jobs (their overrides) less those in which every key of a combination has one of its values.

    Raises:
        KvxferError: a combination names a key that the grid does not give, or no job is left.
    """
    known = {override.partition("=")[0] for batch in batches for job in batch for override in job}
    for key in (key for combination in combinations for key in combination):
        if key not in known:
            raise KvxferError(f"{KEY}: {key} is not swept; name keys of hydra.sweeper.params or of the command line")
    kept = [[job for job in batch if not _skipped(job, combinations)] for batch in batches]
    if not any(kept):
        raise KvxferError(f"{KEY} leaves out every job of the grid; remove one of its combinations")
    return [batch for batch in kept if batch]


def _skipped(job: Sequence[str], combinations: Sequence[Combination]) -> bool:
    values = {key: _plain(text) for key, _, text in (override.partition("=") for override in job)}
    return any(all(values[key] in wanted for key, wanted in each.items()) for each in combinations)
