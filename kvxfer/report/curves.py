"""What automatic choices saw: validation quality against λ, α, rank and k, in one figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MARK, STYLE

Curve = dict[int | float, float]

KIND_COLOURS = {"keys": COLOURS["mapped"], "values": COLOURS["source"]}
TITLES = {"lam": "λ (relative)", "alpha": "α", "rank": "rank", "k": "source layers per target layer"}
OTHER_COLOURS = (INK, MARK, COLOURS["identity"])
LOWEST = -0.5
"""Scores below are drawn there: what overfits by far would squeeze the rest into one line."""


def tried(curves: Mapping[str, Any]) -> dict[str, dict[str, Curve]]:
    """Score by value of every output, for each dial that had a choice; the best over the other dials of the penalty.

    Args:
        curves: those of a fit: ``penalty`` (per output: λ, α, score), ``rank`` (per output: rank, score), and ``k`` or
            ``k_outputs`` (per output) or ``k_candidates`` (per solver that ``auto`` tried).
    """
    found: dict[str, dict[str, Curve]] = {}
    for dial, place in (("lam", 0), ("alpha", 1)):
        for output, points in curves.get("penalty", {}).items():
            curve: Curve = {}
            for point in points:
                curve[point[place]] = max(point[2], curve.get(point[place], point[2]))
            found.setdefault(dial, {})[output] = curve
    found["rank"] = {output: {rank: score for rank, score in points} for output, points in curves["rank"].items()}
    if "k_outputs" in curves:
        found["k"] = {output: {k: score for k, score in points} for output, points in curves["k_outputs"].items()}
    elif "k" in curves:
        found["k"] = {"mean of all": {k: score for k, score in curves["k"]}}
    elif "k_candidates" in curves:
        found["k"] = {
            _candidate(name): {k: score for k, score in points} for name, points in curves["k_candidates"].items()
        }
    return {dial: lines for dial, lines in found.items() if any(len(curve) > 1 for curve in lines.values())}


def _candidate(name: str) -> str:
    """A line's label: weighted's scores weigh tokens, so its line says nothing of whether it is better than another."""
    return "weighted (tokens weighed)" if name == "weighted" else name


def curves_figure(curves: Mapping[str, Any], path: Path | str) -> bool:
    """Draw a panel for every dial with a choice, as PNG: thin lines are single outputs, thick ones their mean.

    Returns:
        Whether there was anything to draw.
    """
    panels = tried(curves)
    if not panels:
        return False
    with rc_context(STYLE):
        figure = Figure(figsize=(3.4 * len(panels) + 0.6, 3.2), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (dial, lines) in zip(all_axes, panels.items(), strict=True):
            _panel(axes, dial, lines)
        all_axes[0].set_ylabel("validation score")
        figure.savefig(path, dpi=DPI, facecolor="white")
    return True


def _panel(axes: Axes, dial: str, lines: Mapping[str, Curve]) -> None:
    for n, name in enumerate(dict.fromkeys(output.partition(".")[0] for output in lines)):
        own = [curve for output, curve in lines.items() if output.partition(".")[0] == name]
        colour = KIND_COLOURS.get(name, OTHER_COLOURS[n % len(OTHER_COLOURS)])
        for curve in own if len(own) > 1 else []:
            axes.plot(list(curve), np.clip(list(curve.values()), LOWEST, None), color=colour, alpha=0.25, linewidth=0.8)
        # Outputs may differ in what they try: the mean is over what all of them did.
        common = [value for value in own[0] if all(value in curve for curve in own)]
        values = np.clip([[curve[value] for value in common] for curve in own], LOWEST, None).mean(0)
        axes.plot(common, values, color=colour, linewidth=2, marker="o", markersize=4, label=name)
    if dial == "lam":
        axes.set_xscale("log")
    elif dial in ("k", "rank"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(TITLES[dial])
    axes.grid(color=LINE, linewidth=0.8)
    axes.tick_params(length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
