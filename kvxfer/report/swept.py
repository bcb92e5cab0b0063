"""What tells the runs of a sweep apart, and what is shown of them: swept values, numbers and measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = bool | int | float | str | None
Numbers = dict[str, float | None]


def write(value: Value) -> str:
    """A swept value as a reader writes it: 1e-06, 0.5, 12, auto."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Measure:
    """A number that is shown: a panel of the figure, a column of the table, or both.

    Attributes:
        key: its column in the CSV; ``<key>_low`` and ``<key>_high`` beside it are its 95 % interval.
        label: for axes and headings.
        panel: whether the figure draws it.
        column: whether the table shows it.
        share: whether it is written in per cent.
        lines: what else is drawn across its panel: the column of each by name.
    """

    key: str
    label: str
    panel: bool = True
    column: bool = True
    share: bool = False
    lines: Mapping[str, str] = field(default_factory=dict)
