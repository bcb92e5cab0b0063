"""The numbers of a report against arithmetic of others: scipy, sums written out, loops, and published tables."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from kvxfer.evals.statistics import (
    accuracy_interval,
    floor_normalised,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    ratio_interval,
    retention,
    summarise,
)

CHANCE = {"arc_challenge": 0.25, "hellaswag": 0.25, "winogrande": 0.5, "mmlu": 0.25, "gsm8k": 0.0}
# arXiv 2608.03893: accuracy of the Qwen3 14B to 32B map (table 2), and retention and its two averages (table 1), in %.
ACCURACY = {"arc_challenge": 61.60, "hellaswag": 80.70, "winogrande": 68.98, "mmlu": 78.09, "gsm8k": 90.98}
RETAINED = {
    "14B to 32B": ((101.0, 97.6, 98.5, 95.0, 95.6), 97.6, 96.3),
    "8B to 32B": ((94.0, 95.2, 91.0, 88.5, 68.8), 87.5, 80.7),
}
# A public replication with Qwen3 4B to 8B: accuracy of the target and of the mapped cache on ARC-Challenge, HellaSwag
# and WinoGrande, in %. It gives 95.4 % retention, 91.5 % floor-normalised.
REPLICATED = ((55.8, 54.0), (64.2, 58.2), (68.4, 67.6))


def separated(only_a: int, only_b: int, both: int = 3, neither: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Right answers of two conditions, so many of them by one alone."""
    pairs = [(True, False)] * only_a + [(False, True)] * only_b + [(True, True)] * both + [(False, False)] * neither
    random.Random(only_a * 100 + only_b).shuffle(pairs)
    a, b = zip(*pairs, strict=True)
    return np.array(a), np.array(b)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (1, 0), (5, 0), (6, 2), (2, 6), (4, 4), (9, 3), (40, 17)])
def test_mcnemar_is_scipy_s_binomial_test(only_a: int, only_b: int) -> None:
    expected = stats.binomtest(only_a, only_a + only_b, 0.5, alternative="two-sided").pvalue
    assert mcnemar_exact(*separated(only_a, only_b)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (5, 0), (6, 2), (2, 6), (4, 4), (7, 5)])
def test_mcnemar_counts_every_way_in_which_items_could_have_fallen(only_a: int, only_b: int) -> None:
    """Each separating item falls to a or to b as a coin does: how many of all outcomes are as uneven as this one?"""
    count = only_a + only_b
    outcomes = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
    uneven = sum(abs(2 * a - count) >= abs(only_a - only_b) for a in outcomes)
    assert mcnemar_exact(*separated(only_a, only_b)) == pytest.approx(uneven / 2**count, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_the_paired_t_test_is_scipy_s_on_documents_means(seed: int) -> None:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 5, 12)
    documents = [f"d{n}" for n, size in enumerate(sizes) for _ in range(size)]
    a, b = draw.normal(2.0, 1.0, len(documents)), draw.normal(1.8, 1.0, len(documents))
    names = np.array(documents)
    means = [[x[names == f"d{n}"].mean() for n in range(12)] for x in (a, b)]
    assert paired_difference(a, b, documents)["t_p"] == pytest.approx(stats.ttest_rel(*means).pvalue, rel=1e-9)
    tokens = draw.integers(1, 9, len(documents)).astype(float)
    per_token = [[x[names == f"d{n}"].sum() / tokens[names == f"d{n}"].sum() for n in range(12)] for x in (a, b)]
    found = paired_difference(a, b, documents, tokens)
    assert found["t_p"] == pytest.approx(stats.ttest_rel(*per_token).pvalue, rel=1e-9)
    assert found["difference"] == pytest.approx((sum(a) - sum(b)) / sum(tokens), rel=1e-12)


def test_the_bootstrap_is_scipy_s_with_the_same_draws() -> None:
    values = np.random.default_rng(5).normal(1.0, 2.0, 37)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=2000, method="percentile", rng=np.random.default_rng(0), vectorized=True
    ).confidence_interval
    found = mean_interval(values, [f"d{n:02d}" for n in range(37)])
    assert found == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_the_bootstrap_is_a_loop_over_documents() -> None:
    """A ratio of sums, documents of several items each; both have Monte-Carlo error, of about 0.5 % of the width."""
    draw = np.random.default_rng(8)
    sizes = draw.integers(1, 6, 60)
    documents = [f"d{n:02d}" for n, size in enumerate(sizes) for _ in range(size)]
    below = draw.integers(1, 4, len(documents)).astype(float)
    above = below * draw.normal(0.6, 0.4, len(documents))
    by_document = [
        (above[names].sum(), below[names].sum()) for names in (np.array(documents) == d for d in sorted(set(documents)))
    ]
    drawn = []
    for _ in range(6000):
        sums = [by_document[n] for n in draw.integers(0, 60, 60)]
        drawn.append(sum(a for a, _ in sums) / sum(b for _, b in sums))
    low, high = np.percentile(drawn, [2.5, 97.5])
    assert ratio_interval(above, below, documents) == pytest.approx((low, high), abs=0.05 * (high - low))


