"""The course of a training as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MARK, STYLE

_TERMS = {
    "attention": ("attention output, share of variance", COLOURS["mapped"]),
    "kl": ("next-token KL, nats per token", COLOURS["source"]),
    "mse": ("content, share of variance", COLOURS["ceiling"]),
}


def training_figure(history: Sequence[dict[str, Any]], base_kl: float, path: Path) -> None:
    """Draw loss terms and validation KL against steps, as PNG.

    Args:
        history: one entry for each look at the validation rows (``Recorder.history``).
        base_kl: the base map's KL on the same rows.
    """
    steps = [entry["step"] for entry in history]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for term, (name, colour) in _TERMS.items():
            if term in history[0]:
                left.plot(steps, [entry[term] for entry in history], color=colour, label=name, **_LINE)
        left.set_title("training rows: terms of the loss")
        kl = [entry["val_kl"] for entry in history]
        right.axhline(base_kl, color=COLOURS["source"], linewidth=1.4, linestyle="--", label=f"base {base_kl:.4f}")
        right.plot(steps, kl, color=COLOURS["mapped"], label="trained", **_LINE)
        best = kl.index(min(kl))
        ring = {"marker": "o", "markersize": 9, "fillstyle": "none", "linestyle": "none", "color": MARK}
        right.plot(steps[best], kl[best], label=f"best {kl[best]:.4f}", **ring)
        right.set_title("validation rows: next-token KL, nats per token")
        for axes in (left, right):
            _finish(axes)
        figure.savefig(path, dpi=DPI, facecolor="white")


_LINE: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}


def _finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.grid(color=LINE, linewidth=0.8)
    axes.margins(y=0.15)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
