"""Any number of evaluations in one report: a table for each question, and paired tests between the maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.evals.statistics import holm, mcnemar_exact, paired_difference
from kvxfer.report.correlations import correlate, section
from kvxfer.report.document import document, write_pages
from kvxfer.report.evaluated import Evaluated, Json, groups
from kvxfer.report.kinds import REPORTS
from kvxfer.report.numbers import interval, number, p_value, percent, points
from kvxfer.report.prose import fill
from kvxfer.report.table import Table
from kvxfer.report.verdict import WORDS

ALL_PAIRS_UP_TO = 6
"""Runs up to which every two are tested; of more, each against the first."""

COMPARISON = "comparison.md"


def write_comparison(runs: Sequence[Evaluated], folder: Path, others: Sequence[Json] = ()) -> list[Path]:
    """Write the report of some evaluations with its figures; returns the paths of Markdown and page.

    Args:
        others: results of further evaluations, which diagnostics among the runs are correlated with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for n, group in enumerate(groups(runs), 1):
        REPORTS[group[0].kind].draw_beside(_results(group), folder / _figure(n))
    write_pages(render(runs, others), folder, COMPARISON)
    path = folder / COMPARISON
    return [path, path.with_suffix(".html")]


def render(runs: Sequence[Evaluated], others: Sequence[Json] = ()) -> str:
    """Markdown of a comparison."""
    asked, found = groups(runs), [*others, *(run.results for run in runs)]
    verdicts = [
        list(zip(group, REPORTS[group[0].kind].verdicts([run.results["data"] for run in group]), strict=True))
        for group in asked
    ]
    lead = fill(
        "side_by_side_lead",
        together=_together([(run.label, said.kind) for group in verdicts for run, said in group]),
        several=len(asked) > 1,
        verdicts=[(run.label, run.option, said.head) for group in verdicts for run, said in group],
    )
    sections = [
        fill(
            "side_by_side",
            title=f"{n}. {_title(group[0])}",
            runs=REPORTS[group[0].kind].beside(_results(group), _figure(n)),
            between=between(group),
            # What diagnostics that were asked the same foretell; nothing for another kind.
            correlations=section(correlate(found, group[0].results)) if group[0].kind == "diagnostics" else "",
        )
        for n, group in enumerate(asked, 1)
    ]
    return document("Evaluations side by side", lead, [_runs(runs), *sections])


def _results(group: Sequence[Evaluated]) -> dict[str, Json]:
    return {run.label: run.results for run in group}


def _together(verdicts: Sequence[tuple[str, str]]) -> str:
    """All verdicts, each a run's label and its kind, in a sentence."""
    words = {word: sorted(label for label, kind in verdicts if kind == key) for key, word in WORDS.items()}
    found = [f"{word.lower()}: {', '.join(labels)}" for word, labels in words.items() if labels]
    return f"{len(verdicts)} evaluation{'s' if len(verdicts) > 1 else ''} against the source alone; {'; '.join(found)}."


def _title(run: Evaluated) -> str:
    corpus = run.results["provenance"]["config"].get("corpus") or {}
    text = f", text {corpus['name']}" if "name" in corpus else ""
    # Where a timed evaluation ran.
    if found := run.results["provenance"]["config"].get("machine"):
        text += f", on {found.get('name', '?')}" + (f", {found['threads']} threads" if "threads" in found else "")
    return f"{REPORTS[run.kind].heading} (pair {run.results['pair']['name']}{text})"


def _runs(runs: Sequence[Evaluated]) -> str:
    """Which letter is which run."""
    rows = [
        (
            r.label,
            r.map_name,
            r.plan,
            r.option,
            percent(r.results["map"]["handoff_share_of_prefill_flops"]),
            f"`{r.id}`",
        )
        for r in runs
    ]
    header = ("Run", "Map", "Plan", "Evaluation", "Cost", "Id")
    said = "Cost: a whole handoff, in per cent of the FLOPs of the target's prefill. Plan: tokens the target computes."
    return f"## The runs\n\n{said}\n\n{Table(header, rows, right=False)}\n"


def _figure(n: int) -> str:
    return f"comparison_{n}.png"


def between(group: Sequence[Evaluated]) -> str:
    """Paired tests between runs on identical items, corrected for how many there are."""
    if len(group) < 2:
        return ""
    every = len(group) <= ALL_PAIRS_UP_TO
    pairs = list(combinations(group, 2) if every else ((run, group[0]) for run in group[1:]))
    tests = [(where, a, b, test) for a, b in pairs for where, test in _tests(a, b)]
    by = "p (paired t)" if any(test["graded"] for *_, test in tests) else "p (McNemar)"
    if by == "p (paired t)" and not all(test["graded"] or test["right"] is None for *_, test in tests):
        by = "p (McNemar, or paired t where it says score)"
    header = ("Comparison", "Accuracy", "95 %", by, "Nats per token", "95 %", "p (paired t)")
    rows = [
        (f"{a.label} vs {b.label}{where and f' ({where})'}", *cells)
        for (where, a, b, _), cells in zip(tests, _cells([test for *_, test in tests]), strict=True)
    ]
    first = None if every else group[0].label
    return fill("between", kind=group[0].kind, first=first, count=len(tests), table=Table(header, rows))


def _cells(tests: Sequence[Json]) -> list[tuple[str, ...]]:
    """Each test's differences, with p corrected for the number of tests."""
    corrected: dict[str, list[str]] = {}
    for key in ("p", "right_p"):
        adjusted = iter(holm([test[key] for test in tests if test[key] is not None]))
        corrected[key] = ["" if test[key] is None else p_value(next(adjusted)) for test in tests]
    rows: list[tuple[str, ...]] = []
    for test, p, right_p in zip(tests, corrected["p"], corrected["right_p"], strict=True):
        right = ("", "") if test["right"] is None else (points(test["right"]), interval(test["right_ci"]))
        known = test["nats"] is not None
        nats = (number(test["nats"], sign=True), interval(test["nats_ci"], "number")) if known else ("", "")
        rows.append((*right, right_p, *nats, p))
    return rows


def _tests(a: Evaluated, b: Evaluated) -> Iterator[tuple[str, dict[str, Any]]]:
    """First minus second for every set of items; the runs were asked the same, so that items are in one order."""
    others = b.items
    for where, items in a.items.items():
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
            right = (column == 1 for column in columns)
            p = paired["t_p"] if graded else mcnemar_exact(next(right), next(right), documents)
            test |= {"right": paired["difference"], "right_p": p, "right_ci": _ci(paired)}
        yield f"{where}, score" if graded else where, {**test, "graded": graded}


def _have(both: Sequence[Sequence[Json]], key: str) -> bool:
    return all((item.get(key) or {}).get("mapped") is not None for items in both for item in items)


def _columns(both: Sequence[Sequence[Json]], key: str) -> tuple[Any, Any]:
    first, second = (np.array([item[key]["mapped"] for item in items], dtype=float) for items in both)
    return first, second


def _ci(paired: Json) -> list[float]:
    return [paired["ci_low"], paired["ci_high"]]
