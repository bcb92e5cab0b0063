"""The statistics against arithmetic written out differently and published tables, and what little data says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import (
    accuracy_interval,
    as_good,
    correlation,
    floor_normalised,
    gap_recovered,
    gap_recovered_nats,
    holm,
    items_needed,
    mcnemar_exact,
    mean_interval,
    mean_ratio_interval,
    outcome,
    paired_difference,
    rank_correlation,
    ratio_difference,
    ratio_interval,
    retention,
    sign_test,
    summarise,
    summarise_scores,
)

DRAW = np.random.default_rng(5)
DOCUMENTS = [f"d{n // 2}" for n in range(80)]
BELOW = DRAW.uniform(1, 3, 80)
ABOVE = 0.8 * BELOW + DRAW.normal(0, 0.4, 80)
OTHER = 0.5 * BELOW + DRAW.normal(0, 0.4, 80)


def bools(text: str) -> np.ndarray:
    return np.array([character == "1" for character in text])


def make_items(count: int = 60, per_document: int = 3, answers: bool = True) -> list[dict]:
    """Items on which ceiling > mapped > source > no context > floor, in both measures."""
    draw = np.random.default_rng(7)
    shares = {"ceiling": 0.95, "source": 0.5, "mapped": 0.85, "mapped_all": 0.7, "floor": 0.2, "no_context": 0.3}
    items = []
    for index in range(count):
        hard = draw.random()
        right = {name: bool(hard < share) for name, share in shares.items()}
        tokens = 1 + index % 2
        item = {"id": f"q{index}", "document": f"d{index // per_document}", "kind": ("where", "who")[index % 2]}
        item |= {"chance": 0.2, "tokens": tokens}
        item["nats"] = {
            name: tokens * (0.1 if ok else 2.0) * float(draw.uniform(0.8, 1.2)) for name, ok in right.items()
        }
        if answers:
            item |= {"correct": right, "generated": right | {"mapped": False}}
        items.append(item)
    return items


def numbered(count: int) -> list[str]:
    """As many documents."""
    return [f"d{n}" for n in range(count)]


def test_mcnemar_without_discordant_items_is_one():
    assert mcnemar_exact(bools("1010"), bools("1010"), numbered(4)) == 1.0


def test_mcnemar_of_a_single_document_is_one():
    assert mcnemar_exact(bools("111111"), bools("000000"), ["d"] * 6) == 1.0


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (6, 2), (2, 6), (4, 4)])
def test_mcnemar_counts_every_way_in_which_items_could_have_fallen(only_a, only_b):
    """Each separating item falls to a or to b as a coin does: how many of all outcomes are as uneven as this one?"""
    a, b = bools("1" * only_a + "0" * only_b + "11100"), bools("0" * only_a + "1" * only_b + "11100")
    count = only_a + only_b
    outcomes = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
    uneven = sum(abs(2 * each - count) >= abs(only_a - only_b) for each in outcomes)
    found = mcnemar_exact(a, b, numbered(len(a)))
    assert found == pytest.approx(uneven / 2**count, rel=1e-12)
    assert found == pytest.approx(stats.binomtest(only_a, count).pvalue)


@pytest.mark.parametrize("seed", range(6))
def test_mcnemar_swaps_the_sides_of_whole_documents(seed):
    """Of all ways to do so: how many leave the sides as far apart as they are?"""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 6, 9)
    documents = [f"d{n}" for n, size in enumerate(sizes) for _ in range(size)]
    a, b = draw.random(len(documents)) < 0.8, draw.random(len(documents)) < 0.5
    ahead = [int((a.astype(int) - b)[[d == name for d in documents]].sum()) for name in dict.fromkeys(documents)]
    swapped = [abs(np.dot(signs, ahead)) for signs in itertools.product((1, -1), repeat=9)]
    expected = np.mean([each >= abs(sum(ahead)) for each in swapped])
    order = draw.permutation(len(documents))
    shuffled = [documents[n] for n in order]
    assert mcnemar_exact(a[order], b[order], shuffled) == pytest.approx(expected, rel=1e-12)
    assert mcnemar_exact(b, a, documents) == pytest.approx(expected, rel=1e-12)


def test_items_that_stand_or_fall_together_count_once():
    a, b = np.repeat(bools("111110"), 20), np.repeat(bools("000001"), 20)
    assert mcnemar_exact(a, b, [f"d{n // 20}" for n in range(120)]) == pytest.approx(2 * (6 + 1) / 2**6)


def test_the_sign_test_counts_documents():
    """Document means, whatever their weights: 8 above, 2 below, one equal and left out."""
    a = np.array([1.0, 9.0] + [1.0] * 7 + [-50.0, -1.0, 0.0])
    weights = np.array([1.0, 40.0] + [1.0] * 10)
    p, above = sign_test(a, np.zeros(12), ["d0", *numbered(11)], weights)
    assert p == pytest.approx(2 * (1 + 10 + 45) / 2**10)
    assert above == 0.8
    # A document is above by the sum of its items.
    assert sign_test(np.array([3.0, -1.0, -1.0]), np.zeros(3), ["a", "a", "b"]) == (1.0, 0.5)


def test_the_sign_test_of_nothing_or_one_document_is_no_evidence():
    assert sign_test(np.ones(4), np.ones(4), numbered(4)) == (1.0, 0.5)
    assert sign_test(np.ones(4), np.zeros(4), ["d"] * 4) == (1.0, 1.0)


def test_wilson_s_interval_is_what_solves_its_equation():
    """Its ends are the shares p from which the observed one lies 1.96 standard errors of p away."""
    ends = accuracy_interval(np.arange(40) < 33)
    assert ends[0] < 33 / 40 < ends[1]
    for end in ends:
        assert abs(33 / 40 - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / 40), rel=1e-9)


@pytest.mark.parametrize(("pattern", "edge"), [("1" * 20, 1), ("0" * 20, 0)])
def test_accuracy_interval_keeps_a_width_at_the_edges(pattern, edge):
    interval = accuracy_interval(bools(pattern), [f"d{i // 2}" for i in range(20)])
    assert interval[edge] == pytest.approx(float(edge))
    assert interval[1] - interval[0] > 0.05


def test_items_that_stand_or_fall_together_widen_the_accuracy_interval():
    correct = np.repeat(bools("11010110"), 25)
    alone = accuracy_interval(correct)
    together = accuracy_interval(correct, [f"d{i // 25}" for i in range(200)])
    assert together[1] - together[0] > 2 * (alone[1] - alone[0])


def test_the_bootstrap_is_a_loop_over_documents():
    """A ratio of sums, documents of several items each; both have Monte-Carlo error, of about 0.5 % of the width."""
    draw = np.random.default_rng(8)
    sizes = draw.integers(1, 6, 60)
    documents = [f"d{n:02d}" for n, size in enumerate(sizes) for _ in range(size)]
    below = draw.integers(1, 4, len(documents)).astype(float)
    above = below * draw.normal(0.6, 0.4, len(documents))
    sums = np.array(
        [(above[one].sum(), below[one].sum()) for one in (np.array(documents) == d for d in set(documents))]
    )
    drawn = sums[draw.integers(0, 60, (6000, 60))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    assert ratio_interval(above, below, documents) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_mean_interval_is_the_same_every_time_and_whatever_the_documents_are_called():
    values = np.random.default_rng(0).normal(size=30)
    names = [f"d{i // 3:02d}" for i in range(30)]
    assert mean_interval(values, names) == mean_interval(values, names)
    assert mean_interval(values, names) == mean_interval(values, [name.replace("d", "story ") for name in names])


def test_weights_make_it_a_ratio_of_sums():
    nats, tokens, documents = np.array([2.0, 9.0, 4.0]), np.array([1.0, 3.0, 2.0]), ["a", "b", "c"]
    low, high = mean_interval(nats, documents, tokens)
    assert 2.0 <= low <= 15 / 6 <= high <= 3.0


def test_constant_data_has_a_point_for_an_interval():
    assert mean_interval(np.full(12, 0.5), [f"d{i // 2}" for i in range(12)]) == pytest.approx((0.5, 0.5))


def test_a_single_document_is_resampled_by_item_and_tested_not_at_all():
    a, b = np.array([3.0, 2.0, 4.0, 3.5]), np.array([1.0, 1.5, 1.0, 0.5])
    result = paired_difference(a, b, ["only"] * 4)
    assert result["t_p"] == 1.0
    assert result["n_documents"] == 1
    assert result["ci_low"] < result["difference"] < result["ci_high"]


def test_a_single_item_is_no_evidence():
    result = paired_difference(np.array([2.0]), np.array([1.0]), ["d"])
    assert result == {
        **{"difference": 1.0, "ci_low": 1.0, "ci_high": 1.0, "t_p": 1.0, "se": math.inf},
        **{"sign_p": 1.0, "above": 1.0, "n_items": 1, "n_documents": 1},
    }


def test_paired_t_is_student_s_of_the_very_ratio():
    """Four documents, the first of two items and four tokens: sums 2, 1, -0.5, 2 over 4, 1, 1, 1 tokens."""
    a, b = np.array([1.0, 5.0, 2.0, 3.0, 5.0]), np.array([2.0, 2.0, 1.0, 3.5, 3.0])
    found = paired_difference(a, b, list("wwxyz"), np.array([3.0, 1.0, 1.0, 1.0, 1.0]))
    ratio = 4.5 / 7
    assert found["difference"] == pytest.approx(ratio)
    # The residuals of Cochran's ratio, over the mean number of tokens of a document.
    residuals = (np.array([2.0, 1.0, -0.5, 2.0]) - ratio * np.array([4.0, 1.0, 1.0, 1.0])) / (7 / 4)
    error = math.sqrt((residuals**2).sum() / 3) / 2
    assert found["se"] == pytest.approx(error)
    x = ratio / error / math.sqrt(3)
    # Survival function of Student's t with 3 degrees of freedom, in closed form.
    tail = 0.5 - (math.atan(x) + x / (1 + x * x)) / math.pi
    assert found["t_p"] == pytest.approx(2 * tail)
    assert (found["sign_p"], found["above"]) == (pytest.approx(2 * 5 / 16), 0.75)


def test_where_all_weigh_the_same_it_is_scipy_s_paired_t_of_document_means():
    found = paired_difference(ABOVE, OTHER, DOCUMENTS)
    means = per_document(ABOVE) / 2, per_document(OTHER) / 2
    expected = stats.ttest_rel(*means)
    assert found["t_p"] == pytest.approx(expected.pvalue)
    assert found["difference"] / found["se"] == pytest.approx(expected.statistic)


def test_its_p_and_sign_are_of_one_estimand():
    """A long document outweighs many short ones: per token a is above, and the t says how sure that is."""
    sums, tokens = np.array([-1.0] * 9 + [400.0]), np.array([1.0] * 9 + [100.0])
    found = paired_difference(sums, np.zeros(10), numbered(10), tokens)
    assert found["difference"] == pytest.approx(391 / 109)
    both = ratio_difference((sums, tokens), (np.zeros(10), tokens), numbered(10))
    assert found["t_p"] == pytest.approx(both["p"])
    assert (found["above"], found["sign_p"]) == (0.1, pytest.approx(2 * 11 / 2**10))


def heavy_tailed() -> tuple[np.ndarray, list[str]]:
    """200 documents: 174 lose, 26 gain, and one of either does so by so much that the mean shows nothing."""
    draw = np.random.default_rng(0)
    lost, gained = draw.uniform(0.01, 0.2, 173), -draw.uniform(0.01, 0.2, 25)
    return np.concatenate([lost, gained, [12.0, -9.0]])[draw.permutation(200)], numbered(200)


def test_a_heavy_tail_hides_no_harm():
    delta, documents = heavy_tailed()
    found = paired_difference(delta, np.zeros(200), documents)
    assert found["above"] == pytest.approx(174 / 200)
    assert found["t_p"] > 0.1
    ci = (found["ci_low"], found["ci_high"])
    said = found["t_p"], found["difference"], ci, False
    assert outcome(*said) == "none"
    assert outcome(*said, found["sign_p"], found["above"]) == "worse"
    # Of the issue: 174 of 200 documents worse, t: p = .13.
    p = stats.binomtest(174, 200).pvalue
    assert p < 1e-20
    assert outcome(0.13, 0.02, (-0.01, 0.07), False, p, 174 / 200) == "worse"
    # The same signs are no gain where more is better: only a mean can show one.
    assert outcome(0.13, 0.02, (-0.01, 0.07), True, p, 174 / 200) == "none"


@pytest.mark.parametrize("higher", [True, False])
def test_a_mean_and_signs_that_disagree(higher):
    """Nothing is gained where most documents lose; what both call worse is worse; signs that show nothing change no
    outcome."""
    side = 1 if higher else -1
    gain = (1e-4, side * 0.2, (0.1, 0.3) if higher else (-0.3, -0.1), higher)
    loss = (1e-4, -side * 0.2, (-0.3, -0.1) if higher else (0.1, 0.3), higher)
    better, worse = (0.8, 0.2) if higher else (0.2, 0.8)
    assert outcome(*gain, 1e-4, better) == "better"
    assert outcome(*gain, 1e-4, worse) == "none"
    assert outcome(*gain, 0.2, worse) == "better"
    assert outcome(*loss, 1e-4, worse) == "worse"
    assert outcome(*loss, 1e-4, better) == "worse"
    assert outcome(*loss) == "worse"


def test_as_good_is_shown_by_an_interval_below_the_margin():
    assert as_good((-0.02, 0.0099))
    assert not as_good((-0.02, 0.0101))
    assert as_good((-0.9, 0.19), margin=0.2)


def test_items_needed_show_a_difference_four_times_in_five():
    """By simulation: normal differences of one item for each document, of a tenth of their spread."""
    needed = items_needed(0.1, 1 / math.sqrt(50), 50)
    assert needed == math.ceil(50 * (2.8 * 10 / math.sqrt(50)) ** 2) == 784
    draws = np.random.default_rng(1).normal(0.1, 1, (2000, needed))
    assert (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.03)
    assert items_needed(-0.1, 1 / math.sqrt(50), 50) == needed
    assert items_needed(5.0, 0.01, 50) == 1
    assert items_needed(0.1, math.inf, 1) is None
    assert items_needed(0.0, 0.1, 50) is None


def test_the_paired_t_test_sees_documents_not_items():
    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.0, 1.5, 1.0])
    once = paired_difference(a, b, list("xyz"))
    often = paired_difference(np.repeat(a, 50), np.repeat(b, 50), [d for d in "xyz" for _ in range(50)])
    assert often["t_p"] == pytest.approx(once["t_p"])
    assert often["n_items"] == 150
    assert often["ci_low"] == pytest.approx(once["ci_low"])


def test_equal_scores_differ_by_nothing():
    a = np.random.default_rng(1).normal(size=9)
    result = paired_difference(a, a.copy(), [f"d{i // 3}" for i in range(9)])
    assert (result["difference"], result["ci_low"], result["ci_high"], result["t_p"]) == (0.0, 0.0, 0.0, 1.0)


def test_a_difference_without_spread_is_worth_its_number_of_documents():
    result = paired_difference(np.full(6, 3.0), np.full(6, 2.0), [f"d{i}" for i in range(6)])
    assert result["t_p"] == pytest.approx(2 / 2**6)


def test_ratios():
    assert retention(0.9, 0.95) == pytest.approx(0.9 / 0.95)
    assert floor_normalised(0.9, 0.95, 0.2) == pytest.approx(0.7 / 0.75)
    assert gap_recovered(0.9, 0.8, 0.95) == pytest.approx(2 / 3)
    assert gap_recovered(0.7, 0.8, 0.95) == pytest.approx(-2 / 3)
    assert gap_recovered_nats(0.4, 0.8, 0.2) == pytest.approx(2 / 3)
    assert gap_recovered_nats(1.0, 0.8, 0.2) == pytest.approx(-1 / 3)


@pytest.mark.parametrize(
    ("retained", "average", "normalised"),
    [((101.0, 97.6, 98.5, 95.0, 95.6), 97.6, 96.3), ((94.0, 95.2, 91.0, 88.5, 68.8), 87.5, 80.7)],
    ids=["14B to 32B", "8B to 32B"],
)
def test_floor_normalised_retention_gives_the_paper_s_averages(retained, average, normalised):
    """arXiv 2608.03893: retention of five tasks and its two averages (table 1), in %; both pairs share a target.

    The target's accuracies follow from what the 14B's map scores (table 2) and retains.
    """
    chances = (0.25, 0.25, 0.5, 0.25, 0.0)
    known = zip((61.60, 80.70, 68.98, 78.09, 90.98), (101.0, 97.6, 98.5, 95.0, 95.6), strict=True)
    target = [accuracy / share for accuracy, share in known]
    mapped = [share / 100 * whole for share, whole in zip(retained, target, strict=True)]
    kept = [100 * retention(*each) for each in zip(mapped, target, strict=True)]
    above = [100 * floor_normalised(*each) for each in zip(mapped, target, chances, strict=True)]
    # To the printed digit: what is averaged here was rounded to it before.
    assert np.mean(kept) == pytest.approx(average, abs=0.1)
    assert np.mean(above) == pytest.approx(normalised, abs=0.1)


def test_ratios_without_a_denominator_are_none():
    assert retention(0.1, 0.0) is None
    assert floor_normalised(0.3, 0.2, 0.2) is None
    assert gap_recovered(0.9, 0.8, 0.8 + 1e-12) is None
    assert gap_recovered(0.9, 0.8, 0.7) is None
    assert gap_recovered_nats(0.3, 0.2, 0.2) is None


def test_a_ratio_whose_denominator_may_vanish_has_no_interval():
    assert ratio_interval(np.array([1.0, 2.0, 1.0]), np.array([1.0, -1.0, 0.5]), list("abc")) is None


def test_summarise_agrees_with_plain_sums():
    items = make_items()
    summary = summarise(items)
    mapped = summary["conditions"]["mapped"]
    shown = ("ceiling", "source", "mapped", "no_context")
    right = {c: sum(item["correct"][c] for item in items) for c in shown}
    nats = {c: sum(item["nats"][c] for item in items) for c in shown}
    tokens = sum(item["tokens"] for item in items)
    assert mapped["accuracy"] == pytest.approx(right["mapped"] / 60)
    assert mapped["retention"] == pytest.approx(right["mapped"] / right["ceiling"])
    assert mapped["retention_floor_normalised"] == pytest.approx((right["mapped"] - 12) / (right["ceiling"] - 12))
    gap = (right["mapped"] - right["source"]) / (right["ceiling"] - right["source"])
    assert mapped["gap_recovered"] == pytest.approx(gap)
    assert mapped["nats"] == pytest.approx(nats["mapped"] / tokens)
    assert mapped["perplexity"] == pytest.approx(math.exp(nats["mapped"] / tokens))
    gap = (nats["source"] - nats["mapped"]) / (nats["source"] - nats["ceiling"])
    assert mapped["gap_recovered_nats"] == pytest.approx(gap)
    context = (right["mapped"] - right["no_context"]) / (right["ceiling"] - right["no_context"])
    assert mapped["context_recovered"] == pytest.approx(context)
    context = (nats["no_context"] - nats["mapped"]) / (nats["no_context"] - nats["ceiling"])
    assert mapped["context_recovered_nats"] == pytest.approx(context)
    assert [summary["conditions"]["no_context"][f"context_recovered{unit}"] for unit in ("", "_nats")] == [0, 0]
    assert mapped["generated"] == 0.0
    ratios = [f"{base}_recovered{unit}" for base in ("gap", "context") for unit in ("", "_nats")]
    for key in ("accuracy", "nats", "retention", "retention_floor_normalised", *ratios):
        low, high = mapped[f"{key}_ci"]
        assert low <= mapped[key] <= high
    assert summary["chance"] == pytest.approx(0.2)
    documents = [item["document"] for item in items]
    surprise, scored = (
        np.array(column) for column in zip(*((i["nats"]["mapped"], i["tokens"]) for i in items), strict=True)
    )
    assert mapped["nats_ci"] == list(mean_interval(surprise, documents, scored))
    above, best = (np.array([item["correct"][c] - 0.2 for item in items]) for c in ("mapped", "ceiling"))
    normalised = ratio_interval(above, best, documents)
    assert mapped["retention_floor_normalised_ci"] == pytest.approx(normalised)
    where = [item["correct"]["mapped"] for item in items if item["kind"] == "where"]
    assert summary["by_kind"]["where"]["mapped"] == pytest.approx(sum(where) / len(where))


def test_tests_are_first_minus_second_and_agree_with_the_conditions():
    items = make_items()
    summary = summarise(items)
    assert set(summary["tests"]) == {
        *(f"{a}_vs_{b}" for a in ("mapped", "mapped_all") for b in ("source", "ceiling")),
        *("mapped_vs_no_context", "mapped_vs_floor", "source_vs_ceiling", "source_vs_no_context"),
    }
    tokens, documents = np.array([item["tokens"] for item in items]), [item["document"] for item in items]
    for name, test in summary["tests"].items():
        first, second = (summary["conditions"][c] for c in name.split("_vs_"))
        assert test["accuracy_difference"] == pytest.approx(first["accuracy"] - second["accuracy"])
        assert test["nll_difference"] == pytest.approx(first["nats"] - second["nats"])
        assert (test["n"], test["documents"]) == (60, 20)
        columns = [np.array([item["nats"][c] for item in items]) for c in name.split("_vs_")]
        assert (test["nll_sign_p"], test["nll_above"]) == sign_test(*columns, documents, tokens)
        assert test["nll_se"] == paired_difference(*columns, documents, tokens)["se"]
        right = [np.array([item["correct"][c] for item in items]) for c in name.split("_vs_")]
        assert test["accuracy_se"] == paired_difference(*right, documents)["se"]
    better = summary["tests"]["mapped_vs_source"]
    assert better["accuracy_difference"] > 0 > better["nll_difference"]
    mapped, source = (np.array([item["correct"][c] for item in items]) for c in ("mapped", "source"))
    assert better["accuracy_p"] == mcnemar_exact(mapped, source, documents) < 0.01


def test_perplexity_only_items_have_no_accuracy_anywhere():
    summary = summarise(make_items(answers=False))
    assert summary["by_kind"] == {}
    mapped, test = summary["conditions"]["mapped"], summary["tests"]["mapped_vs_source"]
    assert [mapped[k] for k in ("accuracy", "accuracy_ci", "generated", "retention", "gap_recovered")] == [None] * 5
    assert mapped["gap_recovered_nats"] > 0
    assert test["accuracy_p"] is None
    assert test["nll_p"] < 0.05


def test_one_document_and_all_equal_give_finite_numbers():
    items = make_items(6, per_document=6)
    for item in items:
        item["correct"] = dict.fromkeys(item["correct"], True)
        item["nats"] = dict.fromkeys(item["nats"], 0.5)
    summary = summarise(items)
    mapped, test = summary["conditions"]["mapped"], summary["tests"]["mapped_vs_source"]
    assert mapped["retention"] == 1.0
    assert mapped["gap_recovered"] is None
    assert (test["accuracy_p"], test["nll_p"]) == (1.0, 1.0)
    assert all(math.isfinite(edge) for edge in [*mapped["accuracy_ci"], *mapped["nats_ci"], *test["nll_ci"]])


def test_a_hopeless_condition_has_no_perplexity_rather_than_an_overflow():
    items = make_items(8)
    for item in items:
        item["nats"]["floor"] = 5000.0
    assert summarise(items)["conditions"]["floor"]["perplexity"] is None


def test_nothing_scored_is_an_error():
    nothing = np.zeros(0)
    for call in (
        lambda: summarise([]),
        lambda: mcnemar_exact(nothing.astype(bool), nothing.astype(bool), []),
        lambda: sign_test(nothing, nothing, []),
        lambda: accuracy_interval(nothing.astype(bool)),
        lambda: mean_interval(nothing, []),
        lambda: paired_difference(nothing, nothing, []),
    ):
        with pytest.raises(KvxferError, match="0 items"):
            call()


def test_a_missing_condition_and_a_nan_are_named():
    items = make_items(6)
    del items[4]["nats"]["mapped"]
    with pytest.raises(KvxferError, match="q4 has no nats for condition mapped"):
        summarise(items)
    items = make_items(6)
    items[2]["nats"]["floor"] = math.nan
    with pytest.raises(KvxferError, match="q2 has nan nats under condition floor"):
        summarise(items)


def test_items_without_scored_tokens_are_refused():
    items = make_items(6)
    items[1]["tokens"] = 0
    with pytest.raises(KvxferError, match="0 scored tokens"):
        summarise(items)


def test_documents_of_another_length_are_refused():
    with pytest.raises(KvxferError, match="2 document keys"):
        mean_interval(np.ones(3), ["a", "b"])


def per_document(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1, 2).sum(1)


def test_a_difference_of_ratios_over_constants_is_the_paired_t_test():
    ones = np.ones(80)
    found = ratio_difference((ABOVE, ones), (OTHER, ones), DOCUMENTS)
    a, b = per_document(ABOVE) / 2, per_document(OTHER) / 2
    assert found["difference"] == pytest.approx(a.mean() - b.mean())
    assert found["p"] == pytest.approx(stats.ttest_rel(a, b).pvalue)
    drawn = stats.bootstrap((a - b,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(1))
    assert (found["ci_low"], found["ci_high"]) == pytest.approx(drawn.confidence_interval, abs=0.01)


def test_a_difference_of_ratios_has_the_delta_method_s_error():
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


def test_the_interval_of_a_mean_of_ratios():
    one = mean_ratio_interval(ABOVE[:, None], BELOW[:, None], DOCUMENTS)
    assert one == pytest.approx(ratio_interval(ABOVE, BELOW, DOCUMENTS))
    both = mean_ratio_interval(np.stack([ABOVE, OTHER], 1), np.stack([BELOW, BELOW], 1), DOCUMENTS)
    assert both == pytest.approx(ratio_interval((ABOVE + OTHER) / 2, BELOW, DOCUMENTS))
    # Each ratio is the same in every resample, and counts as much as the other whatever is below it.
    below = np.stack([BELOW, 9 * OTHER + 9], 1)
    assert mean_ratio_interval(below * [2, 4], below, DOCUMENTS) == pytest.approx((3, 3))
    assert mean_ratio_interval(ABOVE[:, None], 0 * BELOW[:, None], DOCUMENTS) is None


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_rank_correlation_needs_points_that_vary():
    assert rank_correlation([1, 2, 3], [3, 2, 1]) is None
    assert rank_correlation([1, 1, 1, 1], [1, 2, 3, 4]) is None


def test_the_p_of_a_few_points_is_exact():
    assert rank_correlation([0, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx((1.0, 2 / 24))
    assert rank_correlation([0, 1, 2, 3, 4], [5, 4, 3, 2, 1]) == pytest.approx((-1.0, 2 / 120))
    many = rank_correlation(range(9), [0, 1, 2, 3, 4, 5, 6, 8, 7])
    assert many is not None
    assert many[0] == pytest.approx(1 - 6 * 2 / (9 * 80))


def test_the_interval_of_a_correlation_is_the_bootstrap_of_pairs():
    """Near Fisher's; a monotone bend changes no rank."""
    x = np.random.default_rng(4).normal(size=60)
    y = x + np.random.default_rng(5).normal(size=60)
    found = correlation(x, y, "pearson")
    middle = math.atanh(np.corrcoef(x, y)[0, 1])
    assert found["ci"] == pytest.approx([math.tanh(middle + side / math.sqrt(57)) for side in (-1.96, 1.96)], abs=0.06)
    assert correlation(x, np.exp(x), "spearman")["ci"] == pytest.approx([1.0, 1.0])
    assert correlation(np.array([1.0, 1, 1, 2]), np.array([1.0, 2, 3, 4]), "pearson")["ci"][1] <= 1.0


