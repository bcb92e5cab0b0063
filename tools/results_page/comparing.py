"""Paired comparisons of maps on a baseline's items."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.evals.statistics import Interval, Outcome, as_good, mcnemar_exact, outcome, paired_difference
from kvxfer.report.numbers import NOTHING, p_text
from tools.results_page.data import Baseline, Scores

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """First minus second on the same items.

    ``nats`` per token (< 0: first is better), its interval ``ci``, ``p`` of the paired t-test over documents,
    ``sign_p`` of the sign test over them, ``above`` the share of them in which the first has more nats. ``accuracy``
    and ``accuracy_p``, of the exact McNemar test by document, are None without answers.
    """

    nats: float
    ci: Interval
    p: float
    sign_p: float
    above: float
    accuracy: float | None
    accuracy_p: float | None

    def outcome(self, p: float | None = None) -> Outcome:
        """``better``, ``worse`` or ``none`` in nats, by the given p instead of its own (a corrected one)."""
        sign_p = self.sign_p if p is None else None
        return outcome(self.p if p is None else p, self.nats, self.ci, False, sign_p, self.above)

    @property
    def as_good(self) -> bool:
        """Whether the first is shown to be no worse by more than the margin (``kvxfer.evals.statistics.MARGIN``)."""
        return as_good(self.ci)

    @property
    def said(self) -> str:
        """The outcome and its p, for a cell."""
        found = self.outcome()
        # Signs may show what the mean does not.
        p = self.sign_p if found == "worse" and self.p >= LEVEL else self.p
        return f"{NOTHING if found == 'none' else found} ({p_text(p)})"


def difference(first: Scores, second: Scores, baseline: Baseline) -> Difference:
    """Compare two sets of scores of a baseline's items."""
    nats = paired_difference(first.nats, second.nats, baseline.documents, baseline.tokens)
    accuracy = p = None
    if first.correct is not None and second.correct is not None:
        accuracy = float(first.correct.mean() - second.correct.mean())
        p = mcnemar_exact(first.correct, second.correct, baseline.documents)
    ci = (float(nats["ci_low"]), float(nats["ci_high"]))
    sign_p, above = float(nats["sign_p"]), float(nats["above"])
    return Difference(float(nats["difference"]), ci, float(nats["t_p"]), sign_p, above, accuracy, p)
