"""Paired comparisons of maps, corrected for how many were made, and rank correlations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvxfer.evals.intervals import mcnemar_exact, paired_difference
from kvxfer.report.tables import NOTHING, p_text
from tools.results_page.data import Baseline, Scores

LEVEL = 0.05
EXACT = 7
"""Points up to which a rank correlation's p is exact."""


@dataclass(frozen=True)
class Difference:
    """First minus second on the same items.

    ``nats`` per token (< 0: first is better), ``p`` of the paired t-test over documents. ``accuracy`` and
    ``accuracy_p``, of the exact McNemar test over items, are None without answers.
    """

    nats: float
    p: float
    accuracy: float | None
    accuracy_p: float | None

    def outcome(self, p: float | None = None) -> str:
        """``better``, ``worse`` or ``none`` in nats, by the given p instead of its own (a corrected one)."""
        if (self.p if p is None else p) >= LEVEL or self.nats == 0:
            return "none"
        return "better" if self.nats < 0 else "worse"

    @property
    def said(self) -> str:
        """The outcome and its p, for a cell."""
        outcome = self.outcome()
        return f"{NOTHING if outcome == 'none' else outcome} ({p_text(self.p)})"


def difference(first: Scores, second: Scores, baseline: Baseline) -> Difference:
    """Compare two sets of scores of a baseline's items."""
    nats = paired_difference(first.nats, second.nats, baseline.documents, baseline.tokens)
    accuracy = p = None
    if first.correct is not None and second.correct is not None:
        accuracy = float(first.correct.mean() - second.correct.mean())
        p = mcnemar_exact(first.correct, second.correct)
    return Difference(float(nats["difference"]), float(nats["t_p"]), accuracy, p)


def holm(ps: Sequence[float]) -> list[float]:
    """p adjusted for the number of tests: Holm's step-down method (1979), in the order given."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = largest
    return adjusted


def spearman(first: Sequence[float | int], second: Sequence[float | int]) -> tuple[float, float] | None:
    """Rank correlation and its two-sided p; None with fewer than 4 points or where one side does not vary.

    Up to ``EXACT`` points every permutation counts; the usual approximation says 0 for four points in order.
    """
    if len(first) < 4 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    found = stats.spearmanr(first, second)
    if len(first) > EXACT:
        return float(found.statistic), float(found.pvalue)
    ranks = stats.rankdata(second)
    exact = stats.permutation_test(
        (stats.rankdata(first),),
        lambda x: np.corrcoef(x, ranks)[0, 1],
        permutation_type="pairings",
        n_resamples=np.inf,
        vectorized=False,
    )
    return float(found.statistic), float(exact.pvalue)
