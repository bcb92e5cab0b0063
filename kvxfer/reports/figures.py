"""The figure of a pair's maps: what each recovers of the gap, against what it costs."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from kvxfer.errors import KvxferError
from kvxfer.evals.figures import COLOURS, DPI, INK, LINE, MUTED, STYLE
from kvxfer.reports.data import MapResult, PairResults
from kvxfer.reports.tables import front

PALETTE = ("#1d6fb8", "#2f9e6e", "#c2410c", "#7c4dbe", "#b8860b", "#0f8a9d", "#be185d", "#64748b", "#65a30d")
LOWEST = -1.0
"""Maps below are drawn there: one that fails by far would squeeze the others into one line."""


def frontier_figure(pair: PairResults, path: Path) -> None:
    """Gap recovered in nats over the cost per token as a share of the target's prefill, as PNG: one point per map.

    Colours are designs; the front (no map is as cheap and better) is a line through ringed points; the source is at 0.

    Raises:
        KvxferError: the ceiling does not beat the source, so there is no gap.
    """
    maps = pair.calibrated_alike
    designs = sorted({one.name("features") for one in maps})
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.6), layout="constrained")
        axes = figure.subplots()
        for design, colour in zip(designs, (PALETTE * (1 + len(designs) // len(PALETTE))), strict=False):
            own = [one for one in maps if one.name("features") == design]
            places = [(100 * one.share, 100 * _gap(pair, one)) for one in own]
            x, y = zip(*places, strict=True)
            axes.plot(x, y, "o", markersize=6, color=colour, alpha=0.85, label=design, zorder=3)
        x, y = zip(*((100 * one.share, 100 * _gap(pair, one)) for one in front(pair)), strict=True)
        axes.plot(x, y, "-o", color=INK, linewidth=1.2, markersize=9, markerfacecolor="none", zorder=4)
        axes.axhline(0, color=COLOURS["source"], linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            "source alone", (1, 0), (-4, 4), xycoords=("axes fraction", "data"), textcoords="offset points"
        ).set(ha="right", color=COLOURS["source"], fontsize=9)
        axes.set_xscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g} %")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("cost per token, in per cent of the target's prefill")
        axes.set_ylabel("gap recovered, nats (drawn from \N{MINUS SIGN}100 % up)")
        axes.grid(color=LINE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(length=0, labelcolor=MUTED)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.legend(title="features", frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _gap(pair: PairResults, one: MapResult) -> float:
    gap = pair.baseline.gap(one.scores)
    if gap is None:
        raise KvxferError(f"results of {pair.name}: the ceiling does not beat the source, so there is no gap to draw")
    return max(gap, LOWEST)
