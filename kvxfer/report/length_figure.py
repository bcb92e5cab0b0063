"""Quality against the prefix's length, one line per domain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.evals.lengths import by_length, recovered
from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE

DOMAIN_COLOURS = (COLOURS["mapped"], "#2f9e6e", "#a04fa8", "#c0392b", "#7a6a1d")
LOWEST, HIGHEST = -1.0, 1.5
"""Shares of the gap beyond are drawn there: where there is hardly a gap, a ratio may be anything."""

LOG_FROM = 8.0
"""Perplexities that far apart are drawn on a logarithmic axis."""


def lengths_figure(data: Mapping[str, Any], path: Path) -> None:
    """Gap recovered (left) and perplexity (right) against the prefix's length, with 95 % intervals, as PNG."""
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.9))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        left, right = figure.subplots(1, 2)
        for n, domain in enumerate(data["domains"]):
            colour = DOMAIN_COLOURS[n % len(DOMAIN_COLOURS)]
            points = by_length(data["points"], domain["domain"])
            _shares(left, points, colour, domain["domain"])
            _levels(right, points, colour, named=n == 0)
        left.axhline(0, color=COLOURS["source"], linewidth=1.3, linestyle=(0, (5, 3)))
        left.axhline(1, color=COLOURS["ceiling"], linewidth=1.1, linestyle=":")
        _label(left, 0.0, "source alone", COLOURS["source"])
        _label(left, 1.0, "ceiling", COLOURS["ceiling"])
        left.set_ylabel("gap recovered (nats)")
        left.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %".replace("-", "\N{MINUS SIGN}"))
        low, high = left.get_ylim()
        left.set_ylim(max(low, LOWEST - 0.1), min(high, HIGHEST + 0.1))
        right.set_ylabel("perplexity (lower is better)")
        low, high = right.dataLim.intervaly
        if low > 0 and high / low > LOG_FROM:
            right.set_yscale("log")
            right.yaxis.set_major_formatter("{x:g}")
        lengths = sorted({point["prefix"] for point in data["points"]})
        for axes in (left, right):
            _axis(axes, lengths, data["calibrated_length"])
        figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=5, loc="outside lower left")
        figure.legend(*right.get_legend_handles_labels(), frameon=False, fontsize=9, ncols=3, loc="outside lower right")
        figure.savefig(path, dpi=DPI, facecolor="white")


def _shares(axes: Axes, points: Mapping[int, Mapping[str, Any]], colour: str, name: str) -> None:
    found = {length: recovered(point) for length, point in points.items()}
    kept = [length for length, share in found.items() if share is not None]
    values = np.clip([found[length] for length in kept], LOWEST, HIGHEST)
    axes.plot(kept, values, color=colour, linewidth=2, marker="o", markersize=6, label=name)
    for length, value in zip(kept, values, strict=True):
        ci = points[length]["conditions"]["mapped"]["gap_recovered_nats_ci"]
        if ci is None:
            # A gap whose sign is not sure: a share of it says little.
            axes.plot(length, value, marker="o", markersize=6, color=colour, markerfacecolor="white", zorder=4)
        else:
            axes.plot([length, length], np.clip(ci, LOWEST, HIGHEST), color=colour, linewidth=2.2, alpha=0.45)


def _levels(axes: Axes, points: Mapping[int, Mapping[str, Any]], colour: str, named: bool) -> None:
    """The mapped cache with its interval, the source dashed and the ceiling dotted."""
    lengths = list(points)
    looks: dict[str, dict[str, Any]] = {
        "mapped": {"marker": "o", "linewidth": 2},
        "source": {"linestyle": (0, (5, 3)), "linewidth": 1.4},
        "ceiling": {"linestyle": ":", "linewidth": 1.6},
    }
    for condition, look in looks.items():
        rows = [points[length]["conditions"][condition] for length in lengths]
        values = [np.nan if row["perplexity"] is None else row["perplexity"] for row in rows]
        axes.plot(lengths, values, color=colour, label=condition if named else None, **look)
        if condition == "mapped":
            for length, row in zip(lengths, rows, strict=True):
                if row["perplexity"] is not None:
                    axes.plot([length] * 2, np.exp(row["nats_ci"]), color=colour, linewidth=2.2, alpha=0.45)


def _label(axes: Axes, y: float, text: str, colour: str) -> None:
    place = axes.annotate(text, (1.0, y), (-2, 2), xycoords=("axes fraction", "data"), textcoords="offset points")
    place.set(ha="right", va="bottom", fontsize=8.5, color=colour)


def _axis(axes: Axes, lengths: list[int], calibrated: int | None) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlim(lengths[0] / math.sqrt(2), lengths[-1] * math.sqrt(2))
    axes.set_xlabel("prefix, tokens")
    if calibrated is not None and axes.get_xlim()[0] <= calibrated <= axes.get_xlim()[1]:
        axes.axvline(calibrated, color=MUTED, linewidth=1.1, linestyle="-", alpha=0.5, zorder=0)
        place = axes.annotate(
            "calibrated", (calibrated, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points"
        )
        place.set(ha="center", va="bottom", fontsize=9, color=MUTED)
    axes.grid(axis="y", color=LINE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
