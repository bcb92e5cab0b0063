"""Several designs of a map side by side (``designs``): the shared baselines once, the best design in full."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich.table

from kvxfer.errors import KvxferError
from kvxfer.report.document import Results, about_map, document, lead, provenance
from kvxfer.report.kind_report import FirstScreen
from kvxfer.report.kinds import REPORTS
from kvxfer.report.numbers import p_text, p_value, percent, points, quantity
from kvxfer.report.prose import fill
from kvxfer.report.questions import (
    MEASURES,
    against,
    beside_figure,
    conditions_table,
    narrow_table,
    numbers,
    terminal_table,
)
from kvxfer.report.table import Table
from kvxfer.report.verdict import few_documents, fit_warning, verdict
from kvxfer.report.wording import DESIGNS, condition_name

PER_DESIGN = ("mapped", "mapped_all", "wrong_donor", "random_map")
FIGURE = "figures/designs.png"
SAME_ITEMS = 1e-6


def best_design(designs: Mapping[str, Results]) -> str:
    """The design whose mapped cache is most accurate, the lowest nats deciding ties and tasks without accuracy."""
    if not designs:
        raise KvxferError("designs: 0 were evaluated and at least 1 is needed; name one of same, both, previous")

    def rank(name: str) -> tuple[float, float]:
        row = designs[name]["data"]["conditions"]["mapped"]
        return row["accuracy"] or 0.0, -row["nats"]

    return max(designs, key=rank)


def compare_designs(designs: Mapping[str, Results], title: str) -> dict[str, Any]:
    """results.json of a comparison: every design's results, and the best one's name, run, map and verdict.

    Raises KvxferError when two designs were not scored on the same items: their ceilings or sources differ.
    """
    best = best_design(designs)
    for name, results in designs.items():
        for condition in ("ceiling", "source"):
            a, b = (r["data"]["conditions"][condition] for r in (designs[best], results))
            if a["n"] != b["n"] or abs(a["nats"] - b["nats"]) > SAME_ITEMS * max(1.0, abs(a["nats"])):
                raise KvxferError(
                    f"designs {best} and {name}: {condition} has {a['nats']:.6g} nats on {a['n']} items and "
                    f"{b['nats']:.6g} on {b['n']}; evaluate them on the same items"
                )
    chosen = designs[best]
    data = chosen["data"]
    said = verdict(data["conditions"], data["tests"], f"The best of {len(designs)} designs, {best},")
    own = {"kind": "designs", "title": title, "verdict": vars(said)}
    return {**chosen, **own, "data": {"designs": dict(designs), "best": best}}


def render(results: Results) -> str:
    """Markdown: the verdict on the best design and what is left of it after so many tries, all designs, the best."""
    designs, best = results["data"]["designs"], results["data"]["best"]
    chosen, report = designs[best], REPORTS["items"]
    conditions = chosen["data"]["conditions"]
    own = fill(
        "designs",
        designs={name: DESIGNS.get(name, "see its configuration") for name in designs},
        table=_table(designs, best),
        shared=conditions_table({name: row for name, row in conditions.items() if name not in PER_DESIGN}),
        figure=FIGURE,
        best=best,
        lead=lead(report.verdict(chosen["data"]).sentence, report.remarks(chosen["data"])),
    )
    few = few_documents(chosen["data"])
    warned = {name: fit_warning(each["data"]) for name, each in designs.items()}
    said = [results["verdict"]["sentence"], *([] if few is None else [few])]
    said += (f"Design `{name}`: {warning}" for name, warning in warned.items() if warning)
    rows = [(condition_name(name), chosen["data"], name) for name in ("ceiling", "source")]
    rows += [(f"Mapped, {name}", each["data"], "mapped") for name, each in designs.items()]
    found = [*against(chosen["data"]), *_strict(chosen["data"], len(designs))]
    first = FirstScreen(narrow_table(rows), FIGURE, "All designs with 95 % intervals", found).markdown(said)
    sections = [own, report.sections(chosen["data"]), about_map(chosen), provenance(chosen)]
    return document(results["title"], first, sections)


def _strict(data: Results, count: int) -> list[str]:
    """The best of several was picked on the items it is tested on; Bonferroni's p says what is left of it."""
    test = data["tests"]["mapped_vs_source"]
    keys = {"accuracy_p": "McNemar", "nll_p": "paired t"}
    said = [f"{name} {p_text(min(1.0, count * test[key]))}" for key, name in keys.items() if test.get(key) is not None]
    if count < 2 or not said:
        return []
    return [f"It was picked on these same items; corrected for {count} tries (Bonferroni): {', '.join(said)}."]


def _table(designs: Mapping[str, Results], best: str) -> Table:
    header = (
        "Design",
        *MEASURES,
        "vs source",
        "p (McNemar)",
        "p (paired t)",
        "Map",
        "Handoff's share of prefill",
        "Map alone",
    )
    rows = []
    for name, results in designs.items():
        test, fitted = results["data"]["tests"]["mapped_vs_source"], results["map"]
        costs = ("handoff_share_of_prefill_flops", "share_of_prefill_flops")
        cost = (quantity(fitted.get("parameters")), *(percent(fitted[key]) for key in costs))
        tests = (points(test["accuracy_difference"]), p_value(test["accuracy_p"]), p_value(test["nll_p"]))
        label = f"**{name}** (best)" if name == best else name
        rows.append((label, *numbers(results["data"]["conditions"]["mapped"]), *tests, *cost))
    return Table(header, rows)


def figures(results: Results, directory: Path, folders: Mapping[str, Path]) -> None:
    """All designs in one figure, between what they share; and the best one's own."""
    designs = {name: each["data"] for name, each in results["data"]["designs"].items()}
    beside_figure({f"Mapped cache, design “{name}”": data for name, data in designs.items()}, directory / FIGURE)
    REPORTS["items"].figures(designs[results["data"]["best"]], directory / "figures")


def terminal(results: Results) -> rich.table.Table:
    """The shared conditions once, then the mapped cache of every design."""
    designs, best = results["data"]["designs"], results["data"]["best"]
    data = designs[best]["data"]
    shared = [name for name in data["conditions"] if name not in PER_DESIGN]
    rows = [(condition_name(name, short=True), data, name) for name in shared]
    for name, design in designs.items():
        labels = {"mapped": f"Mapped, {name}", "mapped_all": "  all but last"}
        own = design["data"]
        rows += [(label, own, key) for key, label in labels.items() if key in own["conditions"]]
    said = verdict(data["conditions"], data["tests"], f"The mapped cache ({best})").sentence
    costs = (f"{name} {percent(each['map']['handoff_share_of_prefill_flops'])}" for name, each in designs.items())
    cost = f"A whole handoff's FLOPs, of the target's own prefill: {', '.join(costs)}."
    return terminal_table(results["title"], rows, [said, cost, *REPORTS["items"].remarks(data)])
