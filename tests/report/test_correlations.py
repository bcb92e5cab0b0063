"""Correlations of diagnostics with what maps are worth, over made-up runs, against scipy."""

from __future__ import annotations

from typing import Any

import pytest
from scipy import stats

from kvxfer.report.correlations import correlate, section
from kvxfer.report.diagnostics import NAMES

ASKED = {"prefix": 64, "text": "toy"}
COSINES = [0.5, 0.9, 0.7, 0.95, 0.8]
SHARES = [0.1, 0.8, 0.7, 0.85, 0.4]
PAIR = {"name": "pair", "source": "small", "target": "large"}


def results(kind: str, sha: str, data: Any, eval_: Any = None, pair: Any = PAIR) -> dict[str, Any]:
    config = {"eval": {"name": "mapped", "stories": 200, **(eval_ or {})}, "corpus": {"kind": "toy"}, "plan": {}}
    fitted = {"sha256": sha, "run_id": sha, "features": "same", "solver": "ridge"}
    return {"kind": kind, "pair": pair, "map": fitted, "data": data, "provenance": {"config": config}}


def diagnosed(sha: str, cosine: float, asked: Any = ASKED) -> dict[str, Any]:
    domain = {name: {"value": cosine if name == "cosine" else 1 - cosine} for name in NAMES}
    return results("diagnostics", sha, {"asked": asked, "domains": [domain]})


def items(sha: str, share: float | None, eval_: Any = None, pair: Any = PAIR) -> dict[str, Any]:
    mapped = {"retention": share, "gap_recovered_nats": None if share is None else -share}
    return results("items", sha, {"conditions": {"mapped": mapped}}, eval_, pair)


OWN = diagnosed("this", COSINES[4])


def others(count: int = 4) -> list[dict[str, Any]]:
    """So many other maps that have both, and what must not count; older ones first."""
    found = [diagnosed("map0", 0.2)]
    for n in range(count):
        found.append(diagnosed(f"map{n}", COSINES[n]))
        found.append(items(f"map{n}", SHARES[n], {"name": str(n), "generate": False}))
    return [
        *found,
        items("this", SHARES[4]),
        diagnosed("map0", 0.1, {"prefix": 32}),
        items("map0", 0.0, {"stories": 9}),
        items("mapx", 0.3),
        items("map1", 0.3, pair={"name": "pair"}),
        results("latency", "map1", {}),
    ]


def test_every_map_that_has_both_counts_once():
    found = correlate(others(), OWN)
    assert len(found["maps"]) == 5
    row = next(r for r in found["rows"] if (r["measure"], r["downstream"]) == ("cosine", "retention"))
    assert row["n"] == 5
    for name, statistic in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        expected = statistic(COSINES, SHARES)
        assert row[name]["value"] == pytest.approx(expected.statistic)
        assert row[name]["p"] == pytest.approx(expected.pvalue)
        assert row[name]["ci"][0] <= row[name]["value"] <= row[name]["ci"][1]
    mirrored = next(r for r in found["rows"] if (r["measure"], r["downstream"]) == ("kl", "gap_recovered_nats"))
    assert mirrored["pearson"]["value"] == pytest.approx(row["pearson"]["value"])
    assert found["question"]["eval"] == {"stories": 200}
    text = section(found)
    assert "Over the 5 maps" in text
    assert "| accuracy retained | 5 |" in text


def test_with_few_maps_it_says_so():
    found = correlate(others(count=2), OWN)
    assert not any("pearson" in row for row in found["rows"])
    assert "Too few maps (3): 4 maps of this pair" in section(found)
    alone = correlate(others(), diagnosed("this", 0.9, {"prefix": 1}))
    assert [each["map"] for each in alone["maps"]] == ["this"]


def test_maps_without_answers_have_no_retention():
    found = [one for n in range(4) for one in (diagnosed(f"map{n}", COSINES[n]), items(f"map{n}", None))]
    assert {row["n"] for row in correlate(found, OWN)["rows"]} == {0}