@pytest.mark.parametrize("binary", [True, False])
def test_an_interval_without_width_is_no_interval(binary):
    """Where no sample differs, no resample does: [1, 1] would claim certainty."""
    right = np.tile([1.0, 0.0, 1.0, 1.0] if binary else [0.9, 0.2, 0.7, 1.0], 5)
    scores = {"ceiling": right, "source": right * (np.arange(20) % 3 > 0), "mapped": right}
    documents = [str(n) for n in range(20)]
    rows = summarise_scores(scores, np.zeros(20), documents)["conditions"]
    assert [rows["mapped"][key] for key in ("retention", "gap_recovered")] == [1.0, 1.0]
    assert [rows["mapped"][f"{key}_ci"] for key in ("retention", "gap_recovered")] == [None, None]
    assert rows["source"]["retention_ci"][0] < rows["source"]["retention_ci"][1]
    if binary:
        items = [
            {"id": document, "document": document, "tokens": 1, "chance": 0.0, "nats": dict.fromkeys(scores, 1.0)}
            | {"correct": {name: bool(column[n]) for name, column in scores.items()}}
            for n, document in enumerate(documents)
        ]
        same = summarise(items)["conditions"]
        keys = [name for name in rows["mapped"] if name in same["mapped"]]
        assert {name: {key: row[key] for key in keys} for name, row in same.items()} == {
            name: {key: row[key] for key in keys} for name, row in rows.items()
        }
