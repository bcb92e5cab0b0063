"""The verdict claims no more than both the test and the interval show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.evals.statistics import summarise
from kvxfer.report.numbers import p_value
from kvxfer.report.questions import QuestionsReport
from kvxfer.report.verdict import verdict


def make_test(difference: float, p: float, half: float = 0.01, nats: tuple[float, float] | None = None) -> dict:
    """The two dicts that a verdict reads: accuracy .7 + difference against .7, nats where given as (difference, p)."""
    conditions = {"source": {"accuracy": 0.7, "nats": 0.5}, "mapped": {"accuracy": 0.7 + difference, "nats": 0.5}}
    if nats is not None:
        conditions["mapped"]["nats"] += nats[0]
    said = None if nats is None else (nats[0], nats[1], 0.001)
    return {"conditions": conditions, "tests": {"mapped_vs_source": row((difference, p, half), said)}}


def row(accuracy: tuple[float, float, float] | None, nats: tuple[float, float, float] | None, n: int = 200) -> dict:
    """A test of n items; each measure is (difference, p, half of its 95 % interval), or None for one it has not."""
    found: dict[str, Any] = {"n": n, "documents": n}
    for measure, given in {"accuracy": accuracy, "nll": nats}.items():
        difference, p, half = given or (0.0, 1.0, 0.0)
        values = {"difference": difference, "p": p, "ci": [difference - half, difference + half], "se": half / 1.96}
        found |= {f"{measure}_{key}": None if given is None else value for key, value in values.items()}
    return found | {"nll_sign_p": None, "nll_above": None}


CLEAR = ((0.2, 1e-9, 0.05), (-0.5, 1e-9, 0.1))
"""The first is better in both measures."""

WORSE = ((-0.2, 1e-9, 0.05), (0.5, 1e-9, 0.1))
UNCLEAR = ((0.01, 0.8, 0.08), (-0.02, 0.7, 0.1))


def make_tests(
    mapped: tuple = CLEAR, source: tuple = CLEAR, lead: tuple = WORSE, n: int = 100, **controls: tuple
) -> dict:
    """All that a verdict reads, of a mapped cache that beats everything unless a comparison is given."""
    given = dict.fromkeys(("no_context", "floor", "raw_copy", "ancestor_copy"), CLEAR) | controls
    tests = {f"mapped_vs_{name}": row(*each, n=n) for name, each in given.items()}
    tests |= {"mapped_vs_source": row(*mapped, n=n), "source_vs_ceiling": row(*lead, n=n)}
    return tests | {"source_vs_no_context": row(*source, n=n)}


CONDITIONS = {"source": {"accuracy": 0.87, "nats": 3.36}, "mapped": {"accuracy": 0.9, "nats": 2.86}}


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


def test_worth_it_is_what_beats_the_source_and_all_that_costs_no_map():
    said = verdict(CONDITIONS, make_tests())
    assert said.kind == "beats"
    assert said.head == "Worth it: the mapped cache beats the source"


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ("no_context", "no context at all"),
        ("floor", "a zeroed cache"),
        ("raw_copy", "a raw copy of the source's cache"),
        ("ancestor_copy", "a copy of each layer's ancestor"),
    ],
)
@pytest.mark.parametrize("against", [UNCLEAR, WORSE, (CLEAR[0], WORSE[1]), (WORSE[0], CLEAR[1])])
def test_every_control_must_be_beaten_in_one_measure_and_in_none_lost_to(control, words, against):
    said = verdict(CONDITIONS, make_tests(**{control: against}))
    assert said.kind == "none"
    assert said.head == f"No benefit: the mapped cache beats the source, but is not shown to beat {words}"


def test_all_controls_that_are_not_beaten_are_named():
    said = verdict(CONDITIONS, make_tests(floor=UNCLEAR, no_context=WORSE))
    assert "not shown to beat no context at all or a zeroed cache, with" in said.sentence


def test_a_control_is_beaten_in_either_measure():
    assert verdict(CONDITIONS, make_tests(floor=(UNCLEAR[0], CLEAR[1]), raw_copy=(CLEAR[0], None))).kind == "beats"


@pytest.mark.parametrize("source", [UNCLEAR, WORSE, (CLEAR[0], WORSE[1])])
@pytest.mark.parametrize("mapped", [CLEAR, WORSE, UNCLEAR, (CLEAR[0], WORSE[1])])
def test_a_source_that_does_not_beat_no_context_shows_no_transfer_s_worth(mapped, source):
    said = verdict(CONDITIONS, make_tests(mapped, source))
    assert said.kind == "unable"
    begins = "Cannot tell: this pair cannot show a transfer's worth, since its source is not shown to beat the target"
    numbers = "The mapped cache against the source: accuracy 90.0 % against 87.0 %"
    assert said.sentence.startswith(f"{begins} without any context. {numbers}")


@pytest.mark.parametrize("mapped", [CLEAR, WORSE, UNCLEAR])
def test_where_the_target_has_no_lead_there_is_nothing_to_win(mapped):
    said = verdict(CONDITIONS, make_tests(mapped, lead=UNCLEAR))
    assert (said.kind, said.head) == ("unable", "Cannot tell: the target itself is not shown to beat the source")
    assert "Accuracy cannot decide" in said.sentence
    assert "Nats cannot decide" in said.sentence


def test_a_measure_without_a_lead_cannot_decide_even_for_the_map():
    """The map is better in accuracy, in which the target is not; in nats, in which it is, nothing is shown."""
    said = verdict(CONDITIONS, make_tests((CLEAR[0], UNCLEAR[1]), lead=(UNCLEAR[0], WORSE[1])))
    assert said.kind == "none"
    assert (
        said.head == "No benefit: the mapped cache is not shown to beat the source in nats (in accuracy it is better)"
    )


def test_what_could_be_shown_and_how_many_items_would_show_the_rest():
    """An error of 2 pp shows 5.6 pp four times in five; 1 pp takes (2.8 x 2 / 1)^2 times the items."""
    lead = ((-0.01, 0.6, 0.02 * 1.96), WORSE[1])
    mapped = (UNCLEAR[0], (-0.03, 0.2, 0.02 * 1.96))
    said = verdict(CONDITIONS, make_tests(mapped, lead=lead)).sentence
    assert (
        "Accuracy cannot decide: the target's own lead over the source is not shown in it (100 items show a difference "
        "of 5.6 pp four times in five; the 1.0 pp found would take about 3,100)."
    ) in said
    assert (
        "In nats 100 items show a difference of 0.056 nats per token four times in five; the 0.030 nats per token "
        "found would take about 350."
    ) in said


def test_advice_that_nobody_can_follow_is_not_given():
    said = verdict(CONDITIONS, make_tests(((1e-5, 0.9, 0.1), None))).sentence
    assert "would take" not in said
    alone = make_tests(((0.01, 1.0, 0.1), None))
    alone["mapped_vs_source"]["accuracy_se"] = None
    assert "In accuracy 100 items of one document show nothing." in verdict(CONDITIONS, alone).sentence


def test_harm_that_signs_alone_show_is_said():
    tests = make_tests((None, (0.2, 0.13, 0.3)))
    tests["mapped_vs_source"] |= {"nll_sign_p": 8e-21, "nll_above": 0.87}
    said = verdict(CONDITIONS, tests)
    assert said.kind == "worse"
    assert "paired t p = 0.13; higher in 87.0 % of the documents, sign test p < 0.001" in said.sentence


def hundred_questions() -> list[dict]:
    """Accuracy 90, 87, 31 and 90 % (ceiling, source, no context, mapped); 2.81, 3.36, 3.66 and 2.86 nats a token."""
    draw = np.random.default_rng(3)
    shares = {"ceiling": 90, "mapped": 90, "source": 87, "no_context": 31, "floor": 25, "raw_copy": 25}
    levels = {"ceiling": 2.81, "mapped": 2.86, "source": 3.36, "no_context": 3.66, "floor": 6.0, "raw_copy": 7.0}
    ease, hard = draw.permutation(100), draw.normal(0, 0.5, 100)
    own = {name: draw.normal(level, 0.2, 100) + hard for name, level in levels.items()}
    order = {name: np.roll(ease, 3 * n) for n, name in enumerate(shares)}
    return [
        {"id": f"q{n}", "document": f"d{n}", "tokens": 4, "kind": "where", "chance": 0.25}
        | {"nats": {name: 4 * float(own[name][n]) for name in levels}}
        | {"correct": {name: bool(order[name][n] < share) for name, share in shares.items()}}
        for n in range(100)
    ]


def test_a_lead_that_a_hundred_questions_cannot_show_is_left_to_nats():
    found = summarise(hundred_questions())
    rows = found["conditions"]
    assert [rows[name]["accuracy"] for name in ("ceiling", "source", "no_context", "mapped")] == [0.9, 0.87, 0.31, 0.9]
    said = QuestionsReport().verdict(found)
    assert said.kind == "beats"
    assert said.head == "Worth it: the mapped cache beats the source in nats (in accuracy no difference is shown)"
    assert "Accuracy cannot decide: the target's own lead over the source is not shown in it (100 items" in (
        said.sentence
    )
    assert rows["mapped"]["gap_recovered_nats"] == pytest.approx(0.9, abs=0.1)


def test_nothing_compared_is_no_verdict():
    said = verdict({}, {})
    assert (said.kind, said.sentence) == ("none", "The mapped cache was not compared with the source.")
