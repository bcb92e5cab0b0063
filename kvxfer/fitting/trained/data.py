"""Which rows a step trains on and where it cuts them: functions of the seed and the step alone.

A run that goes on from a checkpoint begins at the checkpoint's step, so nothing of a loader has to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvxfer.errors import KvxferError


class Step(NamedTuple):
    """What one step reads: its number (from 0), numbers of rows, and where the prefix of each row ends."""

    number: int
    rows: list[int]
    split: int


@dataclass(frozen=True)
class Schedule:
    """The steps of a run.

    Args:
        rows: how many training rows there are.
        length: tokens of a row.
        exact: first tokens of a row that are always the target's own.
        batch_size: rows of a step, over all devices.
        seed: of the order of rows and of the cuts.
    """

    rows: int
    length: int
    exact: int
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.rows < self.batch_size:
            raise KvxferError(
                f"trainer.batch_size={self.batch_size} is more than the {self.rows} training rows: lower it, or raise "
                "corpus.rows.training"
            )
        if self.exact + 1 > self.length - 2:
            raise KvxferError(
                f"corpus.length={self.length} leaves no prefix and continuation to train on after "
                f"corpus.skip_first={self.exact}: raise it"
            )

    @property
    def half(self) -> int:
        """Where rows are cut to validate: in the middle, after a mapped token at least."""
        return max(self.length // 2, self.exact + 1)

    def step(self, number: int, rank: int = 0, world: int = 1) -> Step:
        """A step, or the share of one of so many devices.

        Rows come in an order of their own in every pass over them. The cut is drawn from the quarters between: any
        token from ``length / 4`` to ``3 length / 4``.
        """
        first = number * self.batch_size
        rows = [self._row(n) for n in range(first, first + self.batch_size)]
        low = max(self.length // 4, self.exact + 1)
        high = max(low, min(3 * self.length // 4, self.length - 2))
        split = int(np.random.default_rng([self.seed, 1, number]).integers(low, high + 1))
        return Step(number, rows[rank::world], split)

    def _row(self, n: int) -> int:
        number, place = divmod(n, self.rows)
        return int(np.random.default_rng([self.seed, 0, number]).permutation(self.rows)[place])


def batches(rows: int, batch_size: int) -> list[list[int]]:
    """Row numbers in order, so many at a time."""
    return [list(range(first, min(first + batch_size, rows))) for first in range(0, rows, batch_size)]
