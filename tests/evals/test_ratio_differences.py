"""Differences and means of ratios against scipy, the exact variance of simple cases, and one ratio's interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kvxfer.evals.intervals import mean_ratio_interval, ratio_difference, ratio_interval

DRAW = np.random.default_rng(5)
DOCUMENTS = [f"d{n // 2}" for n in range(80)]
BELOW = DRAW.uniform(1, 3, 80)
ABOVE = 0.8 * BELOW + DRAW.normal(0, 0.4, 80)
OTHER = 0.5 * BELOW + DRAW.normal(0, 0.4, 80)


def per_document(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 2).sum(1)


def test_with_constant_denominators_it_is_the_paired_t_test():
    ones = np.ones(80)
    found = ratio_difference((ABOVE, ones), (OTHER, ones), DOCUMENTS)
    a, b = per_document(ABOVE) / 2, per_document(OTHER) / 2
    assert found["difference"] == pytest.approx(a.mean() - b.mean())
    assert found["p"] == pytest.approx(stats.ttest_rel(a, b).pvalue)
    drawn = stats.bootstrap((a - b,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(1))
    assert (found["ci_low"], found["ci_high"]) == pytest.approx(drawn.confidence_interval, abs=0.01)


def test_ratios_of_sums_and_their_delta_method_error():
    found = ratio_difference((ABOVE, BELOW), (OTHER, BELOW), DOCUMENTS)
    assert found["difference"] == pytest.approx(ABOVE.sum() / BELOW.sum() - OTHER.sum() / BELOW.sum())
    # With one denominator for both, the difference is itself a ratio: the interval must be that ratio's.
    expected = ratio_interval(ABOVE - OTHER, BELOW, DOCUMENTS)
    assert (found["ci_low"], found["ci_high"]) == pytest.approx(expected)
    a, b = per_document(ABOVE - OTHER), per_document(BELOW)
    ratio = a.sum() / b.sum()
    error = (a - ratio * b).std(ddof=1) / b.mean() / np.sqrt(len(a))
    assert found["p"] == pytest.approx(2 * stats.t.sf(abs(ratio) / error, len(a) - 1))


def test_equal_ratios_differ_by_nothing_and_a_vanishing_denominator_has_no_answer():
    same = ratio_difference((ABOVE, BELOW), (ABOVE, BELOW), DOCUMENTS)
    assert (same["difference"], same["ci_low"], same["ci_high"], same["p"]) == (0, 0, 0, 1)
    assert set(ratio_difference((ABOVE, BELOW - 2), (OTHER, BELOW), DOCUMENTS).values()) == {None}
    assert set(ratio_difference((ABOVE, BELOW), (OTHER, -BELOW), DOCUMENTS).values()) == {None}
    assert ratio_difference((ABOVE, BELOW), (OTHER, BELOW), ["one"] * 80)["p"] == 1.0


def test_the_mean_of_several_ratios():
    one = mean_ratio_interval(ABOVE[:, None], BELOW[:, None], DOCUMENTS)
    assert one == pytest.approx(ratio_interval(ABOVE, BELOW, DOCUMENTS))
    both = mean_ratio_interval(np.stack([ABOVE, OTHER], 1), np.stack([BELOW, BELOW], 1), DOCUMENTS)
    assert both == pytest.approx(ratio_interval((ABOVE + OTHER) / 2, BELOW, DOCUMENTS))
    assert mean_ratio_interval(ABOVE[:, None], 0 * BELOW[:, None], DOCUMENTS) is None
