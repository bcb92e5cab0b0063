"""The sections of report.md, each a list of lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.report.tables import (
    NOTHING,
    interval,
    number,
    p_value,
    percent,
    perplexity,
    points,
    quantity,
    setting,
)
from kvxfer.report.verdict import ancestry_sentence, cautions, verdict
from kvxfer.report.wording import GLOSSARY, INTRODUCTION, condition_name

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
    return plain_text(text).replace("|", "\\|")


def plain_text(text: str) -> str:
    """A name or message on one line that no reader of Markdown takes for a tag."""
    return re.sub(r"<(?=[A-Za-z/!?])", r"\\<", " ".join(str(text).split()))


def anchor(heading: str) -> str:
    """The name that a link to a heading uses, as common viewers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def document(title: str, lead: Sequence[str], sections: Sequence[str]) -> str:
    """A whole report: title, what it comes to (``lead``), what this is about, the sections, the glossary."""
    glossary = ["## Glossary", "", *(f"- **{term}**: {meaning}" for term, meaning in GLOSSARY), ""]
    return "\n".join([f"# {plain_text(title)}", "", *lead, INTRODUCTION, "", *sections, *glossary])


def lead(results: Results) -> list[str]:
    """The verdict of one evaluation of items, and what a reader must know with it."""
    return [f"**{verdict(results['conditions'], results['tests']).sentence}**", "", *warnings(results)]


def warnings(results: Results) -> list[str]:
    """That the map does less than its fit said, or the tests rest on little; what a pruned pair must show first."""
    said = [*cautions(results), ancestry_sentence(results)]
    return [line for each in said if each is not None for line in (f"**{each}**", "")]


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
    return [*findings(results), *about_map(results), *provenance(results)]


def findings(results: Results) -> list[str]:
    """What was measured, without the map's cost and where it comes from."""
    lines = _context(results)
    lines += ["## Headline", "", *conditions_table(results["conditions"])]
    paths = figure_paths(results)
    lines += [f"![Every condition with its 95 % interval]({paths['conditions']})", ""]
    lines += ["## Tests", "", "First minus second, on the same items.", "", *_tests_table(results["tests"])]
    for name, extra in (results.get("tables") or {}).items():
        lines += _extra_table(name, extra)
    lines += _by_kind(results.get("by_kind") or {})
    if "r2" in paths:
        lines += ["## What the map reads", "", f"![Validation R² of every single source layer]({paths['r2']})", ""]
        lines += [
            "R² tells which source layers predict a target layer; it does not predict how well the target answers.",
            "",
        ]
    return lines + _gates(results)


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


def conditions_table(conditions: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The headline table: one row per condition."""
    return table(("Condition", *MEASURES), [(condition_name(name), *numbers(row)) for name, row in conditions.items()])


def numbers(row: Mapping[str, Any]) -> tuple[str, ...]:
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
    lines += conditions_table(extra["conditions"])
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
    settings |= {"k": "Source layers per target layer (k)", "trained_on": "Trained on the map"}
    settings["trainer_seed"] = "Seed of the training"
    rows = [(label, setting(fitted[key])) for key, label in settings.items() if key in fitted]
    if "slice" in fitted:
        rows.append(("Target layers (a slice; what follows is of these alone)", fitted["slice"]))
    if fitted.get("random"):
        rows.append(("Weights", "random"))
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
