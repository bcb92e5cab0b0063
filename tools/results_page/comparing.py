"""Paired comparisons of maps on a baseline's items."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.evals.statistics import mcnemar_exact, paired_test
from kvxfer.report.numbers import NOTHING, p_text
from tools.results_page.data import Baseline, Scores

LEVEL = 0.05


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
    nats, nats_p = paired_test(first.nats, second.nats, baseline.documents, baseline.tokens)
    accuracy = p = None
    if first.correct is not None and second.correct is not None:
        accuracy = float(first.correct.mean() - second.correct.mean())
        p = mcnemar_exact(first.correct, second.correct)
    return Difference(nats, nats_p, accuracy, p)
