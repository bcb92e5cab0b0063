"""Several designs of a map side by side: the sections of a comparison's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.report.markdown import (
    MEASURES,
    PER_DESIGN,
    Results,
    body,
    conditions_table,
    figure_paths,
    lead,
    numbers,
    table,
)
from kvxfer.report.tables import p_text, p_value, percent, points, quantity
from kvxfer.report.verdict import few_documents, fit_warning, verdict
from kvxfer.report.wording import DESIGNS


def design_rows(designs: Mapping[str, Results]) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """Conditions and their names for one figure of all designs: the shared ones, then each design's mapped cache."""
    first = next(iter(designs.values()))["conditions"]
    rows: dict[str, Mapping[str, Any]] = {c: first[c] for c in ("ceiling", "source") if c in first}
    rows |= {f"mapped {name}": results["conditions"]["mapped"] for name, results in designs.items()}
    rows |= {c: first[c] for c in ("floor", "raw_copy", "no_context") if c in first}
    return rows, {f"mapped {name}": f"Mapped cache, design “{name}”" for name in designs}


def comparison_lead(designs: Mapping[str, Results], best: str) -> list[str]:
    """The verdict on the best design, and what is left of it after so many tries."""
    chosen = designs[best]
    said = verdict(chosen["conditions"], chosen["tests"], subject=f"The best of {len(designs)} designs, {best},")
    lines = [f"**{said.sentence}**", "", *_strict(chosen, len(designs))]
    if (few := few_documents(chosen)) is not None:
        lines += [f"**{few}**", ""]
    for name, results in designs.items():
        if (warning := fit_warning(results)) is not None:
            lines += [f"**Design `{name}`: {warning}**", ""]
    return lines


def comparison(designs: Mapping[str, Results], best: str) -> list[str]:
    """The shared baselines once, one row per design, then the best one in full."""
    chosen = designs[best]
    lines = ["## The designs", "", "What a target layer's keys and values are computed from:", ""]
    lines += [f"- `{name}`: {DESIGNS.get(name, 'see its configuration')}" for name in designs]
    header = ("Design", *MEASURES, "vs source", "p (McNemar)", "p (paired t)", "Map", "Prefill share")
    rows = []
    for name, results in designs.items():
        test, fitted = results["tests"]["mapped_vs_source"], results["map"] or {}
        cost = (quantity(fitted.get("parameters")), percent(fitted.get("share_of_prefill_flops")))
        tests = (points(test["accuracy_difference"]), p_value(test["accuracy_p"]), p_value(test["nll_p"]))
        label = f"**{name}** (best)" if name == best else name
        rows.append((label, *numbers(results["conditions"]["mapped"]), *tests, *cost))
    lines += ["", *table(header, rows)]
    lines += ["Map: its parameters. Prefill share: its FLOPs per token in percent of the target's prefill.", ""]
    shared = {name: row for name, row in chosen["conditions"].items() if name not in PER_DESIGN}
    lines += ["What all designs are measured against:", "", *conditions_table(shared)]
    lines += [f"![All designs with 95 % intervals]({figure_paths({'designs': designs})['designs']})", ""]
    return [*lines, "---", "", f"The rest is about the best design, `{best}`.", "", *lead(chosen), *body(chosen)]


def _strict(chosen: Results, count: int) -> list[str]:
    """The best of several was picked on the items it is tested on; Bonferroni's p says what is left of it."""
    test = chosen["tests"]["mapped_vs_source"]
    keys = {"accuracy_p": "McNemar", "nll_p": "paired t"}
    said = [f"{name} {p_text(min(1.0, count * test[key]))}" for key, name in keys.items() if test.get(key) is not None]
    if count < 2 or not said:
        return []
    return [f"It was picked on these same items; corrected for {count} tries (Bonferroni): {', '.join(said)}.", ""]
