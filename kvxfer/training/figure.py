"""How a training went: its loss and its validation KL over steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.evals.figures import COLOURS, DPI, LINE, MARK, STYLE

FIGURE = "training.png"
_PANELS = (("loss", "training loss"), ("val_kl", "validation KL, nats per token"), ("val_cosine_mean", "cosine"))


def training_figure(record: Mapping[str, Any], path: Path) -> bool:
    """Draw a panel for each of loss, validation KL and cosine that the record's history has, as PNG.

    Returns:
        Whether there was anything to draw.
    """
    panels = [(key, title, _points(record, key)) for key, title in _PANELS]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return False
    with rc_context(STYLE):
        figure = Figure(figsize=(3.6 * len(panels) + 0.4, 3.2), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (key, title, points) in zip(all_axes, panels, strict=True):
            _panel(axes, title, points, record["best_step"] if key == "val_kl" else None)
        figure.savefig(path, dpi=DPI, facecolor="white")
    return True


def _points(record: Mapping[str, Any], key: str) -> list[tuple[int, float]]:
    """Step and value wherever the history has one."""
    return [(row["step"], row[key]) for row in record["history"] if row.get(key) is not None]


def _panel(axes: Axes, title: str, points: list[tuple[int, float]], best: int | None) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, "-o", color=COLOURS["mapped"], linewidth=1.4, markersize=3)
    if best is not None:
        axes.axvline(best, color=MARK, linewidth=1.0, linestyle=(0, (4, 3)), label="kept")
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
