"""Runs of every kind against each other: on the items that the kind says it has, with the test that suits them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvxfer.report.evaluated import Evaluated
from kvxfer.report.side_by_side import between

RNG = np.random.default_rng(0)
COUNT = 30


def runs(kind: str, *data: dict[str, Any]) -> list[Evaluated]:
    return [Evaluated(label, {"kind": kind, "data": each}) for label, each in zip("AB", data, strict=False)]


def items(more: Any) -> list[dict[str, Any]]:
    return [{"id": str(n), "document": f"d{n}", **more(n)} for n in range(COUNT)]


def row_of(text: str, name: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| A vs B ({name})"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def shown(cell: str) -> float:
    return 0.0005 if cell == "< 0.001" else float(cell)


def test_written_text_is_tested_by_exact_match_and_kl() -> None:
    right, kl = RNG.random((2, COUNT)) < 0.6, RNG.random((2, COUNT))
    data = [
        {
            "answers": True,
            "items": items(lambda n, r=r, k=k: {"exact": {"mapped": bool(r[n])}, "kl": {"mapped": float(k[n])}}),
        }
        for r, k in zip(right, kl, strict=True)
    ]
    row = row_of(between(runs("generation", *data)), "exact match, KL from the ceiling")
    only = [int((right[a] & ~right[b]).sum()) for a, b in ((0, 1), (1, 0))]
    assert shown(row[3]) == pytest.approx(stats.binomtest(only[0], sum(only)).pvalue, abs=0.006)
    assert shown(row[6]) == pytest.approx(stats.ttest_rel(*kl).pvalue, abs=0.006)


def test_benchmarks_are_tested_by_what_they_score() -> None:
    def benchmark(name: str, binary: bool, scores: Any) -> dict[str, Any]:
        samples = items(lambda n: {"measure": "acc", "scores": {"acc": {"mapped": float(scores[n])}}})
        return {"name": name, "binary": binary, "samples": samples}

    right, graded = (RNG.random((2, COUNT)) < 0.6).astype(float), RNG.random((2, COUNT))
    data = [
        {"benchmarks": [benchmark("choices", True, r), benchmark("coqa", False, g)]}
        for r, g in zip(right, graded, strict=True)
    ]
    text = between(runs("lm_eval", *data))
    ps = [shown(row_of(text, name)[3]) for name in ("choices", "coqa, score")]
    only = [int(((right[a] == 1) & (right[b] == 0)).sum()) for a, b in ((0, 1), (1, 0))]
    expected = [stats.binomtest(only[0], sum(only)).pvalue, stats.ttest_rel(*graded).pvalue]
    first = int(np.argmin(expected))
    assert ps[first] == pytest.approx(min(1.0, 2 * expected[first]), abs=0.006)
    assert "Nats per token" not in text
    assert "p (McNemar, or paired t where it says score)" in text


def test_conversations_are_tested_by_pattern() -> None:
    data = {
        "patterns": {"up": {}, "down": {}},
        "items": items(
            lambda n: {"tokens": 2, "nats": {"up": 1.0 * n, "down": 2.0 * n}, "correct": {"up": n % 2 == 0}}
        ),
    }
    found = Evaluated("A", {"kind": "multiturn", "data": data}).items
    assert list(found) == ["Up: small to large", "Down: large to small"]
    assert [item["nats"]["mapped"] for item in found["Down: large to small"]][:3] == [0.0, 2.0, 4.0]
    assert "correct" not in found["Down: large to small"][0]
    rows = [line for line in between(runs("multiturn", data, data)).splitlines() if line.startswith("| A vs B")]
    assert len(rows) == 2


def test_where_there_is_nothing_to_test_the_page_says_so() -> None:
    said = between(runs("latency", {"points": []}, {"points": []}))
    assert "Runs of `latency` are not tested against each other" in said
