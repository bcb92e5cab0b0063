"""Any number of evaluations in one report: a table for each question, and paired tests between the maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.evals import markdown
from kvxfer.evals.figures import conditions_figure
from kvxfer.evals.full import heading
from kvxfer.evals.intervals import mcnemar_exact, paired_difference
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.pages import write_pages
from kvxfer.evals.tables import interval, number, p_value, percent, points
from kvxfer.evals.verdict import WORDS, Verdict, verdict
from kvxfer.reports.comparing import holm
from kvxfer.reports.evaluations import Evaluated, groups, item_sets

ALL_PAIRS_UP_TO = 6
"""Runs up to which every two are tested; of more, each against the first."""

MOST_METRICS = 60
COMPARISON = "comparison.md"


def write_comparison(runs: Sequence[Evaluated], folder: Path) -> list[Path]:
    """Write the report of some evaluations with its figures; returns the paths of Markdown and page."""
    folder.mkdir(parents=True, exist_ok=True)
    for n, group in enumerate(groups(runs), 1):
        if group[0].kind == "items":
            rows, names = _figure_rows(group)
            conditions_figure(rows, folder / _figure(n), group[0].results["chance"], names)
    write_pages(render(runs), folder, COMPARISON)
    path = folder / COMPARISON
    return [path, path.with_suffix(".html")]


def render(runs: Sequence[Evaluated]) -> str:
    """Markdown of a comparison."""
    asked = groups(runs)
    lead, sections = [], []
    for n, group in enumerate(asked, 1):
        items = group[0].kind == "items"
        lead += [f"- {line}" for line in _said(group)]
        sections += [f"## {n}. {markdown.plain_text(_title(group[0]))}", ""]
        sections += _items(group, n) if items else _metrics(group)
        sections += _between(group)
    first = [f"**{_together(asked)}**", ""]
    if len(asked) > 1:
        first += ["What was not asked the same stands in tables of its own, and no test is between them.", ""]
    return markdown.document("Evaluations side by side", [*first, *lead, ""], [*_runs(runs), *sections])


def _together(asked: Sequence[Sequence[Evaluated]]) -> str:
    """All verdicts in a sentence."""
    words: dict[str, list[str]] = {kind: [] for kind in WORDS}
    for group in asked:
        for run, said in zip(group, _verdicts(group), strict=True):
            words[said.kind].append(run.label)
    found = [f"{WORDS[kind].lower()}: {', '.join(sorted(labels))}" for kind, labels in words.items() if labels]
    count = sum(map(len, asked))
    return f"{count} evaluation{'s' if count > 1 else ''} against the source alone; {'; '.join(found)}."


def _title(run: Evaluated) -> str:
    corpus = run.results["provenance"]["config"].get("corpus") or {}
    text = f", text {corpus['name']}" if "name" in corpus else ""
    return f"{heading(run.results)} (pair {run.results['pair']['name']}{text})"


def _runs(runs: Sequence[Evaluated]) -> list[str]:
    """Which letter is which run."""
    rows = [
        (r.label, r.map_name, r.plan, r.option, percent(r.results["map"].get("share_of_prefill_flops")), f"`{r.id}`")
        for r in runs
    ]
    header = ("Run", "Map", "Plan", "Evaluation", "Cost", "Id")
    said = "Cost: the map's FLOPs per token in per cent of the target's prefill. Plan: tokens the target computes."
    return ["## The runs", "", said, "", *markdown.table(header, rows, right=False)]


def _corrected(group: Sequence[Evaluated]) -> list[dict[str, Any]]:
    """Every run's test against the source, with p corrected for the number of runs."""
    tests = [dict(run.results["tests"]["mapped_vs_source"]) for run in group]
    for key in ("accuracy_p", "nll_p"):
        known = [test for test in tests if test[key] is not None]
        for test, p in zip(known, holm([test[key] for test in known]), strict=True):
            test[key] = p
    return tests


def _verdicts(group: Sequence[Evaluated]) -> list[Verdict]:
    if group[0].kind != "items":
        return [KINDS[run.kind].verdict(run.results["data"]) for run in group]
    tests = zip(group, _corrected(group), strict=True)
    return [verdict(run.results["conditions"], {"mapped_vs_source": test}) for run, test in tests]


def _said(group: Sequence[Evaluated]) -> list[str]:
    """Every run's verdict in a line."""
    found = zip(group, _verdicts(group), strict=True)
    return [f"{run.label} ({run.option}): {said.head}." for run, said in found]


def _items(group: Sequence[Evaluated], n: int) -> list[str]:
    rows = []
    for run, test in zip(group, _corrected(group), strict=True):
        row = run.results["conditions"]["mapped"]
        rows.append(
            (
                f"{run.label}: {run.results['map']['features']}, {run.results['map']['solver']}",
                f"{percent(row['accuracy'])} {interval(row['accuracy_ci'])}".rstrip(),
                f"{number(row['nats'])} {interval(row['nats_ci'], 'number')}".rstrip(),
                *(percent(row[key]) for key in ("retention", "gap_recovered", "gap_recovered_nats")),
                points(test["accuracy_difference"]),
                p_value(test["accuracy_p"]),
                number(test["nll_difference"], sign=True),
                p_value(test["nll_p"]),
            )
        )
    measures = ("Accuracy", "Nats per token", "Retention", "Gap recovered", "Gap recovered (nats)")
    header = ("Run", *measures, "vs source", "p (McNemar)", "vs source, nats", "p (paired t)")
    first = group[0].results
    known = ((name, first["conditions"][name]) for name in ("ceiling", "source"))
    parts = [f"{name} {_measures(row)}" for name, row in known]
    said = f"All on the same {first['conditions']['mapped']['n']:,} items: {' and '.join(parts)}."
    corrected = f" p is corrected for {len(group)} runs (Holm)." if len(group) > 1 else ""
    figure = f"![Every run with its 95 % interval]({_figure(n)})"
    return [said + corrected, "", *markdown.table(header, rows), figure, ""]


