"""The figure of a pair's maps: what each recovers of the gap, against what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvxfer.errors import KvxferError
from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE
from tools.results_page.data import MapResult, PairResults
from tools.results_page.tables import front

PALETTE = ("#1d6fb8", "#2f9e6e", "#c2410c", "#7c4dbe", "#b8860b", "#0f8a9d", "#be185d", "#64748b", "#65a30d")
FAR = 0.5
"""Where no map is below, the axis need not reach down to the source."""

LOWEST = -1.0
"""Maps below are drawn there, which the axis says: one that fails by far would squeeze the others into one line."""


def frontier_figure(pair: PairResults, path: Path) -> None:
    """Gap recovered in nats over what a whole handoff costs of the target's prefill, as PNG: one point per map.

    Colours are designs, diamonds trained maps; the front (no map is as cheap and better) is a line through ringed
    points; the source is at 0.

    Raises:
        KvxferError: the ceiling does not beat the source, so there is no gap.
    """
    maps = pair.rivals
    designs = sorted({one.name("features") for one in maps})
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for design, colour in zip(designs, (PALETTE * (1 + len(designs) // len(PALETTE))), strict=False):
            for trained, marker in ((False, "o"), (True, "D")):
                own = [one for one in maps if one.name("features") == design and one.trained == trained]
                shape: dict[str, Any] = {"markersize": 6, "color": colour, "alpha": 0.85, "zorder": 3}
                if own:
                    costs, gaps = [100 * one.handoff for one in own], [100 * _gap(pair, one) for one in own]
                    axes.plot(costs, gaps, marker, label=f"{design}, trained" if trained else design, **shape)
        x, y = zip(*((100 * one.handoff, 100 * _gap(pair, one)) for one in front(pair)), strict=True)
        axes.plot(x, y, "-o", color=INK, linewidth=1.2, markersize=9, markerfacecolor="none", zorder=4)
        _source(axes, min(_gap(pair, one) for one in maps))
        axes.set_xscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g} %")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("a whole handoff's FLOPs, in per cent of the target's own prefill")
        clipped = any((pair.baseline.gap(one.scores) or 0) < LOWEST for one in maps)
        axes.set_ylabel("gap recovered, nats" + (" (drawn from \N{MINUS SIGN}100 % up)" if clipped else ""))
        axes.grid(color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=MUTED)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(title="features", frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _source(axes: Axes, lowest: float) -> None:
    """The source's line, or, where every map is far above it, where it would be."""
    above = lowest > FAR
    if not above:
        axes.axhline(0, color=COLOURS["source"], linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
    said, place = ("source alone: 0 %, below", "axes fraction") if above else ("source alone", "data")
    axes.annotate(said, (1, 0), (-4, 4), xycoords=("axes fraction", place), textcoords="offset points").set(
        ha="right", color=COLOURS["source"], fontsize=9
    )


def _gap(pair: PairResults, one: MapResult) -> float:
    gap = pair.baseline.gap(one.scores)
    if gap is None:
        raise KvxferError(f"results of {pair.name}: the ceiling does not beat the source, so there is no gap to draw")
    return max(gap, LOWEST)
