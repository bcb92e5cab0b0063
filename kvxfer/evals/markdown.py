"""The sections of report.md, each a list of lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.evals.tables import (
    NOTHING,
    interval,
    number,
    p_text,
    p_value,
    percent,
    perplexity,
    points,
    quantity,
    setting,
)
from kvxfer.evals.verdict import ancestry_sentence, fit_warning, verdict
from kvxfer.evals.wording import DESIGNS, GLOSSARY, INTRODUCTION, condition_name

Results = Mapping[str, Any]
PER_DESIGN = ("mapped", "mapped_all", "wrong_donor", "random_map")
PROVENANCE_ROWS = 20
RATIOS = ("Retention", "Floor-normalised", "Gap recovered", "Gap recovered (nats)")
MEASURES = ("Accuracy", "Generated", "Perplexity", "Nats per token", *RATIOS)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: bool = True) -> list[str]:
    """A Markdown table, first column left, the others right if asked; columns that hold nothing are left out."""
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] not in ("", NOTHING) for row in rows)]
    marks = ["--:" if i and right else ":--" for i in kept]
    lines = [[header[i] for i in kept], marks, *([_cell(row[i]) for i in kept] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def _cell(text: str) -> str:
    return str(text).replace("\n", " ").replace("|", "\\|")


def document(title: str, sections: Sequence[str]) -> str:
    """A whole report: title, what this is about, the sections, the glossary."""
    glossary = ["## Glossary", "", *(f"- **{term}**: {meaning}" for term, meaning in GLOSSARY), ""]
    heading = " ".join(str(title).split())
    return "\n".join([f"# {heading}", "", INTRODUCTION, "", *sections, *glossary])


def figure_paths(results: Results) -> dict[str, str]:
    """The figures that results have, by name, relative to the report."""
    paths = {"designs": "figures/designs.png"} if "designs" in results else {}
    paths["conditions"] = "figures/conditions.png"
    selection = results.get("selection") or {}
    if selection.get("r2_keys") and selection.get("r2_values"):
        paths["r2"] = "figures/r2.png"
    return paths


def body(results: Results) -> list[str]:
    """Every section of one evaluation."""
    lines = [f"**{verdict(results['conditions'], results['tests']).sentence}**", ""]
    for said in (fit_warning(results), ancestry_sentence(results)):
        lines += [] if said is None else [f"**{said}**", ""]
    lines += _context(results)
    lines += ["## Headline", "", *_conditions_table(results["conditions"])]
    paths = figure_paths(results)
    lines += [f"![Every condition with its 95 % interval]({paths['conditions']})", ""]
    lines += ["## Tests", "", "First minus second, on the same items.", "", *_tests_table(results["tests"])]
    for name, extra in (results.get("tables") or {}).items():
        lines += _extra_table(name, extra)
    lines += _by_kind(results.get("by_kind") or {})
    if "r2" in paths:
        lines += ["## What the map reads", "", f"![Held-out R² of every source layer]({paths['r2']})", ""]
        lines += [
            "R² tells which source layers predict a target layer; it does not predict how well the target answers.",
            "",
        ]
    return lines + _gates(results) + about_map(results) + provenance(results)


def _context(results: Results) -> list[str]:
    """Two plain sentences under the verdict: what is kept, and what the controls do."""
    conditions, chance = results["conditions"], results.get("chance")
    mapped = conditions["mapped"]
    kept = []
    for key, text in (
        ("retention", "{} of the ceiling's accuracy is kept"),
        ("retention_floor_normalised", "{} of what lies above chance"),
        ("gap_recovered", "{} of the gap between source and ceiling is recovered in accuracy"),
        (
            "gap_recovered_nats",
            "{} of it in nats" if mapped.get("gap_recovered") is not None else "{} of the gap in nats",
        ),
    ):
        if mapped.get(key) is not None:
            kept.append(text.format(f"{percent(mapped[key])} {interval(mapped.get(f'{key}_ci'))}".rstrip()))
    lines = [f"{_capital(_listed(kept))}.", ""] if kept else []
    controls = [c for c in ("floor", "raw_copy", "wrong_donor", "random_map", "no_context") if c in conditions]
    if controls:
        parts = [f"{condition_name(c).lower()} {_measure(conditions[c])}" for c in controls]
        guess = f"; chance is {percent(chance)}" if chance and mapped["accuracy"] is not None else ""
        lines += [f"Controls: {_listed(parts)}{guess}.", ""]
    return lines


def _measure(row: Mapping[str, Any]) -> str:
    return f"{number(row['nats'])} nats" if row["accuracy"] is None else percent(row["accuracy"])


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _conditions_table(conditions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return table(("Condition", *MEASURES), [(condition_name(name), *_numbers(row)) for name, row in conditions.items()])


def _numbers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One condition's cells, in the order of the headline table."""
    ratios = ("retention", "retention_floor_normalised", "gap_recovered", "gap_recovered_nats")
    return (
        f"{percent(row['accuracy'])} {interval(row.get('accuracy_ci'))}".rstrip(),
        percent(row.get("generated")),
        perplexity(row["perplexity"]),
        f"{number(row['nats'])} {interval(row.get('nats_ci'), 'number')}".rstrip(),
        *(percent(row.get(key)) for key in ratios),
    )


