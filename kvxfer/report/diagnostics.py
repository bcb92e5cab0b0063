"""What keys and values do inside the target (``diagnostics``): means by domain, every layer, and two figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from kvxfer.report.figures import DOMAIN_COLOURS, LINE, MUTED, canvas, heat_panel, tidy
from kvxfer.report.kind_report import MOST_COLUMNS, FirstScreen, Json, KindReport
from kvxfer.report.numbers import number, number_in, percent, percent_in
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import CONTROLS, Verdict, beats, in_nats, judged, led, unbeaten

KINDS = ("keys", "values")
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
"""The diagnostics of a domain that are one number."""


HEADS_OF = {
    "beats": "The mapped cache predicts the next token as the ceiling does more closely than the source does",
    "worse": "The mapped cache predicts the next token as the ceiling does less closely than the source does",
    "none": "It is not shown that the mapped cache predicts the next token more as the ceiling does than the source "
    "does",
    "unable": "The source is not shown to predict the next token more as the ceiling does than the target without any "
    "context, so this pair cannot show a transfer's worth",
}
"""What each kind of verdict says."""


class DiagnosticsReport(KindReport):
    """Whose next-token predictions are nearer to the ceiling's: the mapped cache's, or the source's?"""

    heading = "Diagnostics"
    logged = "eval/diagnostics"

    def verdict(self, data: Json) -> Verdict:
        """By KL from the ceiling, on the run's own text."""
        own = data["domains"][0]
        tests = own["tests"]
        kind, _ = judged(tests, "The mapped cache")
        head, rest = HEADS_OF[kind], unbeaten(tests)
        if kind == "none" and rest and beats(tests["mapped_vs_source"]):
            head = (
                f"{HEADS_OF['beats']}, but not, as far as is shown, than {' or '.join(CONTROLS[name] for name in rest)}"
            )
        mapped, source = own["predictions"]["mapped"], own["predictions"]["source"]
        worst, against = own["worst_head"], in_nats(tests["mapped_vs_source"])
        lead = led(kind, head, "The mapped cache") if kind == "unable" else f"{head}:"
        said = (
            f"{lead} KL {number(mapped['kl']['value'])} against {number(source['kl']['value'])} nats per token "
            f"({against}), the same first choice in {percent(mapped['agreement']['value'])} against "
            f"{percent(source['agreement']['value'])}; attention outputs have a mean cosine of "
            f"{number(own['cosine']['value'])} with the true ones, the worst head's is {number(worst['cosine'])} "
            f"(layer {worst['layer']}, head {worst['head']})."
        )
        return Verdict(kind, head, said)

    def first_screen(self, data: Json) -> FirstScreen:
        """Of as many domains as a page has room for."""
        table, own = _domains_table(data), data["domains"][0]
        worst = own["worst_head"]
        against = [
            f"The attention output of layer {worst['layer']}, head {worst['head']} has a cosine of "
            f"{number(worst['cosine'])} with the true one, the lowest of all heads."
        ]
        return FirstScreen(table.only(*table.columns[:MOST_COLUMNS]), f"figures/{HEADS}", FIGURES[HEADS], against)

    def sections(self, data: Json) -> str:
        return fill(
            "diagnostics",
            asked=data["asked"],
            domains=_domains_table(data),
            layers=_layers_table(data),
            own=data["domains"][0]["domain"],
            figures=FIGURES,
        )

    def metrics(self, data: Json) -> dict[str, float]:
        return {
            f"{domain['domain']}/{name}": domain[name]["value"]
            for domain in data["domains"]
            for name in NAMES
            if domain[name]["value"] is not None
        }

    def figures(self, data: Json, folder: Path) -> None:
        _heads_figure(data, folder / HEADS)
        _r2_figure(data, folder / R2)


def _domains_table(data: Json) -> Table:
    """One column per domain."""
    domains = data["domains"]
    own = [(title, name, domains) for name, title in NAMES.items()]
    source = [domain["predictions"]["source"] for domain in domains]
    own += [("KL(ceiling ‖ source), nats", "kl", source), ("Same first choice, source", "agreement", source)]
    rows = [(title, *(_with_interval(each[name], name) for each in found)) for title, name, found in own]
    header = ("Mean", *(f"{d['domain']} ({d['rows']} rows, {d['documents']} documents)" for d in domains))
    return Table(header, rows)


def _with_interval(found: Json, name: str) -> str:
    row = {name: found["value"], f"{name}_ci": found["ci"]}
    return percent_in(row, name) if name == "agreement" else number_in(row, name)


def _layers_table(data: Json) -> Table:
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
    return Table(header, rows)


def _heads_figure(data: Json, path: Path) -> None:
    """A panel per domain: target layers down, query heads across, and the mean over rows as colour."""
    domains = data["domains"]
    grids = [_array(domain["cosine_heads"]) for domain in domains]
    layers, heads = grids[0].shape
    lowest = min(0.0, *(float(np.nanmin(grid)) for grid in grids))
    size = (min(0.62 * heads, 7) + 0.9, min(0.46 * layers, 9) + 1.3)
    with canvas(path, (len(domains) * size[0] + 1.2, size[1])) as figure:
        panels = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
        for axes, grid, domain in zip(panels, grids, domains, strict=True):
            image = heat_panel(axes, grid, lowest, aspect="auto")
            axes.set_title(domain["domain"], loc="left", fontweight="bold")
            axes.set_xlabel("query head")
        panels[0].set_ylabel("target layer")
        bar = figure.colorbar(image, ax=list(panels), fraction=0.05, pad=0.02)
        bar.set_label("cosine with the true attention output")
        bar.outline.set_edgecolor(LINE)


def _r2_figure(data: Json, path: Path) -> None:
    """Keys left, values right: a line per domain, and the fit's own held-out R² dotted."""
    domains, recorded = data["domains"], data["recorded_r2"]
    with canvas(path, (9.0, 3.6)) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        lowest = 0.0
        for axes, kind in zip(panels, KINDS, strict=True):
            for n, domain in enumerate(domains):
                values = _array([domain[f"r2_{kind}_layers"]])[0]
                lowest = min(lowest, float(np.nanmin(values)))
                shade = DOMAIN_COLOURS[n % len(DOMAIN_COLOURS)]
                axes.plot(values, color=shade, linewidth=2, marker="o", markersize=5, label=domain["domain"])
            known = [recorded.get(f"{kind}.{layer}", np.nan) for layer in range(len(values))]
            if np.isfinite(known).any():
                axes.plot(known, color=MUTED, linewidth=1.4, linestyle=":", label="the fit's own held-out rows")
            axes.set_title(kind.capitalize(), loc="left", fontweight="bold")
            axes.set_xlabel("target layer")
            axes.set_xticks(range(0, len(values), max(1, len(values) // 10)))
            tidy(axes, keep=("left", "bottom"))
        # Far below zero nothing is left to read; the table has the numbers.
        panels[0].set_ylim(max(lowest, -1.0) - 0.04, 1.04)
        panels[0].set_ylabel("R² over the mapped tokens")
        figure.legend(
            *panels[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=6, loc="outside lower center"
        )


def _array(rows: Any) -> Float[np.ndarray, "rows columns"]:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=np.float64)
