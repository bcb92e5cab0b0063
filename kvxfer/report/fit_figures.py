"""Figures of fits: what automatic choices saw, which source layers a map reads, and the course of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from kvxfer.errors import KvxferError
from kvxfer.report.figures import COLOURS, INK, LINE, MARK, MUTED, canvas, heat_panel, is_small, tidy

Curve = dict[int | float, float]

KIND_COLOURS = {"keys": COLOURS["mapped"], "values": COLOURS["source"]}
TITLES = {"lam": "λ (relative)", "alpha": "α", "rank": "rank", "k": "source layers per target layer"}
OTHER_COLOURS = (INK, MARK, COLOURS["identity"])
LOWEST = -0.5
"""Scores below are drawn there: what overfits by far would squeeze the rest into one line."""


def tried(curves: Mapping[str, Any]) -> dict[str, dict[str, Curve]]:
    """Score by value of every output, for each dial that had a choice; the best over the other dials of the penalty.

    Args:
        curves: those of a fit: ``penalty`` (per output: λ, α, score), ``rank`` (per output: rank, score), ``k`` or
            ``k_outputs`` (per output) or ``k_candidates`` (per solver that ``auto`` tried), and ``kl`` (per dial:
            value, nats) where next-token KL decided.
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
            # weighted's scores weigh tokens, so its line says nothing of whether it is better than another.
            "weighted (tokens weighed)" if name == "weighted" else name: {k: score for k, score in points}
            for name, points in curves["k_candidates"].items()
        }
    for dial, points in curves.get("kl", {}).items():
        found[dial] = {"KL, the less the better": {value: kl for value, kl in points}}
    return {dial: lines for dial, lines in found.items() if any(len(curve) > 1 for curve in lines.values())}


def curves_figure(curves: Mapping[str, Any], path: Path | str) -> bool:
    """Draw a panel for every dial with a choice, as PNG: thin lines are single outputs, thick ones their mean.

    Returns:
        Whether there was anything to draw.
    """
    panels = tried(curves)
    if not panels:
        return False
    with canvas(path, (3.4 * len(panels) + 0.6, 3.2)) as figure:
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (dial, lines) in zip(all_axes, panels.items(), strict=True):
            _panel(axes, dial, lines)
        all_axes[0].set_ylabel("validation score")
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
    tidy(axes, "both", keep=("left", "bottom"))
    axes.legend(frameon=False, fontsize=9)


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
    place = {layer: column for column, layer in enumerate(candidates)}
    image, small = heat_panel(axes, grid, names=candidates), is_small(grid)
    for target, layers in enumerate(chosen):
        for source in (place[layer] for layer in layers):
            if small:
                corner = (source - 0.44, target - 0.44)
                axes.add_patch(Rectangle(corner, 0.88, 0.88, fill=False, edgecolor=MARK, linewidth=2.2))
            else:
                axes.plot(source, target, marker="o", markersize=2.6, color=MARK, markeredgewidth=0)
    if small:
        axes.set_xticks(np.arange(grid.shape[1] + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(grid.shape[0] + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
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
    small = is_small(grids[0])
    width = min(max(0.62 * sources if small else 0.13 * sources, 2.4), 4.6)
    height = min(max(width * targets / sources, 1.4), 7.0)
    with canvas(path, (2 * width + 2.1, height + 1.45)) as figure:
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


_LINE: dict[str, Any] = {"linewidth": 2, "marker": "o", "markersize": 4}
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
    with canvas(path, (8.4, 3.4)) as figure:
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
            axes.set_xlabel("step")
            axes.margins(y=0.15)
            axes.set_xlim(left=0)
            tidy(axes, "both", keep=("left", "bottom"))
            axes.legend(frameon=False, fontsize=9, labelcolor=INK)
