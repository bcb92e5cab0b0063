"""Figures of an evaluation, drawn without pyplot and its global state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import CONDITIONS
from kvxfer.report.wording import condition_name

INK, MUTED, LINE = "#1f2933", "#5f6c7b", "#d9dee4"
COLOURS = {
    "ceiling": "#52667a",
    "identity": "#8797a8",
    "source": "#d9822b",
    "mapped": "#1d6fb8",
    "mapped_all": "#62a3da",
}
CONTROL = "#b9c1ca"
MARK = "#e8590c"
DOMAIN_COLOURS = (COLOURS["mapped"], "#2f9e6e", "#a04fa8", "#c0392b", "#7a6a1d")
"""A text's line, where there are several texts."""

NUMBERS_UP_TO = 12
DPI = 160
LOG_FROM = 20.0
NEAR = 0.15  # accuracies whose names would touch
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.titlesize": 11,
}


SHARES = (np.linspace(0, 1, 6), [f"{tick:.0f} %" for tick in np.linspace(0, 100, 6)])
"""Ticks of an axis of shares."""


@contextmanager
def canvas(path: Path | str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure of so many inches in the project's style, with room at its edges; written as PNG at the end."""
    with rc_context(STYLE):
        figure = Figure(figsize=size)
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        yield figure
        figure.savefig(path, dpi=DPI, facecolor="white")


def tidy(axes: Axes, grid: Literal["x", "y", "both"] | None = "y", keep: Sequence[str] = ("bottom",)) -> None:
    """Take away what shows no number: ticks' marks and all spines but those kept; lines of a grid lie behind."""
    if grid is not None:
        axes.grid(axis=grid, color=LINE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, which="both")
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)


def label(
    axes: Axes,
    text: str,
    at: tuple[float | int, float | int],
    shift: tuple[int, int],
    coords: tuple[str, str] = ("data", "data"),
    pad: float | None = None,
    **look: Any,
) -> None:
    """Words at a place, moved by so many points; with ``pad`` on white, so that lines do not run through them."""
    look = {"fontsize": 9, **look}
    words = axes.annotate(text, at, shift, xycoords=coords, textcoords="offset points", **look)
    if pad is not None:
        words.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": pad, "alpha": 0.85})


def heat_panel(
    axes: Axes,
    grid: Float[np.ndarray, "rows columns"],
    lowest: float = 0.0,
    names: Sequence[int] | None = None,
    aspect: Literal["equal", "auto"] = "equal",
) -> Any:
    """Values as colours from ``lowest`` to 1; cells of a small grid have their numbers, those without one are grey.

    Args:
        names: what the columns stand for (0, 1, ... without it).
    """
    rows, columns = grid.shape
    small = is_small(grid)
    colours = colormaps["Blues"].with_extremes(bad="#eceff2")
    image = axes.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=lowest, vmax=1.0, aspect=aspect)
    for (row, column), value in np.ndenumerate(grid):
        if small and np.isfinite(value):
            colour = "white" if value > lowest + 0.6 * (1 - lowest) else INK
            text = f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
    step = 1 if small else max(1, round(max(grid.shape) / 9))
    axes.set_xticks(range(0, columns, step), [str(name) for name in (names or range(columns))[::step]])
    axes.set_yticks(range(0, rows, step))
    tidy(axes, None, keep=())
    return image


def is_small(grid: Float[np.ndarray, "rows columns"]) -> bool:
    """Whether there is room for numbers in a grid's cells."""
    return max(grid.shape) <= NUMBERS_UP_TO


def _ordered(conditions: Mapping[str, Mapping[str, Any]], measure: str, keep: bool) -> list[str]:
    known = [] if keep else [c for c in CONDITIONS if c in conditions]
    known += [c for c in conditions if c not in known]
    return [c for c in known if conditions[c].get(measure) is not None]


def _draw_rows(axes: Axes, rows: Sequence[str], conditions: Mapping[str, Mapping[str, Any]], measure: str) -> None:
    """Bars from zero with whiskers for shares, dots with whiskers for nats, and the value to the right of each."""
    share = measure == "accuracy"
    for y, name in enumerate(rows):
        value = conditions[name][measure]
        low, high = conditions[name].get(f"{measure}_ci") or (value, value)
        colour = COLOURS.get(name, COLOURS["mapped"] if name.startswith("mapped") else CONTROL)
        if share:
            axes.barh(y, value, height=0.64, color=colour, zorder=2)
        else:
            axes.plot(value, y, "o", markersize=8, color=colour, zorder=3)
        axes.plot([low, high], [y, y], color=INK if share else colour, linewidth=1.3 if share else 2.2, zorder=3)
        if share:
            axes.plot([low, high], [y, y], "|", color=INK, markersize=6, markeredgewidth=1.3, zorder=3)
        text = f"{100 * value:.1f} %" if share else f"{value:.2f}"
        weight = "bold" if name.startswith("mapped") else "normal"
        at = (max(high, value), y)
        label(axes, text, at, (7, 0), pad=0.8, va="center", fontsize=9.5, fontweight=weight, zorder=5)


