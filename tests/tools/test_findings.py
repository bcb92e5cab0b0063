"""Findings whose answer is planted in the results, each way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.collected import collected, make_map, write
from tools.results_page import findings
from tools.results_page.data import PairResults
from tools.results_page.loading import load_results


def pair_of(folder: Path, maps: list[dict[str, Any]]) -> PairResults:
    return load_results(write(folder, collected(maps)))["toy"]


@pytest.mark.parametrize(("attention", "kind"), [(1.5, "confirmed"), (1.3, "contradicted"), (1.7, "contradicted")])
def test_the_attention_penalty_is_compared_pairwise(attention: float, kind: str, tmp_path: Path) -> None:
    maps = [
        make_map(level + 0.3 * index, 2 * index + number, penalty=penalty, features=features)
        for index, features in enumerate(("same", "both"))
        for number, (penalty, level) in enumerate((("isotropic", 1.5), ("attention", attention)))
    ]
    found = findings.attention_penalty(pair_of(tmp_path, maps))
    assert found.kind == kind
    assert found.numbers.startswith("2 pairs of maps")


@pytest.mark.parametrize(
    ("levels", "kind", "word"),
    [
        ((1.3, 1.4, 1.5, 1.6), "confirmed", "quality falls"),
        ((1.6, 1.5, 1.4, 1.3), "confirmed", "quality rises"),
        ((1.3, 1.7, 1.5, 1.6), "contradicted", "nats"),
        ((1.3, 1.6, 1.599, 1.6), "not shown", "nats"),
        ((1.5, 1.7, 1.6, 1.5), "no difference found", "nats"),
    ],
)
def test_alpha_goes_one_way_or_not(levels: tuple[float, ...], kind: str, word: str, tmp_path: Path) -> None:
    maps = [
        make_map(level, number, penalty="attention", lam=1e-3, alpha=number / 3) for number, level in enumerate(levels)
    ]
    found = findings.alpha_monotone(pair_of(tmp_path, [*maps, make_map(1.2, 9, penalty="attention")]))
    assert found.kind == kind
    assert found.numbers.startswith(word)


@pytest.mark.parametrize(
    ("attention", "kind"),
    [((2.0, 1.7), "confirmed"), ((2.0, 1.6), "no difference found"), ((1.5, 1.7), "contradicted")],
)
def test_the_metrics_of_ranks_are_compared_at_every_rank(attention, kind: str, tmp_path: Path) -> None:
    isotropic = (1.8, 1.6)
    maps = [
        make_map(level, 2 * place + number, rank="reduced", r=(0.25, 0.5)[place], metric=metric)
        for number, (metric, levels) in enumerate((("isotropic", isotropic), ("attention", attention)))
        for place, level in enumerate(levels)
    ]
    assert findings.attention_rank(pair_of(tmp_path, maps)).kind == kind


@pytest.mark.parametrize(
    ("levels", "kind"),
    [((2.5, 1.6), "confirmed"), ((1.7, 1.5), "contradicted"), ((1.5, 1.5), "no difference found")],
)
def test_a_rank_collapses_when_it_loses_half_the_gap(levels, kind: str, tmp_path: Path) -> None:
    maps = [make_map(level, n, rank="reduced", r=(0.1, 0.5)[n]) for n, level in enumerate(levels)]
    found = findings.rank_collapse(pair_of(tmp_path, [*maps, make_map(1.5, 7), make_map(1.1, 8, features="both")]))
    assert found.kind == kind
    assert "full 1.500" in found.numbers


@pytest.mark.parametrize(("sign", "kind"), [(-1, "contradicted"), (1, "confirmed")])
def test_r2_predicts_where_more_of_it_goes_with_fewer_nats(sign: int, kind: str, tmp_path: Path) -> None:
    maps = [make_map(1.5 + 0.1 * n, n, lam=float(n + 1), r2=0.8 + sign * n / 100) for n in range(6)]
    found = findings.r2_predicts(pair_of(tmp_path, maps))
    assert found.kind == kind
    assert "same" in found.numbers.partition("within designs")[2]


def test_what_was_not_swept_is_not_measured(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, [make_map(1.5)])
    assert [check(pair).kind for _, check in findings.FINDINGS] == ["not measured"] * 5
    lines = findings.findings_table([pair])
    assert len(lines) == 2 + 5 + 1
    assert all("pair=toy eval=mapped" in line for line in lines[2:-1])