def test_wilson_s_interval_is_what_solves_its_equation() -> None:
    """Its ends are the shares p from which the observed one lies 1.96 standard errors of p away."""
    right = np.arange(40) < 33
    for end in accuracy_interval(right):
        assert abs(33 / 40 - end) == pytest.approx(stats.norm.ppf(0.975) * math.sqrt(end * (1 - end) / 40), rel=1e-9)


def test_perplexity_is_a_loop_over_all_tokens() -> None:
    """Items are weighed by their tokens, whatever document and length they are of."""
    draw = random.Random(2)
    surprise = {
        name: [[draw.expovariate(1 / mean) for _ in range(draw.randint(1, 9))] for _ in range(30)]
        for name, mean in (("ceiling", 1.0),)
    }
    lengths = [len(tokens) for tokens in surprise["ceiling"]]
    for name, mean in (("source", 2.0), ("mapped", 1.4)):
        surprise[name] = [[draw.expovariate(1 / mean) for _ in range(length)] for length in lengths]
    items = [
        {
            "id": str(n),
            "document": f"d{n // 4}",
            "kind": "text",
            "tokens": lengths[n],
            "nats": {name: sum(tokens[n]) for name, tokens in surprise.items()},
        }
        for n in range(30)
    ]
    found = summarise(items)["conditions"]
    mean = {}
    for name, tokens in surprise.items():
        product, count = 0.0, 0
        for item in tokens:
            for nats in item:
                product += math.log(1 / math.exp(-nats))
                count += 1
        mean[name] = product / count
        assert found[name]["perplexity"] == pytest.approx(math.exp(product / count), rel=1e-9)
    recovered = (mean["source"] - mean["mapped"]) / (mean["source"] - mean["ceiling"])
    assert found["mapped"]["gap_recovered_nats"] == pytest.approx(recovered, rel=1e-9)


@pytest.mark.parametrize("pair", RETAINED)
def test_floor_normalised_retention_gives_the_paper_s_averages(pair: str) -> None:
    """The target's accuracies follow from what one map scores and retains; both pairs share that target."""
    rows, average, normalised = RETAINED[pair]
    of_known = dict(zip(CHANCE, RETAINED["14B to 32B"][0], strict=True))
    target = {task: ACCURACY[task] / of_known[task] for task in CHANCE}
    mapped = {task: kept / 100 * target[task] for task, kept in zip(CHANCE, rows, strict=True)}
    kept = [100 * retention(mapped[task], target[task]) for task in CHANCE]
    above = [100 * floor_normalised(mapped[task], target[task], chance) for task, chance in CHANCE.items()]
    # To the printed digit: what is averaged here was rounded to it before.
    assert fmean(kept) == pytest.approx(average, abs=0.1)
    assert fmean(above) == pytest.approx(normalised, abs=0.1)


def test_floor_normalised_retention_gives_a_replication_s_averages() -> None:
    kept = [100 * retention(mapped, target) for target, mapped in REPLICATED]
    chances = [100 * chance for chance in CHANCE.values()][:3]
    above = [100 * floor_normalised(m, t, chance) for (t, m), chance in zip(REPLICATED, chances, strict=True)]
    assert round(fmean(kept), 1) == 95.4
    assert round(fmean(above), 1) == 91.5


def test_raw_retention_flatters_where_floor_normalised_does_not() -> None:
    """WinoGrande of Llama 8B to 70B, table 1: 87.1 % of the accuracy is 58.5 % of what lies above a coin."""
    assert round(100 * retention(63.14, 72.45), 1) == 87.1
    assert round(100 * floor_normalised(0.6314, 0.7245, 0.5), 1) == 58.5
    assert round(100 * retention(14.78, 81.12), 1) == round(100 * floor_normalised(0.1478, 0.8112, 0.0), 1) == 18.2
