"""The verdict claims no more than both the test and the interval show."""

from __future__ import annotations

import pytest

from kvxfer.report.numbers import p_value
from kvxfer.report.verdict import verdict


def make_test(difference: float, p: float, half: float = 0.01, nats: tuple[float, float] | None = None) -> dict:
    """The two dicts that a verdict reads: accuracy .7 + difference against .7, nats where given as (difference, p)."""
    conditions = {"source": {"accuracy": 0.7, "nats": 0.5}, "mapped": {"accuracy": 0.7 + difference, "nats": 0.5}}
    test = {"accuracy_difference": difference, "accuracy_p": p, "accuracy_ci": [difference - half, difference + half]}
    test |= {"nll_p": None, "nll_difference": None, "nll_ci": None}
    if nats is not None:
        conditions["mapped"]["nats"] += nats[0]
        test |= {"nll_difference": nats[0], "nll_p": nats[1], "nll_ci": [nats[0] - 0.001, nats[0] + 0.001]}
    return {"conditions": conditions, "tests": {"mapped_vs_source": test}}


@pytest.mark.parametrize(
    ("difference", "p", "half", "kind", "words"),
    [
        (
            0.08,
            1e-9,
            0.01,
            "beats",
            "Worth it: the mapped cache beats the source, with accuracy 78.0 % against 70.0 % (+8.0 pp",
        ),
        (0.01, 0.4, 0.03, "none", "No benefit: the mapped cache is not shown to beat the source, with accuracy"),
        (-0.01, 0.4, 0.03, "none", "No benefit: the mapped cache is not shown to beat the source, with accuracy"),
        (-0.08, 1e-9, 0.01, "worse", "Harmful: the mapped cache is worse than the source, with accuracy 62.0 %"),
        # The items say yes, whole documents do not: McNemar alone is not enough.
        (0.04, 0.01, 0.05, "none", "No benefit"),
    ],
)
def test_verdict_in_accuracy(difference, p, half, kind, words):
    said = verdict(**make_test(difference, p, half))
    assert said.kind == kind
    assert words in said.sentence
    assert ("p < 0.001" if p < 0.001 else f"p = {p_value(p)}") in said.sentence


@pytest.mark.parametrize(
    ("difference", "p", "nats", "kind", "words"),
    [
        (0.08, 1e-9, (-0.1, 1e-9), "beats", "beats the source, with accuracy"),
        (0.08, 1e-9, (-0.0001, 0.7), "beats", "beats the source in accuracy (in nats no difference is shown), with"),
        (0.001, 0.9, (-0.1, 1e-9), "none", "is not shown to beat the source in accuracy (in nats it is better)"),
        (0.001, 0.9, (0.1, 1e-9), "none", "is not shown to beat the source in accuracy (in nats it is worse)"),
        (
            0.08,
            1e-9,
            (0.1, 1e-9),
            "mixed",
            "Mixed: the mapped cache is better than the source in accuracy and worse in nats",
        ),
        (-0.08, 1e-9, (-0.1, 1e-9), "mixed", "worse than the source in accuracy and better in nats"),
    ],
)
def test_verdict_in_accuracy_and_nats(difference, p, nats, kind, words):
    said = verdict(**make_test(difference, p, nats=nats))
    assert said.kind == kind
    assert words in said.sentence
    assert "nats per token" in said.sentence


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        (0.08, "Worth it: after 1024 tokens the mapped cache beats the source, with accuracy"),
        (0.001, "No benefit: after 1024 tokens the mapped cache is not shown to beat the source, with accuracy"),
        (-0.08, "Harmful: after 1024 tokens the mapped cache is worse than the source, with accuracy"),
    ],
)
def test_another_subject_is_grammatical(difference, said):
    sentence = verdict(**make_test(difference, 1e-9), subject="After 1024 tokens the mapped cache").sentence
    assert sentence.startswith(said)


def test_nothing_compared_is_no_verdict():
    said = verdict({}, {})
    assert (said.kind, said.sentence) == ("none", "The mapped cache was not compared with the source.")
