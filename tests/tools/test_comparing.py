"""What the page of results says of two maps on the same items."""

from __future__ import annotations

import pytest

from tests.collected import collected, make_map, scores, write
from tools.results_page.comparing import difference
from tools.results_page.data import Scores
from tools.results_page.loading import load_results


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
