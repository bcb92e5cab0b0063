"""Do diagnostics foretell what a map is worth? Correlations over the maps of a pair that have both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.evals.statistics import correlation
from kvxfer.report.diagnostics import NAMES
from kvxfer.report.numbers import interval, number, p_value
from kvxfer.report.prose import fill
from kvxfer.report.table import Table

Json = Mapping[str, Any]

DOWNSTREAM = {"retention": "accuracy retained", "gap_recovered_nats": "gap recovered (nats)"}
"""What diagnostics are compared with, of the mapped cache in an evaluation of items."""

FEWEST_MAPS = 4

_SAME_SCORES = ("name", "conditions", "batch_size", "generate")


def correlate(found: Sequence[Json], own: Json) -> dict[str, Any]:
    """Each diagnostic against each downstream measure, over the maps that have both.

    Args:
        found: results of evaluations, older ones first; of a map that was evaluated again the last one counts.
        own: those of a run of diagnostics: others of the same pair count where their diagnostics are of the same.

    Returns:
        ``maps`` (one row each: its map, features, diagnostics, downstream), ``question`` (what the items were), and
        ``rows`` (``measure``, ``downstream``, ``n``; ``pearson`` and ``spearman`` with value, interval and p where
        ``n`` is at least ``FEWEST_MAPS``).
    """
    same = [results for results in (*found, own) if _models(results) == _models(own)]
    diagnosed = {
        results["map"]["sha256"]: {name: results["data"]["domains"][0][name]["value"] for name in NAMES}
        for results in same
        if results["kind"] == "diagnostics" and results["data"]["asked"] == own["data"]["asked"]
    }
    question, worth = _downstream([results for results in same if results["kind"] == "items"], diagnosed)
    maps = [{"map": name, **about, "diagnostics": diagnosed[name]} for name, about in sorted(worth.items())]
    rows = [_row(maps, measure, downstream) for measure in NAMES for downstream in DOWNSTREAM]
    return {"maps": maps, "question": question, "rows": rows}


def section(found: Json) -> str:
    """The correlations as a section of a report."""
    rows = []
    for row in (row for row in found["rows"] if "pearson" in row):
        cells = [NAMES[row["measure"]], DOWNSTREAM[row["downstream"]], str(row["n"])]
        for one in (row["pearson"], row["spearman"]):
            cells += (number(one["value"], 2, sign=True), interval(one["ci"], "number"), p_value(one["p"]))
        rows.append(cells)
    header = ("Diagnostic", "against", "maps", "Pearson", "95 % interval", "p", "Spearman", "95 % interval", "p")
    return fill("correlations", count=len(found["maps"]), fewest=FEWEST_MAPS, table=Table(header, rows))


def _models(results: Json) -> dict[str, Any]:
    return {key: value for key, value in results["pair"].items() if key != "name"}


def _question(results: Json) -> str:
    """What an evaluation of items asked, blind to what does not change the mapped cache's scores."""
    config = results["provenance"]["config"]
    asked = {key: value for key, value in config["eval"].items() if key not in _SAME_SCORES}
    return json.dumps({"eval": asked, "corpus": config["corpus"], "plan": config["plan"]}, sort_keys=True)


def _downstream(results: Sequence[Json], diagnosed: Json) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """Of the question that most of the diagnosed maps were asked: the question, and what each map came to."""
    usable = [each for each in results if each["map"]["sha256"] in diagnosed]
    if not usable:
        return None, {}
    asked = Counter(question for question, _ in {(_question(each), each["map"]["sha256"]) for each in usable})
    chosen = min(asked, key=lambda question: (-asked[question], question))
    worth = {}
    for each in usable:
        if _question(each) == chosen:
            mapped = each["data"]["conditions"]["mapped"]
            about = {key: each["map"][key] for key in ("run_id", "features", "solver")}
            worth[each["map"]["sha256"]] = {**about, "downstream": {name: mapped.get(name) for name in DOWNSTREAM}}
    return json.loads(chosen), worth


def _row(maps: Sequence[Json], measure: str, downstream: str) -> dict[str, Any]:
    pairs = [(each["diagnostics"][measure], each["downstream"][downstream]) for each in maps]
    kept = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    row: dict[str, Any] = {"measure": measure, "downstream": downstream, "n": len(kept)}
    if len(kept) >= FEWEST_MAPS and np.ptp(kept, axis=0).min() > 0:
        row |= {name: correlation(kept[:, 0], kept[:, 1], name) for name in ("pearson", "spearman")}
    return row