def _comparison_name(key: str) -> str:
    first, _, second = key.partition("_vs_")
    others = {"source": "source alone", "ancestor_copy": "copy of each layer's ancestor"}
    return f"{condition_name(first)} vs {others.get(second, second)}"


def _tests_table(tests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    header = ("Comparison", "Accuracy", "95 %", "p (McNemar)", "Nats per token", "95 %", "p (paired t)")
    rows = [
        (_comparison_name(key), *_test_cells(row), str(row["n"]), str(row["documents"])) for key, row in tests.items()
    ]
    return table((*header, "Items", "Documents"), rows)


def _test_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        points(row["accuracy_difference"]),
        interval(row["accuracy_ci"]),
        p_value(row["accuracy_p"]),
        number(row["nll_difference"], sign=True),
        interval(row["nll_ci"], "number"),
        p_value(row["nll_p"]),
    )


def _extra_table(name: str, extra: Mapping[str, Any]) -> list[str]:
    titles = {"story_only": "When only the story is handed over"}
    notes = {"story_only": "The cache holds the story alone; the target reads the question itself."}
    lines = [f"## {titles.get(name) or _capital(name.replace('_', ' '))}", ""]
    lines += [notes[name], ""] if name in notes else []
    lines += _conditions_table(extra["conditions"])
    return lines + (_tests_table(extra["tests"]) if extra.get("tests") else [])


