"""Corrections and correlations against what is known of them."""

from __future__ import annotations

import pytest

from kvxfer.report.comparing import difference, holm, spearman
from tests.collected import collected, make_map, scores, write
from tools.results_page.data import Scores
from tools.results_page.loading import load_results


def test_holm_multiplies_the_smallest_by_all_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_spearman_needs_points_that_vary() -> None:
    found = spearman([1, 2, 3, 4, 5], [5, 4, 3, 2, 1])
    assert found is not None
    assert found[0] == pytest.approx(-1)
    assert spearman([1, 2, 3], [3, 2, 1]) is None
    assert spearman([1, 1, 1, 1], [1, 2, 3, 4]) is None


def test_a_difference_is_first_minus_second(tmp_path) -> None:
    pair = load_results(write(tmp_path, collected([make_map(1.5)])))["toy"]
    better, worse = (Scores.read(scores(level, seed)) for level, seed in ((1.4, 8), (1.6, 9)))
    found = difference(better, worse, pair.baseline)
    assert found.nats == pytest.approx(-0.2, abs=1e-4)
    assert found.outcome() == "better"
    assert found.outcome(0.2) == "none"
    assert found.accuracy is not None
    assert found.accuracy >= 0
    assert difference(worse, worse, pair.baseline).outcome() == "none"


def test_the_p_of_a_few_points_is_exact() -> None:
    assert spearman([0, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx((1.0, 2 / 24))
    assert spearman([0, 1, 2, 3, 4], [5, 4, 3, 2, 1]) == pytest.approx((-1.0, 2 / 120))
