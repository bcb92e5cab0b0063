"""Lines with intervals, a panel per measure: what several conditions do along steps or turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE

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
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2 if len(panels) > 1 else 5.6, 3.7))
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.08)
        drawn = [figure.add_subplot(1, len(panels), n + 1) for n in range(len(panels))]
        for axes, panel in zip(drawn, panels, strict=True):
            _draw(axes, panel)
        handles, labels = drawn[0].get_legend_handles_labels()
        legend = figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=9.5)
        for text in legend.get_texts():
            text.set_color(INK)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _draw(axes: Axes, panel: Panel) -> None:
    count = sum(not line.dashed for line in panel.series)
    for n, line in enumerate(panel.series):
        colour = line.colour or CYCLE[n % len(CYCLE)]
        few = len(line.places) <= DODGE_UP_TO
        marker = "o" if few and not line.dashed else None
        places = [place + (0.09 * (n - (count - 1) / 2) if marker else 0.0) for place in line.places]
        style = (0, (2, 2)) if line.dashed else "-"
        axes.plot(places, line.values, color=colour, label=line.name, linestyle=style, marker=marker, ms=5, zorder=4)
        if few:
            for place, ends in zip(places, line.intervals, strict=True):
                if ends is not None:
                    axes.plot([place, place], list(ends), color=colour, linewidth=1.6, alpha=0.75, zorder=3)
        else:
            known = [(p, *ends) for p, ends in zip(places, line.intervals, strict=True) if ends is not None]
            if known:
                at, low, high = zip(*known, strict=True)
                axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0, zorder=2)
    if panel.zero is not None:
        axes.axhline(0, color=COLOURS["ceiling"], linewidth=1.2, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            panel.zero,
            (1.0, 0.0),
            (3, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=9,
            color=COLOURS["ceiling"],
        )
    if panel.log:
        axes.set_yscale("log")
    if panel.limits is not None:
        axes.set_ylim(*panel.limits)
    axes.set_title(panel.label, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(panel.axis, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=LINE, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
