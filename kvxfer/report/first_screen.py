"""What someone in a hurry sees of a report: the verdict, one figure, one narrow table, and what speaks against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.report.prose import fill
from kvxfer.report.table import Table

MOST_COLUMNS = 7
"""So many fit a page of 1,280 pixels; wider tables stand in the sections below, which fold out."""


@dataclass(frozen=True)
class FirstScreen:
    """What stands under the verdict.

    Attributes:
        table: at most MOST_COLUMNS columns that hold something.
        figure: its path beside the report; None where there is none.
        caption: what the figure shows.
        against: sentences that a reader who believes the verdict should know.
    """

    table: Table
    figure: str | None = None
    caption: str = ""
    against: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert len(self.table.filled) <= MOST_COLUMNS, self.table.columns

    def markdown(self, said: Sequence[str]) -> str:
        """The whole screen; ``said`` are the verdict and what must be known with it, in bold."""
        return fill("first_screen", said=said, screen=self)
