"""What eval=diagnostics tells a reader: means by domain, every layer, two figures, and correlations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvxfer.maps.blocks import KINDS
from kvxfer.report.figures import COLOURS, DPI, INK, LINE, MUTED, NUMBERS_UP_TO, STYLE
from kvxfer.report.markdown import table
from kvxfer.report.tables import interval, number, p_value, percent

Data = Mapping[str, Any]

HEADS, R2 = "diagnostics_cosine.png", "diagnostics_r2.png"
FIGURES = {
    HEADS: "Cosine of every head's attention output with the true one",
    R2: "R² of every target layer",
}
NAMES = {
    "cosine": "Cosine of heads' attention outputs",
    "cosine_output": "Cosine after W_O",
    "r2_keys": "R² of keys",
    "r2_values": "R² of values",
    "concentration_keys": "K-concentration",
    "concentration_values": "V-concentration",
    "kl": "KL(ceiling ‖ mapped), nats",
    "agreement": "Same first choice",
}
DOWNSTREAM_NAMES = {"retention": "accuracy retained", "gap_recovered_nats": "gap recovered (nats)"}


def domains_table(data: Data) -> list[str]:
    """One column per domain."""
    asked, domains = data["asked"], data["domains"]
    rows = [(title, *(_with_interval(domain[name], name) for domain in domains)) for name, title in NAMES.items()]
    source = [domain["predictions"]["source"] for domain in domains]
    rows.append(("KL(ceiling ‖ source), nats", *(_with_interval(each["kl"], "kl") for each in source)))
    rows.append(("Same first choice, source", *(_with_interval(each["agreement"], "agreement") for each in source)))
    header = ("Mean", *(f"{d['domain']} ({d['rows']} rows, {d['documents']} documents)" for d in domains))
    return [
        f"Rows of {asked['prefix']} tokens are handed over and the {asked['scored']} tokens after them are read. The "
        "true queries of those tokens attend to true and to mapped keys and values: the cosine is that of the two "
        "outputs. R² is over the mapped tokens, in content space. With 95 % intervals, bootstrap over documents.",
        "",
        *table(header, rows),
        "K-concentration is the mean squared error of attention scores divided by what it would be if the keys' error "
        "lay evenly in all directions: above 1 the error lies where queries look. V-concentration is the values' "
        "squared error weighted by the squared true attention, divided by its plain mean: above 1 the error lies in "
        "tokens that are looked at.",
        "",
    ]


def _with_interval(found: Mapping[str, Any], name: str) -> str:
    share = name == "agreement"
    if found["value"] is None:
        return number(None)
    ci = interval(found["ci"], "percent" if share else "number")
    return f"{percent(found['value']) if share else number(found['value'])} {ci}".rstrip()


def layers_table(data: Data) -> list[str]:
    """Every target layer of the run's own text, with the fit's own held-out R² where it was recorded."""
    own, recorded = data["domains"][0], data["recorded_r2"]
    header = ["Target layer", "R² keys", "fit's", "R² values", "fit's", "Cosine, mean of heads", "worst head"]
    header += ["Cosine after W_O", "K-concentration", "V-concentration"]
    rows = []
    for layer, heads in enumerate(own["cosine_heads"]):
        known = [value for value in heads if value is not None]
        cells = [str(layer)]
        for kind in KINDS:
            cells += [number(own[f"r2_{kind}_layers"][layer]), number(recorded.get(f"{kind}.{layer}"))]
        cells += [number(float(np.mean(known))), number(min(known))] if known else [number(None)] * 2
        for name in ("cosine_output_layers", "concentration_keys_layers", "concentration_values_layers"):
            cells.append(number(own[name][layer]))
        rows.append(cells)
    note = f"On {own['domain']}; “fit's” is what the fit reported for its own held-out rows."
    return ["### By target layer", "", *table(header, rows), note, ""]


def correlation_table(found: Mapping[str, Any]) -> list[str]:
    """Each diagnostic against what maps are worth, over all maps that have both."""
    lines = ["### Do diagnostics foretell what a map is worth?", ""]
    count = len(found["maps"])
    if count < found["fewest"]:
        return [
            *lines,
            f"Too few maps ({count}): {found['fewest']} maps of this pair need these diagnostics and an evaluation of "
            "items (as eval=standard).",
            "",
        ]
    rows = []
    for row in found["rows"]:
        if "pearson" in row:
            cells = [cell for name in ("pearson", "spearman") for cell in _correlation(row[name])]
            rows.append((NAMES[row["measure"]], DOWNSTREAM_NAMES[row["downstream"]], str(row["n"]), *cells))
    header = ("Diagnostic", "against", "maps", "Pearson", "95 % interval", "p", "Spearman", "95 % interval", "p")
    return [
        *lines,
        f"Over the {count} maps of this pair that were diagnosed and asked the same items (intervals: bootstrap over "
        "maps, which are few and no random sample: read them as a description). The paper has .57 for the cosine and "
        "\N{MINUS SIGN}.20 for the R² of keys, over 12 pairs and directions.",
        "",
        *table(header, rows),
    ]


def _correlation(found: Mapping[str, Any]) -> tuple[str, str, str]:
    return number(found["value"], 2, sign=True), interval(found["ci"], "number"), p_value(found["p"])


def figures_of(data: Data, folder: Path) -> None:
    """Both figures."""
    _heads_figure(data, folder / HEADS)
    _r2_figure(data, folder / R2)


def _heads_figure(data: Data, path: Path) -> None:
    """A panel per domain: target layers down, query heads across, and the mean over rows as colour."""
    domains = data["domains"]
    grids = [_array(domain["cosine_heads"]) for domain in domains]
    layers, heads = grids[0].shape
    small = max(layers, heads) <= NUMBERS_UP_TO
    lowest = min(0.0, *(float(np.nanmin(grid)) for grid in grids))
    with rc_context(STYLE):
        size = (min(0.62 * heads, 7) + 0.9, min(0.46 * layers, 9) + 1.3)
        figure = Figure(figsize=(len(domains) * size[0] + 1.2, size[1]))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        panels = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
        colours = colormaps["Blues"].with_extremes(bad="#eceff2")
        for axes, grid, domain in zip(panels, grids, domains, strict=True):
            image = axes.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=lowest, vmax=1.0, aspect="auto")
            if small:
                for (layer, head), value in np.ndenumerate(grid):
                    colour = "white" if value > lowest + 0.6 * (1 - lowest) else INK
                    text = f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
                    axes.text(head, layer, text, ha="center", va="center", color=colour, fontsize=8.5)
            axes.set_title(domain["domain"], loc="left", fontweight="bold")
            axes.set_xlabel("query head")
            axes.set_xticks(range(0, heads, 1 if small else max(1, heads // 9)))
            axes.set_yticks(range(0, layers, 1 if small else max(1, layers // 9)))
            _bare(axes)
        panels[0].set_ylabel("target layer")
        bar = figure.colorbar(image, ax=list(panels), fraction=0.05, pad=0.02)
        bar.set_label("cosine with the true attention output")
        bar.outline.set_edgecolor(LINE)
        figure.savefig(path, dpi=DPI, facecolor="white")


def _r2_figure(data: Data, path: Path) -> None:
    """Keys left, values right: a line per domain, and the fit's own held-out R² dotted."""
    domains, recorded = data["domains"], data["recorded_r2"]
    shades = (COLOURS["mapped"], "#2f9e6e", "#a04fa8", "#c0392b", "#7a6a1d")
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 3.6))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
        panels = figure.subplots(1, 2, sharey=True)
        lowest = 0.0
        for axes, kind in zip(panels, KINDS, strict=True):
            for n, domain in enumerate(domains):
                values = _array([domain[f"r2_{kind}_layers"]])[0]
                lowest = min(lowest, float(np.nanmin(values)))
                shade = shades[n % len(shades)]
                axes.plot(values, color=shade, linewidth=2, marker="o", markersize=5, label=domain["domain"])
            known = [recorded.get(f"{kind}.{layer}", np.nan) for layer in range(len(values))]
            if np.isfinite(known).any():
                axes.plot(known, color=MUTED, linewidth=1.4, linestyle=":", label="the fit's own held-out rows")
            axes.set_title(kind.capitalize(), loc="left", fontweight="bold")
            axes.set_xlabel("target layer")
            axes.set_xticks(range(0, len(values), max(1, len(values) // 10)))
            axes.grid(axis="y", color=LINE, linewidth=0.8)
            _bare(axes, keep=("left", "bottom"))
        # Far below zero nothing is left to read; the table has the numbers.
        panels[0].set_ylim(max(lowest, -1.0) - 0.04, 1.04)
        panels[0].set_ylabel("R² over the mapped tokens")
        figure.legend(
            *panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=6, loc="outside lower center"
        )
        figure.savefig(path, dpi=DPI, facecolor="white")


def _array(rows: Any) -> Float[np.ndarray, "rows columns"]:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)


def _bare(axes: Axes, keep: tuple[str, ...] = ()) -> None:
    axes.tick_params(length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
