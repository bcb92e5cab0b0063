"""Any number of evaluations in one report: a table for each question, and paired tests between the maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.evals.full import heading
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.statistics import holm, mcnemar_exact, paired_difference
from kvxfer.report import markdown
from kvxfer.report.evaluations import Evaluated, groups, item_sets
from kvxfer.report.figures import conditions_figure
from kvxfer.report.pages import write_pages
from kvxfer.report.tables import interval, number, p_value, percent, points
from kvxfer.report.verdict import WORDS, Verdict, verdict

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
        sections += between(group)
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
    return f"{heading(run.results)} (pair {run.results['pair']['name']}{text}{_machine(run)})"


def _machine(run: Evaluated) -> str:
    """Where a timed evaluation ran."""
    found = run.results["provenance"]["config"].get("machine")
    if not found:
        return ""
    threads = f", {found['threads']} threads" if "threads" in found else ""
    return f", on {found.get('name', '?')}{threads}"


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


def between(group: Sequence[Evaluated]) -> list[str]:
    """Paired tests between runs on identical items, corrected for how many there are."""
    if len(group) < 2:
        return []
    every = len(group) <= ALL_PAIRS_UP_TO
    pairs = list(combinations(group, 2) if every else ((run, group[0]) for run in group[1:]))
    tests = [(where, a, b, test) for a, b in pairs for where, test in _tests(a, b)]
    if not tests:
        said = f"Runs of `{group[0].kind}` are not tested against each other: they keep no scores of single items."
        return ["### Between the runs", "", said, ""]
    corrected: dict[str, list[str]] = {}
    for key in ("p", "right_p"):
        adjusted = iter(holm([test[key] for *_, test in tests if test[key] is not None]))
        corrected[key] = ["" if test[key] is None else p_value(next(adjusted)) for *_, test in tests]
    rows = []
    for (where, a, b, test), p, right_p in zip(tests, corrected["p"], corrected["right_p"], strict=True):
        who = f"{a.label} vs {b.label}{where and f' ({where})'}"
        accuracy: tuple[str, ...] = ("", "")
        nats: tuple[str, ...] = ("", "")
        if test["right"] is not None:
            accuracy = (points(test["right"]), interval(test["right_ci"]))
        if test["nats"] is not None:
            nats = (number(test["nats"], sign=True), interval(test["nats_ci"], "number"))
        rows.append((who, *accuracy, right_p, *nats, p))
    which = "Every two runs" if every else f"Each run against {group[0].label}, the first that was named,"
    said = f"{which} on the same items, first minus second; p is corrected for {len(tests)} tests (Holm)."
    by = "p (paired t)" if any(test["graded"] for *_, test in tests) else "p (McNemar)"
    if by == "p (paired t)" and not all(test["graded"] or test["right"] is None for *_, test in tests):
        by = "p (McNemar, or paired t where it says score)"
    header = ("Comparison", "Accuracy", "95 %", by, "Nats per token", "95 %", "p (paired t)")
    return ["### Between the runs", "", said, "", *markdown.table(header, rows)]


def _tests(a: Evaluated, b: Evaluated) -> Iterator[tuple[str, dict[str, Any]]]:
    """First minus second for every set of items; the runs were asked the same, so that items are in one order."""
    others = item_sets(b.results)
    for where, items in item_sets(a.results).items():
        both = (items, others[where])
        documents = [str(item["document"]) for item in items]
        test: dict[str, Any] = dict.fromkeys(("nats", "p", "nats_ci", "right", "right_p", "right_ci"))
        graded = _have(both, "score")
        if _have(both, "nats"):
            tokens = np.array([item["tokens"] for item in items], dtype=float)
            nats = paired_difference(*_columns(both, "nats"), documents, tokens)
            test |= {"nats": nats["difference"], "p": nats["t_p"], "nats_ci": _ci(nats)}
        if graded or _have(both, "correct"):
            columns = _columns(both, "score" if graded else "correct")
            paired = paired_difference(*columns, documents)
            p = paired["t_p"] if graded else mcnemar_exact(*(column == 1 for column in columns))
            test |= {"right": paired["difference"], "right_p": p, "right_ci": _ci(paired)}
        yield f"{where}, score" if graded else where, {**test, "graded": graded}


def _have(both: Sequence[Sequence[Mapping[str, Any]]], key: str) -> bool:
    return all((item.get(key) or {}).get("mapped") is not None for items in both for item in items)


def _columns(both: Sequence[Sequence[Mapping[str, Any]]], key: str) -> tuple[Any, Any]:
    first, second = (np.array([item[key]["mapped"] for item in items], dtype=float) for items in both)
    return first, second


def _ci(paired: Mapping[str, Any]) -> list[float]:
    return [paired["ci_low"], paired["ci_high"]]
