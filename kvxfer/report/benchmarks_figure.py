"""Scores of every benchmark under its conditions, drawn without pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.report.figures import COLOURS, CONTROL, DPI, LINE, MUTED, STYLE
from kvxfer.report.wording import condition_name

_SHOWN = ("ceiling", "source", "mapped", "floor")
_SPREAD = 0.19
"""Between the rows of one benchmark, which has a height of 1."""


def benchmarks_figure(benchmarks: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """A group of four rows for every benchmark, each a dot with its 95 % interval; chance is a dotted mark, as PNG."""
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 0.95 * len(benchmarks) + 1.5))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        for y, each in enumerate(benchmarks):
            _group(axes, y, each)
        axes.set_yticks(range(len(benchmarks)), [each["name"] for each in benchmarks])
        axes.set_ylim(len(benchmarks) - 0.45, -0.55)
        axes.set_xlim(0, 1.1)
        axes.set_xticks(np.linspace(0, 1, 6), [f"{tick:.0f} %" for tick in np.linspace(0, 100, 6)])
        axes.set_xlabel("score, 95 % interval; dotted: chance")
        axes.grid(axis="x", color=LINE, linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        for y in range(1, len(benchmarks)):
            axes.axhline(y - 0.5, color=LINE, linewidth=0.8)
        handles = [axes.plot([], [], "o", color=_colour(name), label=condition_name(name))[0] for name in _SHOWN]
        figure.legend(handles=handles, loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _group(axes: Axes, y: int, benchmark: Mapping[str, Any]) -> None:
    if benchmark["chance"]:
        axes.plot([benchmark["chance"]] * 2, [y - 0.42, y + 0.42], ":", color=MUTED, linewidth=1.3, zorder=2)
    for place, name in enumerate(_SHOWN):
        row = benchmark["conditions"][name]
        height, colour = y + (place - 1.5) * _SPREAD, _colour(name)
        axes.plot(row["accuracy_ci"], [height, height], color=colour, linewidth=2.2, zorder=3)
        axes.plot(row["accuracy"], height, "o", markersize=7, color=colour, zorder=4)
        text = f"{100 * row['accuracy']:.1f} %"
        weight = "bold" if name == "mapped" else "normal"
        at = (max(row["accuracy_ci"][1], row["accuracy"]), height)
        axes.annotate(text, at, (7, 0), textcoords="offset points", va="center", fontsize=9, fontweight=weight)


def _colour(name: str) -> str:
    return COLOURS.get(name, CONTROL)
