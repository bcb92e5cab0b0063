"""The parts of a handoff by context length, against the target's own prefill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.evals.evaluation import Data
from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE
from kvxfer.report.latency import NAMES, milliseconds

Point = Mapping[str, Any]

# From the map's blues to the target's own greys, in the order in which they happen.
PARTS = {
    "export": "#0b3c66",
    "strip": "#145591",
    "map": COLOURS["mapped"],
    "restore": COLOURS["mapped_all"],
    "exact": "#3d8f7a",
    "inject": "#7fbfae",
    "held_back": "#b7dcd2",
    "first_decode": "#e3c878",
}
NARROW = 0.36
MOST_BATCHES = 3


def latency_figure(data: Data, path: Path | str) -> None:
    """Stacked parts of the handoff (left bar of each length) and the target's own prefill (right), as shares of it.

    The source's prefill stands in outline on top of the handoff: what counts besides when nothing has run yet. One
    panel per batch size, the smallest three.
    """
    batches = sorted({point["batch"] for point in data["points"]})[:MOST_BATCHES]
    panels = {batch: [point for point in data["points"] if point["batch"] == batch] for batch in batches}
    most = max(len(points) for points in panels.values())
    with rc_context(STYLE):
        width = max(1.45 * most, 3.6) * len(panels) + 2.1
        figure = Figure(figsize=(min(width, 16.0), 4.3))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (batch, points) in zip(all_axes, panels.items(), strict=True):
            _panel(axes, points)
            if len(panels) > 1:
                axes.set_title(f"batches of {batch}", loc="left", fontweight="bold")
        all_axes[0].set_ylabel("share of the target's own prefill")
        handles, labels = all_axes[0].get_legend_handles_labels()
        # From top to bottom as they are stacked.
        figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
        notes = [text for text, told in (("random weights", data["random"]), ("scaled", data["scaled"])) if told]
        below = "tokens of the prompt, and the target's own prefill" + (f"  ({', '.join(notes)})" if notes else "")
        figure.supxlabel(below, fontsize=9, color=MUTED)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _panel(axes: Axes, points: Sequence[Point]) -> None:
    places = range(len(points))
    prefill = [point["target"]["median"] for point in points]
    left = [place - NARROW / 2 - 0.02 for place in places]
    right = [place + NARROW / 2 + 0.02 for place in places]
    below = [0.0] * len(points)
    for step, colour in PARTS.items():
        seconds = [point["parts"][step]["median"] + (point["wire"] if step == "export" else 0) for point in points]
        shares = [each / whole for each, whole in zip(seconds, prefill, strict=True)]
        if max(shares) > 0.002:
            axes.bar(left, shares, NARROW, bottom=below, color=colour, label=NAMES[step], zorder=2)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    source = [point["source"]["median"] / whole for point, whole in zip(points, prefill, strict=True)]
    axes.bar(
        left,
        source,
        NARROW,
        bottom=below,
        facecolor="none",
        edgecolor=COLOURS["source"],
        linewidth=1.2,
        hatch="////",
        label="Source's prefill (cold)",
        zorder=2,
    )
    axes.bar(right, [1.0] * len(points), NARROW, color=COLOURS["ceiling"], label="Target's own prefill", zorder=2)
    axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    for place, height in zip(left, below, strict=True):
        axes.annotate(
            f"{100 * height:.0f} %", (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=9
        ).set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})
    names = [f"{point['length']}\n{milliseconds(point['target']['median'])} ms" for point in points]
    axes.set_xticks(places, names)
    highest = max([1.0, *(a + b for a, b in zip(below, source, strict=True))])
    axes.set_ylim(0, 1.1 * highest)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axes.grid(axis="y", color=LINE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
