"""What the page of results says of two maps on the same items."""

from __future__ import annotations

import numpy as np
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
    assert found.ci[0] < found.nats < found.ci[1] < 0
    assert (found.as_good, difference(worse, better, pair.baseline).as_good) == (True, False)
    assert (found.above, found.sign_p) == (0.0, pytest.approx(2 / 2**40))
    assert difference(worse, worse, pair.baseline).outcome() == "none"


def test_accuracy_is_tested_by_document(tmp_path) -> None:
    """Of 40 documents of two questions each, ten are right in both by one side alone."""
    pair = load_results(write(tmp_path, collected([make_map(1.5)])))["toy"]
    nats = Scores.read(scores(1.5)).nats
    first, second = (Scores(nats, np.arange(80) < share) for share in (60, 40))
    found = difference(first, second, pair.baseline)
    assert found.accuracy == 0.25
    assert found.accuracy_p == pytest.approx(2 / 2**10)


def test_harm_that_signs_alone_show_is_worse_and_never_as_good(tmp_path) -> None:
    """39 documents lose a little, one wins more than all of them: the mean is better and shows nothing."""
    pair = load_results(write(tmp_path, collected([make_map(1.5)])))["toy"]
    before = Scores.read(scores(1.5))
    delta = np.full(80, 0.02)
    delta[:2] = -3.0
    found = difference(Scores(before.nats + delta, before.correct), before, pair.baseline)
    assert found.nats < 0
    assert found.p > 0.05
    assert found.outcome() == "worse"
    assert found.said == "worse (p < 0.001)"
