"""Do diagnostics foretell what a map is worth? Correlations over all maps of a pair that were evaluated so far."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Subject
from kvxfer.evals.statistics import correlation
from kvxfer.files import read_json

MEASURES = (
    "cosine",
    "cosine_output",
    "r2_keys",
    "r2_values",
    "concentration_keys",
    "concentration_values",
    "kl",
    "agreement",
)
"""The diagnostics of a domain that are one number."""

DOWNSTREAM = ("retention", "gap_recovered_nats")
"""What they are compared with, of the mapped cache in an evaluation of items."""

FEWEST_MAPS = 4

_SAME_SCORES = ("name", "conditions", "batch_size", "generate")


def correlate(subject: Subject, asked: Mapping[str, Any], measured: Mapping[str, float | None]) -> dict[str, Any]:
    """Each diagnostic against each downstream measure, over the maps that have both.

    Args:
        asked: what this run's diagnostics are of; those of other maps count where they are of the same.
        measured: this map's, by ``MEASURES``.

    Returns:
        ``maps`` (one row each: its map, features, diagnostics, downstream), ``question`` (what the items were), and
        ``rows`` (``measure``, ``downstream``, ``n``; ``pearson`` and ``spearman`` with value, interval and p where
        ``n`` is at least ``FEWEST_MAPS``).
    """
    found = _finished(subject)
    diagnosed = {
        results["map"]["sha256"]: {name: results["data"]["domains"][0][name]["value"] for name in MEASURES}
        for results in found
        if results.get("kind") == "diagnostics" and results["data"].get("asked") == asked
    }
    diagnosed[subject.cache_map.hash] = dict(measured)
    question, worth = _downstream([results for results in found if "kind" not in results], diagnosed)
    maps = [{"map": name, **about, "diagnostics": diagnosed[name]} for name, about in sorted(worth.items())]
    rows = [_row(maps, measure, downstream) for measure in MEASURES for downstream in DOWNSTREAM]
    return {"maps": maps, "question": question, "rows": rows, "fewest": FEWEST_MAPS}


def _finished(subject: Subject) -> list[dict[str, Any]]:
    """Results of evaluations of this pair, older ones first."""
    pair, found = subject.pair.describe(), []
    for file in sorted((subject.outputs / "evaluate").glob("*/results.json"), key=lambda each: each.stat().st_mtime):
        results = _read(file)
        about = results.get("pair")
        if isinstance(about, dict) and {key: value for key, value in about.items() if key != "name"} == pair:
            found.append(results)
    return found


def _read(file: Path) -> dict[str, Any]:
    """A results file, or nothing: what another version or a broken disk left must not end an evaluation."""
    try:
        found = read_json(file)
    except KvxferError:
        return {}
    return found if isinstance(found, dict) else {}


def _question(results: Mapping[str, Any]) -> str:
    """What an evaluation of items asked, blind to what does not change the mapped cache's scores."""
    config = results["provenance"]["config"]
    asked = {key: value for key, value in config["eval"].items() if key not in _SAME_SCORES}
    return json.dumps({"eval": asked, "corpus": config["corpus"], "plan": config["plan"]}, sort_keys=True)


def _downstream(
    results: Sequence[Mapping[str, Any]], diagnosed: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """Of the question that most of the diagnosed maps were asked: the question, and what each map came to."""
    usable = [
        each
        for each in results
        if (each.get("map") or {}).get("sha256") in diagnosed and "mapped" in each.get("conditions", {})
    ]
    if not usable:
        return None, {}
    asked = Counter(question for question, _ in {(_question(each), each["map"]["sha256"]) for each in usable})
    chosen = min(asked, key=lambda question: (-asked[question], question))
    worth = {}
    for each in usable:
        if _question(each) == chosen:
            mapped = each["conditions"]["mapped"]
            about = {key: each["map"][key] for key in ("run_id", "features", "solver")}
            worth[each["map"]["sha256"]] = {**about, "downstream": {name: mapped.get(name) for name in DOWNSTREAM}}
    return json.loads(chosen), worth


def _row(maps: Sequence[Mapping[str, Any]], measure: str, downstream: str) -> dict[str, Any]:
    pairs = [(each["diagnostics"][measure], each["downstream"][downstream]) for each in maps]
    kept = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
    row: dict[str, Any] = {"measure": measure, "downstream": downstream, "n": len(kept)}
    if len(kept) >= FEWEST_MAPS and np.ptp(kept, axis=0).min() > 0:
        row |= {name: correlation(kept[:, 0], kept[:, 1], name) for name in ("pearson", "spearman")}
    return row
