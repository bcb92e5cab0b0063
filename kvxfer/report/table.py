"""Tables: made once, shown as Markdown, on a terminal or as CSV."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.text import Text

from kvxfer.report.numbers import NOTHING
from kvxfer.report.prose import plain_text


@dataclass(frozen=True)
class Table:
    """Headings, and rows with a cell for each; as text it is Markdown.

    Attributes:
        columns: a heading may have line breaks, which only a terminal shows.
        rows: cells for a reader are text; those of a CSV may be numbers or None.
        right: whether all columns but the first are aligned right.
        whole: columns whose cells a narrow terminal does not break.
        styles: how a terminal shows a cell, by row and column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    right: bool = True
    whole: Collection[int] = ()
    styles: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, things: Iterable[Any], *columns: tuple[str, Callable[[Any], Any]], right: bool = True) -> Table:
        """A row for each thing: under every heading what its function makes of the thing."""
        return cls([heading for heading, _ in columns], [[cell(each) for _, cell in columns] for each in things], right)

    def only(self, *headings: str) -> Table:
        """The columns of these headings, in this order; of equal headings the first."""
        places = [self.columns.index(heading) for heading in headings if heading in self.columns]
        return Table(headings, [[row[n] for n in places] for row in self.rows], self.right)

    @property
    def filled(self) -> list[int]:
        """The columns that hold something; the first is always among them."""
        return [n for n in range(len(self.columns)) if n == 0 or any(row[n] not in ("", NOTHING) for row in self.rows)]

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        kept = self.filled
        marks = ["--:" if n and self.right else ":--" for n in kept]
        cells = [[plain_text(row[n]).replace("|", "\\|") for n in kept] for row in self.rows]
        return [f"| {' | '.join(line)} |" for line in ([self.columns[n] for n in kept], marks, *cells)]

    def __str__(self) -> str:
        return "\n".join(self.markdown())

    def terminal(self, title: str | None = None, caption: str | None = None, tight: bool = False) -> rich.table.Table:
        """For a console; ``tight`` leaves one space between columns, so that many of them fit."""
        shown = rich.table.Table(
            title=None if title is None else Text(title, style="bold"),
            caption=None if caption is None else Text(f"\n{caption}", style="not italic"),
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
            show_edge=False,
            pad_edge=False,
            padding=(0, 0) if tight else (0, 1),
        )
        kept = self.filled
        for n in kept:
            justify, whole = "right" if n and self.right else "left", n in self.whole
            # Cut short, two names could look alike; so what does not fit goes on in the next line.
            shown.add_column(self.columns[n], justify=justify, no_wrap=whole, overflow="fold")  # type: ignore[arg-type]
        for place, row in enumerate(self.rows):
            shown.add_row(*(Text(str(row[n]), style=self.styles.get((place, n), "")) for n in kept))
        return shown

    def write_csv(self, path: Path) -> Path:
        """Every column as it is, None as an empty cell; whole or not at all."""
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([self.columns, *self.rows])
        os.replace(temporary, path)
        return path