def _by_kind(by_kind: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    if not by_kind:
        return []
    kinds = list(by_kind)
    conditions = list(dict.fromkeys(c for row in by_kind.values() for c in row))
    rows = [(condition_name(c), *(percent(by_kind[kind].get(c)) for kind in kinds)) for c in conditions]
    return ["## Accuracy by kind of item", "", *table(("Condition", *kinds), rows)]


def _gates(results: Results) -> list[str]:
    if not results["gates"]:
        return []
    rows = [
        (gate["name"], _small(gate["value"]), _small(gate["tolerance"]), "passed" if gate["passed"] else "**failed**")
        for gate in results["gates"]
    ]
    lines = ["## Gates", "", "Checks that must hold before anything is recorded.", ""]
    if check := results.get("fit_check"):
        lines[2] += " The last one is of the map, and warns."
        passed = "passed" if check["passed"] else "**failed**"
        rows.append(("fit: largest drop in R²", number(check["worst"]["drop"]), setting(check["tolerated"]), passed))
    return lines + table(("Gate", "Value", "Tolerance", "Result"), rows)


def _small(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) and value else setting(value)


def about_map(results: Results) -> list[str]:
    """What the map is and what it costs."""
    fitted = results["map"]
    if not fitted:
        return []
    settings = {"solver": "Solver", "penalty": "Penalty", "lam": "λ (relative)", "rank": "Rank", "features": "Features"}
    settings["k"] = "Source layers per target layer (k)"
    rows = [(label, setting(fitted[key])) for key, label in settings.items() if key in fitted]
    rows += [
        ("Parameters", quantity(fitted.get("parameters"))),
        ("Size", quantity(fitted.get("bytes"), "B")),
        ("Cost per token", quantity(fitted.get("flops_per_token"), "FLOPs")),
        ("Share of the target's prefill FLOPs", percent(fitted.get("share_of_prefill_flops"))),
        ("SHA-256", _short(fitted.get("sha256"))),
    ]
    return ["## The map and its cost", "", *table(("Quantity", "Value"), rows)]


def _short(value: Any) -> str:
    """A provenance value in a cell: hashes cut, floats rounded, long texts and lists ended."""
    text = ", ".join(map(_short, value)) if isinstance(value, list) else setting(value)
    text = re.sub(r"\b[0-9a-f]{32,64}\b", lambda match: match.group()[:12], text)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _flat(value: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{path}.{key}" if path else str(key)
        rows += _flat(item, name) if isinstance(item, Mapping) else [(name, item)]
    return rows


def provenance(results: Results) -> list[str]:
    """Where it comes from."""
    pair = results["pair"] or {}
    rows = [("evaluation", setting(results["run_id"]))]
    simple = [(f"pair.{key}", item) for key, item in pair.items() if not isinstance(item, Mapping | list)]
    sides = [(side, pair[side]) for side in ("source", "target") if isinstance(pair.get(side), Mapping)]
    keys = ("model", "revision", "sha256")
    simple += [(f"{side}.{key}", item[key]) for side, item in sides for key in keys if item.get(key) is not None]
    # The whole configuration would bury what a reader looks for.
    others = simple + _flat({key: item for key, item in (results["provenance"] or {}).items() if key != "config"})
    rows += [(name, _short(item)) for name, item in others[:PROVENANCE_ROWS]]
    end = ["The whole configuration and every single item's scores are in `results.json`.", ""]
    return ["## Provenance", "", *table(("What", "Value"), rows, right=False), *end]


def design_rows(designs: Mapping[str, Results]) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    """Conditions and their names for one figure of all designs: the shared ones, then each design's mapped cache."""
    first = next(iter(designs.values()))["conditions"]
    rows: dict[str, Mapping[str, Any]] = {c: first[c] for c in ("ceiling", "source") if c in first}
    rows |= {f"mapped {name}": results["conditions"]["mapped"] for name, results in designs.items()}
    rows |= {c: first[c] for c in ("floor", "raw_copy", "no_context") if c in first}
    return rows, {f"mapped {name}": f"Mapped cache, design “{name}”" for name in designs}


def comparison(designs: Mapping[str, Results], best: str) -> list[str]:
    """Verdict on the best design, the shared baselines once, one row per design, then the best one in full."""
    chosen = designs[best]
    said = verdict(chosen["conditions"], chosen["tests"], subject=f"The best of {len(designs)} designs, {best},")
    lines = [f"**{said.sentence}**", "", *_strict(chosen, len(designs))]
    for name, results in designs.items():
        if (warning := fit_warning(results)) is not None:
            lines += [f"**Design `{name}`: {warning}**", ""]
    lines += ["## The designs", "", "What a target layer's keys and values are computed from:", ""]
    lines += [f"- `{name}`: {DESIGNS.get(name, 'see its configuration')}" for name in designs]
    header = ("Design", *MEASURES, "vs source", "p (McNemar)", "p (paired t)", "Map", "Prefill share")
    rows = []
    for name, results in designs.items():
        test, fitted = results["tests"]["mapped_vs_source"], results["map"] or {}
        cost = (quantity(fitted.get("parameters")), percent(fitted.get("share_of_prefill_flops")))
        tests = (points(test["accuracy_difference"]), p_value(test["accuracy_p"]), p_value(test["nll_p"]))
        label = f"**{name}** (best)" if name == best else name
        rows.append((label, *_numbers(results["conditions"]["mapped"]), *tests, *cost))
    lines += ["", *table(header, rows)]
    lines += ["Map: its parameters. Prefill share: its FLOPs per token in percent of the target's prefill.", ""]
    shared = {name: row for name, row in chosen["conditions"].items() if name not in PER_DESIGN}
    lines += ["What all designs are measured against:", "", *_conditions_table(shared)]
    lines += [f"![All designs with 95 % intervals]({figure_paths({'designs': designs})['designs']})", ""]
    return [*lines, "---", "", f"The rest is about the best design, `{best}`.", "", *body(chosen)]


def _strict(chosen: Results, count: int) -> list[str]:
    """The best of several was picked on the items it is tested on; Bonferroni's p says what is left of it."""
    test = chosen["tests"]["mapped_vs_source"]
    keys = {"accuracy_p": "McNemar", "nll_p": "paired t"}
    said = [f"{name} {p_text(min(1.0, count * test[key]))}" for key, name in keys.items() if test.get(key) is not None]
    if count < 2 or not said:
        return []
    return [f"It was picked on these same items; corrected for {count} tries (Bonferroni): {', '.join(said)}.", ""]
