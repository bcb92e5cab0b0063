"""What a kind of evaluation tells: its words, tables, numbers and figures, all of it from its data alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text

from kvxfer.evals.statistics import scored_lists
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import Verdict

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


Json = Mapping[str, Any]
MOST_METRICS = 60


class KindReport(ABC):
    """The base of one report for each kind of evaluation (``kvxfer.report.kinds``).

    Every method is given what the evaluation measured: ``data`` of results.json. So reports of finished runs can be
    made again, and set side by side.

    Attributes:
        heading: what a report calls it.
        logged: what its numbers' names begin with where they are logged.
        against_source: whether its verdict is about the source; of times it is about the target's own prefill.
        decides: whether its verdict is that of a full report, whatever else is in it.
        sectioned: whether its sections have headings of their own on the level of ``heading``.
    """

    heading: ClassVar[str]
    logged: ClassVar[str]
    against_source: ClassVar[bool] = True
    decides: ClassVar[bool] = False
    sectioned: ClassVar[bool] = False

    @abstractmethod
    def verdict(self, data: Json) -> Verdict:
        """What it comes to, in a sentence with its numbers."""

    @abstractmethod
    def first_screen(self, data: Json) -> FirstScreen:
        """One figure, one narrow table, and what speaks against the verdict."""

    @abstractmethod
    def sections(self, data: Json) -> str:
        """Markdown: tables, what they mean, and the figures by the paths that ``figures`` gives them."""

    @abstractmethod
    def metrics(self, data: Json) -> dict[str, float]:
        """The numbers to log, flat."""

    @abstractmethod
    def figures(self, data: Json, folder: Path) -> None:
        """Draw into ``folder`` (``figures/`` beside the report) as ``<kind>_<name>.png``."""

    def cautions(self, data: Json) -> list[str]:
        """What a reader of the verdict must be warned of."""
        return []

    def remarks(self, data: Json) -> list[str]:
        """What stands in bold under the verdict: the cautions, and what else must be known with it."""
        return self.cautions(data)

    def by_task(self, data: Json) -> dict[str, Json]:
        """The ``conditions`` of every task that has answers, by its name, for the figure of all tasks."""
        return {}

    def paired(self, data: Json) -> dict[str, list[Json]]:
        """Lists of single items by name, on which two runs are tested; here by their nats."""
        return scored_lists(data)

    def evidence(self, data: Json) -> dict[str, Any]:
        """What is kept of the data beside the map; the verdict and the metrics are in any case."""
        return {}

    def swept(self, data: Json) -> dict[str, float | None]:
        """The numbers that a sweep has in its columns."""
        return dict(self.metrics(data))

    def logged_tables(self, data: Json) -> dict[str, Table]:
        """Whole tables to log, by name."""
        return {}

    def terminal(self, title: str, data: Json) -> RenderableType:
        """What a console shows at the end of the evaluation."""
        return Text(f"{title}\n{self.verdict(data).sentence}")

    def line(self, data: Json) -> str:
        """The same in one line, where something else ends with a table of its own."""
        return self.verdict(data).sentence

    def verdicts(self, several: Sequence[Json]) -> list[Verdict]:
        """The verdicts of runs that were asked the same."""
        return [self.verdict(data) for data in several]

    def beside(self, runs: Mapping[str, Json], figure: str) -> str:
        """Runs that were asked the same (results by label) in Markdown: verdicts, and a column of numbers for each."""
        several = [results["data"] for results in runs.values()]
        found = [self.metrics(data) for data in several]
        names = list(dict.fromkeys(name for metrics in found for name in metrics))
        rows = [(name, *(_plain(metrics.get(name)) for metrics in found)) for name in names[:MOST_METRICS]]
        said = {label: each.sentence for label, each in zip(runs, self.verdicts(several), strict=True)}
        return fill("beside", said=said, table=Table(("Measure", *runs), rows), more=len(names) - MOST_METRICS)

    def draw_beside(self, runs: Mapping[str, Json], path: Path) -> bool:
        """Draw the figure that ``beside`` names; False where it names none."""
        return False


def numbers_of(rows: Mapping[str, Json]) -> dict[str, float]:
    """Every number of some rows, flat."""
    return {
        f"{name}/{key}": value
        for name, row in rows.items()
        for key, value in row.items()
        if isinstance(value, int | float)
    }


def _plain(value: Any) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:,.4g}".replace("-", "\N{MINUS SIGN}")