def conditions_figure(
    conditions: Mapping[str, Mapping[str, Any]],
    path: Path | str,
    chance: float | int | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Accuracy (nats per token without one) of every condition with its 95 % interval, as PNG.

    The source's value is drawn across as the line to beat, chance as a dotted one. ``names`` overrides row labels,
    and with it rows keep the order they are given in.
    """
    has_accuracy = any(row.get("accuracy") is not None for row in conditions.values())
    measure = "accuracy" if has_accuracy else "nats"
    rows = _ordered(conditions, measure, keep=names is not None)
    if not rows:
        raise KvxferError("conditions: none has an accuracy or nats to draw; score at least one condition")
    values = [conditions[c][measure] for c in rows]
    with canvas(path, (8.2, 0.42 * len(rows) + 1.25)) as figure:
        axes = figure.subplots()
        _draw_rows(axes, rows, conditions, measure)
        axes.set_yticks(range(len(rows)), [(names or {}).get(c) or condition_name(c) for c in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        if has_accuracy:
            axes.set_xlim(0, 1.13)
            axes.spines["bottom"].set_bounds(0, 1)
            axes.set_xticks(*SHARES)
            axes.set_xlabel("accuracy, 95 % interval")
        else:
            _scale_nats(axes, values)
        if "source" in rows:
            line = conditions["source"][measure]
            axes.axvline(line, color=COLOURS["source"], linewidth=1.4, linestyle=(0, (5, 3)), zorder=4)
            side = _side(line, chance) if has_accuracy and chance else "center"
            name_line(axes, line, "source alone", COLOURS["source"], side)
        if has_accuracy and chance:
            axes.axvline(chance, color=MUTED, linewidth=1.1, linestyle=":", zorder=4)
            name_line(axes, chance, "chance", MUTED, _side(chance, line) if "source" in rows else "center")
        tidy(axes, "x")


def _side(x: float, other: float) -> str:
    """How a line's name stands over it: away from another line's name that is near."""
    if abs(x - other) > NEAR:
        return "center"
    return "right" if x < other else "left"


def name_line(axes: Axes, x: float | int, text: str, colour: str, side: str = "center") -> None:
    """A vertical line's name above the axes."""
    label(axes, text, (x, 1.0), (0, 3), ("data", "axes fraction"), ha=side, va="bottom", color=colour)


def _scale_nats(axes: Axes, values: Sequence[float]) -> None:
    """Linear from zero, logarithmic where the worst condition would squeeze the others into one point."""
    axes.set_xlabel("nats per token (lower is better), 95 % interval")
    if min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, 1.25 * max(max(values), 1e-6))


CYCLE = (COLOURS["mapped"], COLOURS["source"], "#3a8f5c", "#8a5aa8")
DODGE_UP_TO = 12
"""Points are few enough to stand beside each other with whiskers; more of them get a band."""


@dataclass(frozen=True)
class Series:
    """One line: places along the axis, values, their intervals ([low, high], or None); ``dashed`` for a reference."""

    name: str
    places: Sequence[int]
    values: Sequence[float]
    intervals: Sequence[Sequence[float] | None]
    colour: str | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One measure. ``zero`` names the line at 0; ``log`` is for values of many magnitudes; ``limits`` of the axis."""

    label: str
    axis: str
    series: Sequence[Series]
    zero: str | None = None
    log: bool = False
    limits: tuple[float, float] | None = None


def series_figure(panels: Sequence[Panel], path: Path) -> None:
    """Panels side by side with one legend above them, as PNG."""
    with canvas(path, (8.2 if len(panels) > 1 else 5.6, 3.7)) as figure:
        drawn = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(drawn, panels, strict=True):
            _draw_panel(axes, panel)
        known = drawn[0].get_legend_handles_labels()
        figure.legend(*known, loc="outside upper left", ncols=4, frameon=False, fontsize=9.5, labelcolor=INK)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    count = sum(not line.dashed for line in panel.series)
    for n, line in enumerate(panel.series):
        colour = line.colour or CYCLE[n % len(CYCLE)]
        few = len(line.places) <= DODGE_UP_TO
        marker = "o" if few and not line.dashed else None
        places = [place + (0.09 * (n - (count - 1) / 2) if marker else 0.0) for place in line.places]
        style = (0, (2, 2)) if line.dashed else "-"
        axes.plot(places, line.values, color=colour, label=line.name, linestyle=style, marker=marker, ms=5, zorder=4)
        known = [(p, *ends) for p, ends in zip(places, line.intervals, strict=True) if ends is not None]
        if few:
            for place, low, high in known:
                axes.plot([place, place], [low, high], color=colour, linewidth=1.6, alpha=0.75, zorder=3)
        elif known:
            at, lows, highs = zip(*known, strict=True)
            axes.fill_between(at, lows, highs, color=colour, alpha=0.18, linewidth=0, zorder=2)
    if panel.zero is not None:
        axes.axhline(0, color=COLOURS["ceiling"], linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        label(axes, panel.zero, (1, 0), (3, 0), ("axes fraction", "data"), va="center", color=COLOURS["ceiling"])
    if panel.log:
        axes.set_yscale("log")
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.label, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(panel.axis, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    tidy(axes, keep=("left", "bottom"))
