"""The statistics against arithmetic written out differently, and what they say when there is little to say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import (
    accuracy_interval,
    floor_normalised,
    gap_recovered,
    gap_recovered_nats,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    ratio_interval,
    retention,
    summarise,
)


def bools(text: str) -> np.ndarray:
    return np.array([character == "1" for character in text])


def make_items(count: int = 60, per_document: int = 3, answers: bool = True) -> list[dict]:
    """Items on which ceiling > mapped > source > floor, in both measures."""
    draw = np.random.default_rng(7)
    shares = {"ceiling": 0.95, "source": 0.5, "mapped": 0.85, "mapped_all": 0.7, "floor": 0.2}
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


def test_mcnemar_is_the_binomial_tail_written_out():
    a, b = bools("1111111100"), bools("1100000011")
    only_a, only_b = 6, 2
    tail = sum(math.comb(8, k) for k in range(only_b + 1)) / 2**8
    assert mcnemar_exact(a, b) == pytest.approx(2 * tail)
    assert mcnemar_exact(b, a) == pytest.approx(2 * tail)
    assert only_a + only_b == int((a != b).sum())


@pytest.mark.parametrize("pattern", ["1111", "0000", "1010"])
def test_mcnemar_without_discordant_items_is_one(pattern):
    assert mcnemar_exact(bools(pattern), bools(pattern)) == 1.0


def test_mcnemar_of_one_discordant_each_is_one():
    assert mcnemar_exact(bools("10"), bools("01")) == 1.0


def test_wilson_by_its_formula():
    n, k, z = 50, 41, 1.959963984540054
    share = k / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    assert accuracy_interval(bools("1" * k + "0" * (n - k))) == pytest.approx((middle - half, middle + half))


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


def test_mean_interval_agrees_with_a_bootstrap_written_as_a_loop():
    draw = np.random.default_rng(3)
    sizes = draw.integers(1, 6, 40)
    documents = [f"d{i}" for i, size in enumerate(sizes) for _ in range(size)]
    values = np.concatenate(
        [draw.normal(level, 0.3, size) for level, size in zip(draw.normal(2, 1, 40), sizes, strict=True)]
    )
    rows = [values[np.array(documents) == f"d{i}"] for i in range(40)]
    means = [np.concatenate([rows[i] for i in draw.integers(0, 40, 40)]).mean() for _ in range(4000)]
    assert mean_interval(values, documents) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=0.06)


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
    assert result == {"difference": 1.0, "ci_low": 1.0, "ci_high": 1.0, "t_p": 1.0, "n_items": 1, "n_documents": 1}


def test_paired_t_by_its_formula():
    a, b = np.array([1.0, 2.0, 3.0, 5.0]), np.array([0.5, 1.0, 3.5, 3.0])
    delta = a - b
    t = delta.mean() / (delta.std(ddof=1) / 2)
    # Survival function of Student's t with 3 degrees of freedom, in closed form.
    x = t / math.sqrt(3)
    tail = 0.5 - (math.atan(x) + x / (1 + x * x)) / math.pi
    assert paired_difference(a, b, list("wxyz"))["t_p"] == pytest.approx(2 * tail)


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
    right = {c: sum(item["correct"][c] for item in items) for c in ("ceiling", "source", "mapped")}
    nats = {c: sum(item["nats"][c] for item in items) for c in ("ceiling", "source", "mapped")}
    tokens = sum(item["tokens"] for item in items)
    assert mapped["accuracy"] == pytest.approx(right["mapped"] / 60)
    assert mapped["retention"] == pytest.approx(right["mapped"] / right["ceiling"])
    gap = (right["mapped"] - right["source"]) / (right["ceiling"] - right["source"])
    assert mapped["gap_recovered"] == pytest.approx(gap)
    assert mapped["nats"] == pytest.approx(nats["mapped"] / tokens)
    assert mapped["perplexity"] == pytest.approx(math.exp(nats["mapped"] / tokens))
    gap = (nats["source"] - nats["mapped"]) / (nats["source"] - nats["ceiling"])
    assert mapped["gap_recovered_nats"] == pytest.approx(gap)
    assert mapped["generated"] == 0.0
    for key in ("accuracy", "nats", "retention", "gap_recovered", "gap_recovered_nats"):
        low, high = mapped[f"{key}_ci"]
        assert low <= mapped[key] <= high
    assert summary["chance"] == pytest.approx(0.2)
    where = [item["correct"]["mapped"] for item in items if item["kind"] == "where"]
    assert summary["by_kind"]["where"]["mapped"] == pytest.approx(sum(where) / len(where))


def test_tests_are_first_minus_second_and_agree_with_the_conditions():
    summary = summarise(make_items())
    assert set(summary["tests"]) == {f"{a}_vs_{b}" for a in ("mapped", "mapped_all") for b in ("source", "ceiling")}
    for name, test in summary["tests"].items():
        first, second = (summary["conditions"][c] for c in name.split("_vs_"))
        assert test["accuracy_difference"] == pytest.approx(first["accuracy"] - second["accuracy"])
        assert test["nll_difference"] == pytest.approx(first["nats"] - second["nats"])
        assert (test["n"], test["documents"]) == (60, 20)
    better = summary["tests"]["mapped_vs_source"]
    assert better["accuracy_difference"] > 0 > better["nll_difference"]
    assert better["accuracy_p"] < 0.01


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
        lambda: mcnemar_exact(nothing.astype(bool), nothing.astype(bool)),
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
