"""Correlations of diagnostics with what maps are worth, over made-up runs, against scipy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from kvxfer.evals.evaluation import Subject
from kvxfer.files import write_json
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.report.correlations import MEASURES, correlate
from kvxfer.report.diagnostics import correlation_table
from kvxfer.text.corpus import CorpusSpec
from tests.exact_maps import exact_map, with_itself

ASKED = {"prefix": 64, "text": "toy"}
COSINES = [0.5, 0.9, 0.7, 0.95, 0.8]
SHARES = [0.1, 0.8, 0.7, 0.85, 0.4]


@pytest.fixture
def subject(tiny_pair: Pair, tmp_path: Path) -> Subject:
    pair = with_itself(tiny_pair)
    cache_map = CacheMap(exact_map(pair).layers, {"run": "this"})
    return Subject(pair, cache_map, Mapper(cache_map), tmp_path, Plan(), CorpusSpec("toy", "toy", 64), (), tmp_path)


def measured(cosine: float) -> dict[str, float]:
    return {name: cosine if name == "cosine" else 1 - cosine for name in MEASURES}


def write(subject: Subject, run: str, about: dict[str, Any], sha: str, age: int = 0, pair: Any = None) -> None:
    folder = subject.outputs / "evaluate" / run
    folder.mkdir(parents=True)
    described = {"name": "pair", **subject.pair.describe()} if pair is None else pair
    fitted = {"sha256": sha, "run_id": sha, "features": "same", "solver": "ridge"}
    write_json(folder / "results.json", {"pair": described, "map": fitted, **about})
    os.utime(folder / "results.json", (age, age))


def diagnosed(cosine: float, asked: Any = ASKED) -> dict[str, Any]:
    domain = {name: {"value": value} for name, value in measured(cosine).items()}
    return {"kind": "diagnostics", "data": {"asked": asked, "domains": [domain]}}


def items(share: float | None, eval_: dict[str, Any] | None = None) -> dict[str, Any]:
    config = {"eval": {"name": "mapped", "stories": 200, **(eval_ or {})}, "corpus": {"kind": "toy"}, "plan": {}}
    mapped = {"retention": share, "gap_recovered_nats": None if share is None else -share}
    return {"conditions": {"mapped": mapped}, "provenance": {"config": config}}


def fill(subject: Subject, count: int = 4) -> None:
    """So many other maps that have both, and what must not count."""
    for n in range(count):
        write(subject, f"d{n}", diagnosed(COSINES[n]), f"map{n}", age=10)
        write(subject, f"i{n}", items(SHARES[n], {"name": str(n), "generate": False}), f"map{n}", age=10)
    write(subject, "mine", items(SHARES[4]), subject.cache_map.hash)
    write(subject, "other", diagnosed(0.1, {"prefix": 32}), "map0", age=20)
    write(subject, "old", diagnosed(0.2), "map0", age=1)
    write(subject, "asked", items(0.0, {"stories": 9}), "map0", age=20)
    write(subject, "alone", items(0.3), "mapx")
    write(subject, "stranger", items(0.3), "map1", age=30, pair={"name": "pair"})
    (subject.outputs / "evaluate" / "half").mkdir()
    (subject.outputs / "evaluate" / "half" / "results.json").write_text("{")


def test_every_map_that_has_both_counts_once(subject):
    fill(subject)
    found = correlate(subject, ASKED, measured(COSINES[4]))
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
    lines = "\n".join(correlation_table(found))
    assert "Over the 5 maps" in lines
    assert "| accuracy retained | 5 |" in lines


def test_with_few_maps_it_says_so(subject):
    fill(subject, count=2)
    found = correlate(subject, ASKED, measured(0.9))
    assert not any("pearson" in row for row in found["rows"])
    assert "Too few maps (3): 4 maps of this pair" in "\n".join(correlation_table(found))
    nothing = correlate(subject, {"prefix": 1}, measured(0.9))
    assert [each["map"] for each in nothing["maps"]] == [subject.cache_map.hash]


def test_maps_without_answers_have_no_retention(subject):
    for n in range(4):
        write(subject, f"d{n}", diagnosed(COSINES[n]), f"map{n}")
        write(subject, f"i{n}", items(None), f"map{n}")
    assert {row["n"] for row in correlate(subject, ASKED, measured(0.9))["rows"]} == {0}