def _measures(row: Mapping[str, Any]) -> str:
    accuracy = "" if row["accuracy"] is None else f"{percent(row['accuracy'])} right, "
    return f"{accuracy}{number(row['nats'])} nats per token"


def _figure(n: int) -> str:
    return f"comparison_{n}.png"


def _figure_rows(group: Sequence[Evaluated]) -> tuple[dict[str, Mapping[str, Any]], dict[str, str]]:
    first = group[0].results["conditions"]
    rows: dict[str, Mapping[str, Any]] = {name: first[name] for name in ("ceiling", "source")}
    rows |= {f"mapped {run.label}": run.results["conditions"]["mapped"] for run in group}
    rows |= {name: first[name] for name in ("floor", "raw_copy", "no_context")}
    names = {f"mapped {run.label}": f"Mapped cache, {run.label}: {run.results['map']['features']}" for run in group}
    return rows, names


def _metrics(group: Sequence[Evaluated]) -> list[str]:
    """Another kind's verdicts and its numbers, a column for each run."""
    lines = [f"- {run.label}: {said.sentence}" for run, said in zip(group, _verdicts(group), strict=True)]
    found = [KINDS[run.kind].metrics(run.results["data"]) for run in group]
    names = list(dict.fromkeys(name for metrics in found for name in metrics))
    rows = [(name, *(_plain(metrics.get(name)) for metrics in found)) for name in names[:MOST_METRICS]]
    lines += ["", *markdown.table(("Measure", *(run.label for run in group)), rows)]
    if len(names) > MOST_METRICS:
        lines += [f"{len(names) - MOST_METRICS} more are in the runs' results.json.", ""]
    return lines


def _plain(value: Any) -> str:
    """Four significant digits."""
    return "" if value is None else f"{value:,.4g}".replace("-", "\N{MINUS SIGN}")


def _between(group: Sequence[Evaluated]) -> list[str]:
    """Paired tests between runs on identical items, corrected for how many there are."""
    if len(group) < 2:
        return []
    every = len(group) <= ALL_PAIRS_UP_TO
    pairs = list(combinations(group, 2) if every else ((run, group[0]) for run in group[1:]))
    tests = [(where, a, b, test) for a, b in pairs for where, test in _tests(a, b)]
    if not tests:
        return []
    nats = holm([test["p"] for *_, test in tests])
    right = holm([test["right_p"] for *_, test in tests if test["right_p"] is not None])
    rows = []
    for (where, a, b, test), p in zip(tests, nats, strict=True):
        accuracy = p_value(right.pop(0)) if test["right_p"] is not None else ""
        cells = (number(test["nats"], sign=True), interval(test["nats_ci"], "number"), p_value(p))
        who = f"{a.label} vs {b.label}{where and f' ({where})'}"
        rows.append((who, points(test["right"]), interval(test["right_ci"]), accuracy, *cells))
    which = "Every two runs" if every else f"Each run against {group[0].label}, the first that was named,"
    said = f"{which} on the same items, first minus second; p is corrected for {len(tests)} tests (Holm)."
    header = ("Comparison", "Accuracy", "95 %", "p (McNemar)", "Nats per token", "95 %", "p (paired t)")
    return ["### Between the runs", "", said, "", *markdown.table(header, rows)]


def _tests(a: Evaluated, b: Evaluated) -> Iterator[tuple[str, dict[str, Any]]]:
    """First minus second for every set of items; the runs were asked the same, so that items are in one order."""
    others = item_sets(b.results)
    for where, items in item_sets(a.results).items():
        first, second = (
            np.array([item["nats"]["mapped"] for item in each], dtype=float) for each in (items, others[where])
        )
        documents = [str(item["document"]) for item in items]
        tokens = np.array([item["tokens"] for item in items], dtype=float)
        nats = paired_difference(first, second, documents, tokens)
        test: dict[str, Any] = {"nats": nats["difference"], "p": nats["t_p"], "nats_ci": _ci(nats)}
        test |= {"right": None, "right_p": None, "right_ci": None}
        if all((item.get("correct") or {}).get("mapped") is not None for item in (*items, *others[where])):
            flags = [np.array([bool(item["correct"]["mapped"]) for item in each]) for each in (items, others[where])]
            paired = paired_difference(flags[0], flags[1], documents)
            test |= {"right": paired["difference"], "right_p": mcnemar_exact(*flags), "right_ci": _ci(paired)}
        yield where, test


def _ci(paired: Mapping[str, Any]) -> list[float]:
    return [paired["ci_low"], paired["ci_high"]]
