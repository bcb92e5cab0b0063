"""One figure of all tasks: how much of the ceiling's accuracy a map keeps on each, and what the source has anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE

ROW = 0.42


def retention_figure(rows: Sequence[Mapping[str, Any]], path: Path | str) -> None:
    """Draw a line per task as PNG: a dot with its 95 % interval, and the source's retention as a tick to beat.

    Args:
        rows: ``task``, ``part``, ``n``, ``retention``, ``retention_ci`` and ``source_retention`` (None: no tick).
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, ROW * len(rows) + 1.6))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        axes = figure.subplots()
        ends = [1.0]
        for y, row in enumerate(rows):
            ends += _row(axes, y, row)
        axes.axvline(1.0, color=COLOURS["ceiling"], linewidth=1.4, zorder=1)
        axes.annotate(
            "ceiling", (1.0, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points"
        ).set(ha="center", va="bottom", fontsize=9, color=COLOURS["ceiling"])
        axes.set_yticks(range(len(rows)), [f"{row['task']} (n = {row['n']:,})" for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        low = min([0.0, *ends])
        axes.set_xlim(low - (0.03 if low else 0), max(ends) + 0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlabel("accuracy in per cent of the ceiling's, 95 % interval")
        _legend(axes)
        axes.grid(axis="x", color=LINE, linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _row(axes: Axes, y: int, row: Mapping[str, Any]) -> list[float]:
    """One task; returns the ends of what was drawn."""
    value, source = row["retention"], row["source_retention"]
    low, high = row["retention_ci"] or (value, value)
    axes.plot([low, high], [y, y], color=COLOURS["mapped"], linewidth=2.2, zorder=3)
    axes.plot(value, y, "o", markersize=8, color=COLOURS["mapped"], zorder=4)
    if source is not None:
        axes.plot([source, source], [y - 0.32, y + 0.32], color=COLOURS["source"], linewidth=2.6, zorder=2)
    place = max(high, value if source is None or abs(source - value) > 0.1 else source)
    axes.annotate(
        f"{100 * value:.1f} %", (place, y), (8, 0), textcoords="offset points", va="center", fontsize=9.5, zorder=5
    ).set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})
    return [low, high, *([] if source is None else [source])]


def _legend(axes: Axes) -> None:
    handles = [
        axes.plot([], [], "o-", color=COLOURS["mapped"], linewidth=2.2, markersize=8, label="mapped cache")[0],
        axes.plot([], [], "|", color=COLOURS["source"], markersize=13, markeredgewidth=2.6, label="source alone")[0],
    ]
    axes.legend(
        handles=handles, frameon=False, fontsize=9, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.14),
        borderaxespad=0, labelcolor=[INK, MUTED],
    )  # fmt: skip
