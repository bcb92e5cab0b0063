"""A sweep as a figure: each measure over one swept value, with a line for every combination of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from kvxfer.report.figures import COLOURS, canvas, label, tidy
from kvxfer.report.swept import Measure, Numbers, Value, write

Point = tuple[Mapping[str, Value], Numbers]

_GEOMETRIC_FROM = 3  # two values are as far apart on any axis
_CROWDED = 12


def draw(points: Sequence[Point], measures: Sequence[Measure], path: Path) -> bool:
    """Draw the finished jobs of a sweep as PNG; False if there is nothing to draw over or no measure.

    The axis across is the swept key with the most values among those whose values are numbers (logarithmic if they grow
    by a factor), else the first key, whose values then stand side by side.
    """
    keys = list(points[0][0]) if points else []
    if not keys or not measures:
        return False
    numeric = [key for key in keys if all(_is_number(values[key]) for values, _ in points)]
    across = max(numeric, key=lambda key: len({values[key] for values, _ in points}), default=keys[0])
    places = _Places(across, [values[across] for values, _ in points])
    lines = _lines(points, across)
    # From light to dark in the grid's order.
    shades = colormaps["viridis"](np.linspace(0.0, 0.88, len(lines))[::-1])
    colours = list(shades) if len(lines) > 1 else [COLOURS["mapped"]]
    with canvas(path, (4.7 * len(measures) + (1.6 if len(lines) > 1 else 0.3), 3.8)) as figure:
        panels = figure.subplots(1, len(measures), squeeze=False)[0]
        for axes, measure in zip(panels, measures, strict=True):
            for (name, members), colour in zip(lines.items(), colours, strict=True):
                _line(axes, measure, places, members, name, colour)
            _baselines(axes, measure, points)
            places.prepare(axes)
            axes.set_title(measure.label, loc="left", fontweight="bold")
            if measure.share:
                axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
            tidy(axes)
        if len(lines) > 1:
            handles, labels = panels[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    return True


def geometric(values: Sequence[int | float]) -> bool:
    """Whether numbers grow by a factor rather than by a step, so that a logarithmic axis spreads them evenly.

    Zero may be among them (no penalty at all); negative numbers may not.
    """
    positive = sorted({value for value in values if value > 0})
    if any(value < 0 for value in values) or len(positive) < _GEOMETRIC_FROM:
        return False
    steps = np.array([b - a for a, b in pairwise(positive)])
    factors = np.array([math.log(b / a) for a, b in pairwise(positive)])
    return bool(factors.std() / factors.mean() < steps.std() / steps.mean())


class _Places:
    """Where the values of the axis across lie on it."""

    def __init__(self, key: str, values: Sequence[Value]) -> None:
        self.key = key
        unique = list(dict.fromkeys(values))
        self.numbers = [float(value) for value in unique if _is_number(value)]  # type: ignore[arg-type]
        self.names = None if len(self.numbers) == len(unique) else [write(value) for value in unique]
        self.log = self.names is None and geometric(self.numbers)

    def of(self, value: Value) -> float:
        """A value's place, and the order of points along a line."""
        return float(value) if self.names is None else float(self.names.index(write(value)))  # type: ignore[arg-type]

    def prepare(self, axes: Axes) -> None:
        """Scale, ticks and name of the axis."""
        axes.set_xlabel(self.key)
        if self.names is not None:
            axes.set_xticks(range(len(self.names)), self.names)
            axes.set_xlim(-0.5, len(self.names) - 0.5)
            return
        least = min((number for number in self.numbers if number > 0), default=1.0)
        if self.log and min(self.numbers) == 0:
            axes.set_xscale("symlog", linthresh=least)
        elif self.log:
            axes.set_xscale("log")
        # Matplotlib's own ticks are powers of ten: enough where these are the very values.
        decades = self.log and all(n > 0 and math.isclose(math.log10(n), round(math.log10(n))) for n in self.numbers)
        if len(self.numbers) <= _CROWDED and not decades:
            axes.set_xticks(self.numbers, [write(number) for number in self.numbers])
            axes.minorticks_off()


def _lines(points: Sequence[Point], across: str) -> dict[str, list[Point]]:
    """The points of each line by its name: the other swept keys with their values."""
    lines: dict[str, list[Point]] = {}
    for values, found in points:
        name = ", ".join(f"{key}={write(value)}" for key, value in values.items() if key != across)
        lines.setdefault(name, []).append((values, found))
    return lines


def _line(axes: Axes, measure: Measure, places: _Places, members: Sequence[Point], name: str, colour: object) -> None:
    found_ones = [(places.of(values[places.key]), found) for values, found in members]
    drawn = sorted((p for p in found_ones if p[1].get(measure.key) is not None), key=lambda point: point[0])
    x = [place for place, _ in drawn]
    y = [float(found[measure.key] or 0.0) for _, found in drawn]
    style = "none" if places.names is not None else "-"
    axes.plot(x, y, marker="o", markersize=5, linestyle=style, linewidth=1.8, color=colour, label=name, zorder=3)
    for place, found in drawn:
        low, high = found.get(f"{measure.key}_low"), found.get(f"{measure.key}_high")
        if low is not None and high is not None:
            axes.plot([place, place], [low, high], color=colour, linewidth=1.2, alpha=0.55, zorder=2)


def _baselines(axes: Axes, measure: Measure, points: Sequence[Point]) -> None:
    """The source and the ceiling across the panel, where all jobs agree on them."""
    for name, column in measure.lines.items():
        value, *others = {found.get(column) for _, found in points}
        if value is None or others:
            continue
        colour = COLOURS["source" if name == "source alone" else "ceiling"]
        axes.axhline(value, color=colour, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        label(axes, name, (1, value), (-3, 3), ("axes fraction", "data"), color=colour, ha="right", va="bottom")


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
