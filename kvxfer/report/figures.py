"""Figures of an evaluation, drawn without pyplot and its global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import CONDITIONS
from kvxfer.report.wording import condition_name

INK, MUTED, LINE = "#1f2933", "#5f6c7b", "#d9dee4"
COLOURS = {
    "ceiling": "#52667a",
    "identity": "#8797a8",
    "source": "#d9822b",
    "mapped": "#1d6fb8",
    "mapped_all": "#62a3da",
}
CONTROL = "#b9c1ca"
MARK = "#e8590c"
NUMBERS_UP_TO = 12
DPI = 160
LOG_FROM = 20.0
NEAR = 0.15  # accuracies whose names would touch
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "axes.titlesize": 11,
}


def _pad(figure: Figure) -> None:
    """Room at the edges, so that nothing touches the page's text."""
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)


def _grid(values: Sequence[Sequence[float | None]], name: str) -> Float[np.ndarray, "target source"]:
    try:
        grid = np.array(values, dtype=np.float64)
    except ValueError:
        grid = np.empty(0)
    if grid.ndim != 2 or grid.size == 0:
        raise KvxferError(
            f"selection.{name}: needs one row per target layer, of equal length, and has {np.shape(grid)}"
        )
    return grid


def _heat_panel(
    axes: Axes, grid: Float[np.ndarray, "target source"], chosen: Sequence[Sequence[int]], candidates: Sequence[int]
) -> Any:
    """One kind's R² with the chosen source layers of each target layer outlined (dotted where cells are small)."""
    targets, sources = grid.shape
    place = {layer: column for column, layer in enumerate(candidates)}
    small = max(targets, sources) <= NUMBERS_UP_TO
    colours = colormaps["Blues"].with_extremes(bad="#eceff2")
    image = axes.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=0.0, vmax=1.0, aspect="equal")
    for target, layers in enumerate(chosen):
        for source in (place[layer] for layer in layers):
            if small:
                corner = (source - 0.44, target - 0.44)
                axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=MARK, linewidth=2.2))
            else:
                axes.plot(source, target, marker="o", markersize=2.6, color=MARK, markeredgewidth=0)
    if small:
        for (target, source), value in np.ndenumerate(grid):
            if np.isfinite(value):
                colour = "white" if value > 0.6 else INK
                text = f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
                axes.text(source, target, text, ha="center", va="center", color=colour, fontsize=9)
    step = 1 if small else max(1, round(max(targets, sources) / 9))
    axes.set_xticks(range(0, sources, step), [str(layer) for layer in candidates[::step]])
    axes.set_yticks(range(0, targets, step))
    axes.tick_params(length=0)
    if small:
        axes.set_xticks(np.arange(sources + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(targets + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def r2_heatmap(selection: Mapping[str, Any], path: Path | str) -> None:
    """Validation R² of every source layer (across) for every target layer (down): keys left, values right, as PNG.

    ``selection`` has ``r2_keys`` and ``r2_values`` [target layers][source layers], ``chosen_keys`` and
    ``chosen_values`` (source layers per target layer), and ``candidates``, the source layers that the columns stand for
    (0, 1, ... without it). Colours run from 0 to 1, the same in every figure; None is grey.
    """
    grids = [_grid(selection[name], name) for name in ("r2_keys", "r2_values")]
    targets, sources = grids[0].shape
    candidates = selection.get("candidates") or range(sources)
    small = max(targets, sources) <= NUMBERS_UP_TO
    width = min(max(0.62 * sources if small else 0.13 * sources, 2.4), 4.6)
    height = min(max(width * targets / sources, 1.4), 7.0)
    with rc_context(STYLE):
        figure = Figure(figsize=(2 * width + 2.1, height + 1.45))
        _pad(figure)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, grid, kind in zip(panels, grids, ("keys", "values"), strict=True):
            image = _heat_panel(axes, grid, selection[f"chosen_{kind}"], candidates)
            axes.set_title(kind.capitalize(), loc="left", fontweight="bold")
            axes.set_xlabel("source layer")
        panels[0].set_ylabel("target layer")
        below = min(float(np.nanmin(grid, initial=1.0)) for grid in grids) < 0
        bar = figure.colorbar(image, ax=list(panels), extend="min" if below else "neither", fraction=0.05, pad=0.02)
        bar.set_label("validation R² of one source layer")
        bar.outline.set_edgecolor(LINE)
        mark = "outlined" if small else "dotted"
        figure.supxlabel(f"{mark}: source layers that the map reads", fontsize=9, color=MUTED)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _ordered(conditions: Mapping[str, Mapping[str, Any]], measure: str, keep: bool) -> list[str]:
    known = [] if keep else [c for c in CONDITIONS if c in conditions]
    known += [c for c in conditions if c not in known]
    return [c for c in known if conditions[c].get(measure) is not None]


def _draw_rows(axes: Axes, rows: Sequence[str], conditions: Mapping[str, Mapping[str, Any]], measure: str) -> None:
    """Bars from zero with whiskers for shares, dots with whiskers for nats, and the value to the right of each."""
    share = measure == "accuracy"
    for y, name in enumerate(rows):
        value = conditions[name][measure]
        low, high = conditions[name].get(f"{measure}_ci") or (value, value)
        colour = COLOURS.get(name, COLOURS["mapped"] if name.startswith("mapped") else CONTROL)
        if share:
            axes.barh(y, value, height=0.64, color=colour, zorder=2)
        else:
            axes.plot(value, y, "o", markersize=8, color=colour, zorder=3)
        axes.plot([low, high], [y, y], color=INK if share else colour, linewidth=1.3 if share else 2.2, zorder=3)
        if share:
            axes.plot([low, high], [y, y], "|", color=INK, markersize=6, markeredgewidth=1.3, zorder=3)
        text = f"{100 * value:.1f} %" if share else f"{value:.2f}"
        weight = "bold" if name.startswith("mapped") else "normal"
        place = (max(high, value), y)
        axes.annotate(
            text, place, (7, 0), textcoords="offset points", va="center", fontsize=9.5, fontweight=weight, zorder=5
        ).set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})


def conditions_figure(
    conditions: Mapping[str, Mapping[str, Any]],
    path: Path | str,
    chance: float | int | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Accuracy (nats per token without one) of every condition with its 95 % interval, as PNG.

    The source's value is drawn across as the line to beat, chance as a dotted one. ``names`` overrides row labels,
    and with it rows keep the order they are given in.
    """
    has_accuracy = any(row.get("accuracy") is not None for row in conditions.values())
    measure = "accuracy" if has_accuracy else "nats"
    rows = _ordered(conditions, measure, keep=names is not None)
    if not rows:
        raise KvxferError("conditions: none has an accuracy or nats to draw; score at least one condition")
    values = [conditions[c][measure] for c in rows]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 0.42 * len(rows) + 1.25))
        _pad(figure)
        axes = figure.subplots()
        _draw_rows(axes, rows, conditions, measure)
        axes.set_yticks(range(len(rows)), [(names or {}).get(c) or condition_name(c) for c in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        if has_accuracy:
            axes.set_xlim(0, 1.13)
            axes.spines["bottom"].set_bounds(0, 1)
            axes.set_xticks(np.linspace(0, 1, 6), [f"{tick:.0f} %" for tick in np.linspace(0, 100, 6)])
            axes.set_xlabel("accuracy, 95 % interval")
        else:
            _scale_nats(axes, values)
        if "source" in rows:
            line = conditions["source"][measure]
            axes.axvline(line, color=COLOURS["source"], linewidth=1.4, linestyle=(0, (5, 3)), zorder=4)
            side = _side(line, chance) if has_accuracy and chance else "center"
            _name_line(axes, line, "source alone", COLOURS["source"], side)
        if has_accuracy and chance:
            axes.axvline(chance, color=MUTED, linewidth=1.1, linestyle=":", zorder=4)
            _name_line(axes, chance, "chance", MUTED, _side(chance, line) if "source" in rows else "center")
        axes.grid(axis="x", color=LINE, linewidth=0.8, zorder=0)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _side(x: float, other: float) -> str:
    """How a line's name stands over it: away from another line's name that is near."""
    if abs(x - other) > NEAR:
        return "center"
    return "right" if x < other else "left"


def _name_line(axes: Axes, x: float, text: str, colour: str, side: str) -> None:
    """A vertical line's name above the axes."""
    label = axes.annotate(text, (x, 1.0), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points")
    label.set(ha=side, va="bottom", fontsize=9, color=colour)


def _scale_nats(axes: Axes, values: Sequence[float]) -> None:
    """Linear from zero, logarithmic where the worst condition would squeeze the others into one point."""
    axes.set_xlabel("nats per token (lower is better), 95 % interval")
    if min(values) > 0 and max(values) / min(values) > LOG_FROM:
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter("{x:g}")
    else:
        axes.set_xlim(0, 1.25 * max(max(values), 1e-6))
