"""Intervals, tests, ratios and correlations over scored items, and what an evaluation's scores come to.

Items of one document share its text, so they are not independent. Intervals therefore resample whole documents. With a
single document nothing can be said about others: intervals then resample its items and the paired t-test says p = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Shaped
from scipy import stats

from kvxfer.errors import KvxferError

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
NEAR_ZERO = 1e-9
SHOWN = 0.05
"""A difference is shown where p is below."""

MARGIN = 0.01
"""Nats per token up to which one cache counts as good as another: a hundredth of perplexity, below what bfloat16 alone
moves a single row of SmolLM2 by (0.03 to 0.06), and less than a tenth of the smallest gap between models looked at."""

SEEN_WITH_80 = 2.8
"""Standard errors by which a true difference is shown at p < .05 four times in five (1.96 + 0.84)."""

MOST_NATS = 700.0  # exp of more overflows
EXACT = 7
"""Points up to which a rank correlation's p is exact."""

_TRANSFERRED = ("ceiling", "identity", "source", "mapped", "mapped_all")
CONDITIONS = (*_TRANSFERRED, "floor", "raw_copy", "ancestor_copy", "wrong_donor", "random_map", "no_context")
NOTHING_HANDED = ("no_context", "floor", "raw_copy", "ancestor_copy")
"""What costs no map: a transfer that is not shown to beat each of them that was measured is worth nothing."""

COMPARISONS = (
    ("mapped", "source"),
    ("mapped", "ceiling"),
    ("mapped_all", "source"),
    ("mapped_all", "ceiling"),
    *(("mapped", control) for control in NOTHING_HANDED),
    ("source", "ceiling"),
    ("source", "no_context"),
)

Interval = tuple[float, float]
Outcome = Literal["better", "worse", "none"]
Column = Float[np.ndarray, " items"]


def require_items(count: int) -> None:
    """KvxferError when nothing was scored."""
    if count == 0:
        raise KvxferError(
            "eval: 0 items were scored and at least 1 is needed; raise the eval's number of items or rows"
        )


def _document_sums(
    columns: Sequence[Shaped[np.ndarray, " items"]], documents: Sequence[str]
) -> list[Float[np.ndarray, " documents"]]:
    """Each column summed per document; a single document is left as its items, the only thing there is to resample."""
    if any(len(column) != len(documents) for column in columns):
        sizes = [len(column) for column in columns]
        raise KvxferError(f"eval: {sizes} values for {len(documents)} document keys; give one document per value")
    require_items(len(documents))
    names, codes = np.unique(np.asarray(documents), return_inverse=True)
    if len(names) == 1:
        return [np.asarray(column, dtype=np.float64) for column in columns]
    return [np.bincount(codes, weights=np.asarray(column, dtype=np.float64)) for column in columns]


def _means(*columns: Float[np.ndarray, "*shape"], axis: int = -1) -> Float[np.ndarray, columns * resamples]:
    return np.stack([column.mean(axis=axis) for column in columns])


def _resampled(columns: Sequence[Float[np.ndarray, " documents"]]) -> Float[np.ndarray, "columns resamples"]:
    """The means of all columns over documents drawn with replacement, seeded; a single document is drawn once."""
    if len(columns[0]) < 2:
        return _means(*columns)[:, None]
    drawn = stats.bootstrap(
        tuple(columns),
        _means,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // (len(columns) * len(columns[0]))),
        vectorized=True,
        paired=True,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    return np.asarray(drawn.bootstrap_distribution)


def _percentiles(drawn: Float[np.ndarray, " resamples"]) -> Interval:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def ratio_interval(
    numerator: Shaped[np.ndarray, " items"], denominator: Shaped[np.ndarray, " items"], documents: Sequence[str]
) -> Interval | None:
    """95 % interval of sum(numerator) / sum(denominator): percentile bootstrap over documents, seeded.

    The denominator is meant to be positive (a count, or a gap that is one). None when it is not so in every resample:
    the ratio then has no bounded interval.
    """
    totals = _resampled(_document_sums([numerator, denominator], documents))
    return None if totals[1].min() <= NEAR_ZERO else _percentiles(totals[0] / totals[1])


def mean_ratio_interval(
    numerators: Float[np.ndarray, "items columns"],
    denominators: Float[np.ndarray, "items columns"],
    documents: Sequence[str],
) -> Interval | None:
    """95 % interval of the mean over columns of sum(numerator) / sum(denominator); otherwise as ratio_interval."""
    columns = numerators.shape[1]
    totals = _resampled(_document_sums([*numerators.T, *denominators.T], documents))
    above, below = totals[:columns], totals[columns:]
    return None if below.min() <= NEAR_ZERO else _percentiles((above / below).mean(0))


def mean_interval(
    values: Shaped[np.ndarray, " items"], documents: Sequence[str], weights: Shaped[np.ndarray, " items"] | None = None
) -> Interval:
    """95 % interval of sum(values) / sum(weights), weights being counts (1 unless given): documents are resampled.

    Raises KvxferError when an item has no weight, as a text without a scored token.
    """
    counts = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(counts) and counts.min() <= 0:
        raise KvxferError(f"eval: an item has {counts.min():g} scored tokens and at least 1 is needed; drop such items")
    interval = ratio_interval(values, counts, documents)
    if interval is None:
        raise KvxferError(f"eval: {len(counts)} items have {counts.sum():g} scored tokens together; score more of them")
    return interval


def accuracy_interval(correct: Bool[np.ndarray, " items"], documents: Sequence[str] | None = None) -> Interval:
    """95 % interval of a share of right answers: Wilson's, widened to the document bootstrap's where that is wider.

    Wilson's holds for independent items and at 0 and 1, where a bootstrap has no width; the bootstrap knows that items
    of one document stand or fall together. Without documents every item counts as independent.
    """
    require_items(len(correct))
    wilson = stats.binomtest(int(correct.sum()), len(correct)).proportion_ci(LEVEL, method="wilson")
    low, high = float(wilson.low), float(wilson.high)
    if documents is not None and len(set(documents)) < len(documents):
        drawn = mean_interval(correct, documents)
        low, high = min(low, drawn[0]), max(high, drawn[1])
    return low, high


def mcnemar_exact(a: Bool[np.ndarray, " items"], b: Bool[np.ndarray, " items"], documents: Sequence[str]) -> float:
    """Two-sided p that neither side is right more often: every document's wins are as likely to be the other's.

    The exact distribution over all ways to swap the sides of whole documents. With an item for each document this is
    the exact McNemar test; items of one document, which stand or fall together, count as one. 1.0 when no document
    separates the sides, and with a single one.
    """
    require_items(len(a))
    if len(set(documents)) < 2:
        return 1.0
    (sums,) = _document_sums([np.asarray(a, dtype=np.int64) - np.asarray(b, dtype=np.int64)], documents)
    wins = np.abs(sums).astype(int)
    # The share of swaps under which side a is ahead by n - wins.sum().
    shares = np.ones(1)
    for each in wins[wins > 0]:
        step = np.zeros(2 * each + 1)
        step[[0, -1]] = 0.5
        shares = np.convolve(shares, step)
    ahead = np.abs(np.arange(len(shares)) - wins.sum())
    return float(min(1.0, shares[ahead >= abs(sums.sum()) - 0.5].sum()))


def sign_test(
    a: Shaped[np.ndarray, " items"],
    b: Shaped[np.ndarray, " items"],
    documents: Sequence[str],
    weights: Shaped[np.ndarray, " items"] | None = None,
) -> tuple[float, float]:
    """Whether a is above b in more documents than below it: the sign test's two-sided p, and the share above.

    A mean of nats is moved by a few documents; what most of them lose, signs tell. Documents that do not differ are
    left out; p is 1.0 where none does, and with a single one.
    """
    require_items(len(a))
    delta = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    sums, sizes = _document_sums([delta, _weights(delta, weights)], documents)
    means = sums / sizes
    above, below = int((means > NEAR_ZERO).sum()), int((means < -NEAR_ZERO).sum())
    if above + below == 0:
        return 1.0, 0.5
    alone = len(set(documents)) < 2
    return 1.0 if alone else float(stats.binomtest(above, above + below, 0.5).pvalue), above / (above + below)


def _weights(values: Shaped[np.ndarray, " items"], weights: Shaped[np.ndarray, " items"] | None) -> Column:
    return np.ones(len(values)) if weights is None else np.asarray(weights, dtype=np.float64)


def _paired_t(differences: Float[np.ndarray, " documents"]) -> float:
    """Two-sided p that the mean difference is zero, defined for every input."""
    if len(differences) < 2:
        return 1.0
    scale = float(np.abs(differences).max())
    if scale <= NEAR_ZERO:
        return 1.0
    if float(np.ptp(differences)) <= NEAR_ZERO * scale:
        # No spread, so no t: what is left is that every document has the same sign.
        return float(stats.binomtest(len(differences), len(differences), 0.5).pvalue)
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def paired_difference(
    a: Shaped[np.ndarray, " items"],
    b: Shaped[np.ndarray, " items"],
    documents: Sequence[str],
    weights: Shaped[np.ndarray, " items"] | None = None,
) -> dict[str, float | int]:
    """Sum(a - b) / sum(weights) over the same items, with all that is said of it.

    Weights are 1 per item unless given: tokens where a and b are sums over tokens. ``t_p`` and ``se`` are of that very
    ratio: a t-test over documents of the ratio made linear about its value (Cochran, Sampling Techniques, 1977, chapter
    6), which is the paired t-test of the documents' means where all weigh the same. ``ci_low`` and ``ci_high`` are a
    bootstrap over documents, ``sign_p`` and ``above`` of :func:`sign_test`.
    """
    require_items(len(a))
    delta = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    counts = _weights(delta, weights)
    difference = float(delta.sum() / counts.sum())
    sums, sizes = _document_sums([delta, counts], documents)
    alone = len(set(documents)) < 2
    linear = difference + (sums - difference * sizes) / sizes.mean()
    low, high = mean_interval(delta, documents, weights)
    sign_p, above = sign_test(a, b, documents, weights)
    return {
        "difference": difference,
        "ci_low": low,
        "ci_high": high,
        "t_p": 1.0 if alone else _paired_t(linear),
        "se": math.inf if alone else float(linear.std(ddof=1) / math.sqrt(len(linear))),
        "sign_p": sign_p,
        "above": above,
        "n_items": len(a),
        "n_documents": len(set(documents)),
    }


def as_good(ci: Sequence[float], margin: float = MARGIN) -> bool:
    """Whether a difference in nats per token to something else is shown to be no more than a margin (non-inferiority).

    Its 95 % interval lies below the margin; that no difference is shown says nothing of the kind.
    """
    return ci[1] < margin


def items_needed(difference: float, se: float, items: int) -> int | None:
    """How many such items would show this difference four times in five; None where it has no size or no error."""
    if not math.isfinite(se) or abs(difference) <= NEAR_ZERO:
        return None
    return max(1, math.ceil(items * (SEEN_WITH_80 * se / difference) ** 2))


def ratio_difference(
    first: tuple[Shaped[np.ndarray, " items"], Shaped[np.ndarray, " items"]],
    second: tuple[Shaped[np.ndarray, " items"], Shaped[np.ndarray, " items"]],
    documents: Sequence[str],
) -> dict[str, float | None]:
    """The first ratio of sums less the second, over the same items: ``difference``, ``ci_low``, ``ci_high``, ``p``.

    Each ratio is (numerator, denominator) as in :func:`ratio_interval`. The interval is the percentile bootstrap over
    documents; ``p`` the two-sided t-test that the difference is zero, on ratios made linear about their own values
    (delta method: Cochran, Sampling Techniques, 1977, chapter 6). All None when a denominator is not positive in every
    resample.
    """
    sums = _document_sums([*first, *second], documents)
    totals = _resampled(sums)
    means = [float(column.mean()) for column in sums]
    if min(totals[1::2].min(), *means[1::2]) <= NEAR_ZERO:
        return dict.fromkeys(("difference", "ci_low", "ci_high", "p"))
    ratios = means[0] / means[1], means[2] / means[3]
    low, high = _percentiles(totals[0] / totals[1] - totals[2] / totals[3])
    lines = [
        (above - ratio * below) / mean
        for ratio, above, below, mean in zip(ratios, sums[::2], sums[1::2], means[1::2], strict=True)
    ]
    difference = ratios[0] - ratios[1]
    p = _paired_t(difference + lines[0] - lines[1]) if len(set(documents)) > 1 else 1.0
    return {"difference": difference, "ci_low": low, "ci_high": high, "p": p}


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > NEAR_ZERO else None


def retention(mapped: float, ceiling: float) -> float | None:
    """Mapped accuracy over the ceiling's; None when the ceiling is zero."""
    return _ratio(mapped, ceiling)


def floor_normalised(mapped: float, ceiling: float, chance: float | int) -> float | None:
    """Retention of what lies above chance; None when the ceiling itself is not above chance."""
    return _ratio(mapped - chance, ceiling - chance)


def gap_recovered(mapped: float, source: float, ceiling: float) -> float | None:
    """Share of the accuracy gap between source and ceiling that is closed (> 0: better than the source).

    With the score without context in place of the source's it is the share of the context's worth that arrives. None
    when the ceiling is not above: there is no gap, and a ratio would flip its sign.
    """
    return _ratio(mapped - source, ceiling - source)


def gap_recovered_nats(mapped: float, source: float, ceiling: float) -> float | None:
    """The same in nats, where lower is better: (source - mapped) / (source - ceiling)."""
    return _ratio(source - mapped, source - ceiling)


def outcome(
    p: float,
    difference: float,
    ci: Sequence[float],
    higher_is_better: bool,
    sign_p: float | None = None,
    above: float = 0.5,
) -> Outcome:
    """A mean difference counts when p < 0.05 and its interval excludes zero on the same side.

    Harm also counts where signs alone show it: a few documents can hide in a mean what most of them lose. Gain never
    does, and none is claimed in a mean where most documents lose.

    Args:
        sign_p, above: of :func:`sign_test`, where it was made.
    """
    low, high = ci
    by_sign: Outcome = "none"
    if sign_p is not None and sign_p < SHOWN and above != 0.5:
        by_sign = "better" if (above > 0.5) == higher_is_better else "worse"
    if p >= SHOWN or low <= 0 <= high or (difference > 0) != (low > 0):
        return "worse" if by_sign == "worse" else "none"
    by_mean: Outcome = "better" if (difference > 0) == higher_is_better else "worse"
    return "none" if (by_mean, by_sign) == ("better", "worse") else by_mean


def holm(ps: Sequence[float]) -> list[float]:
    """p adjusted for the number of tests: Holm's step-down method (1979), in the order given."""
    adjusted, largest = [0.0] * len(ps), 0.0
    for place, index in enumerate(np.argsort(ps, kind="stable")):
        largest = max(largest, min(1.0, (len(ps) - place) * ps[index]))
        adjusted[index] = largest
    return adjusted


def rank_correlation(first: Sequence[float | int], second: Sequence[float | int]) -> tuple[float, float] | None:
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


def correlation(x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"], name: str) -> dict[str, Any]:
    """Pearson's or Spearman's correlation: ``value``, two-sided ``p``, ``ci`` (95 %, percentile bootstrap over points).

    Resamples in which one of the two does not vary have no correlation and are left out.
    """
    whole = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name](x, y)
    index = np.random.default_rng(SEED).integers(0, len(x), (RESAMPLES, len(x)))
    drawn = [x[index], y[index]]
    if name == "spearman":
        drawn = [stats.rankdata(each, axis=1) for each in drawn]
    varies = np.minimum(np.ptp(drawn[0], axis=1), np.ptp(drawn[1], axis=1)) > 0
    a, b = (each[varies] - each[varies].mean(1, keepdims=True) for each in drawn)
    found = (a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return {"value": float(whole.statistic), "p": float(whole.pvalue), "ci": list(_percentiles(found))}


def summarise_scores(
    scores: Mapping[str, Column], chance: Column, documents: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """``conditions`` and ``tests``, with the keys that accuracies have in results.json.

    Args:
        scores: by condition, what every sample scored: 0 or 1, or any number where more is better. Ceiling, source
            and mapped must be there.
        chance: what guessing would score on every sample.
        documents: what every sample is about; whole documents are resampled.

    Scores of 0 and 1 are tested with exact McNemar, others with a paired t-test over documents (``test`` says which).
    """
    require_items(len(chance))
    binary = is_binary(scores)
    conditions = {
        name: _share_row(scores, name, chance, documents, binary) | {"n": len(own)} for name, own in scores.items()
    }
    test = {"test": "mcnemar" if binary else "paired_t"}
    tests = {
        f"{first}_vs_{second}": test | _share_test(scores[first], scores[second], documents, binary)
        for first, second in COMPARISONS
        if first in scores and second in scores
    }
    return {"conditions": conditions, "tests": tests}


def is_binary(scores: Mapping[str, Column]) -> bool:
    """Whether every sample is right or wrong under every condition."""
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in scores.values())


def _share_row(
    scores: Mapping[str, Column], name: str, chance: float | int | Column, documents: Sequence[str], binary: bool
) -> dict[str, Any]:
    """A condition's mean score and its ratios with their intervals; None for each that has nothing to be made of."""
    keys = ("accuracy", "retention", "retention_floor_normalised", "gap_recovered", "context_recovered")
    row: dict[str, Any] = {key: None for one in keys for key in (one, f"{one}_ci")}
    if name not in scores:
        return row
    own, best, base, none = (scores.get(each) for each in (name, "ceiling", "source", "no_context"))
    assert own is not None
    value, middle = float(own.mean()), float(np.mean(chance))
    interval = accuracy_interval(own == 1, documents) if binary else mean_interval(own, documents)
    row |= {"accuracy": value, "accuracy_ci": list(interval)}
    if best is None:
        return row
    ceiling = float(best.mean())
    parts = {
        "retention": (retention(value, ceiling), own, best),
        "retention_floor_normalised": (floor_normalised(value, ceiling, middle), own - chance, best - chance),
    }
    if base is not None:
        parts["gap_recovered"] = (gap_recovered(value, float(base.mean()), ceiling), own - base, best - base)
    if none is not None:
        parts["context_recovered"] = (gap_recovered(value, float(none.mean()), ceiling), own - none, best - none)
    return row | _ratios(parts, documents)


def _ratios(
    parts: Mapping[str, tuple[float | None, Column, Column]], documents: Sequence[str]
) -> dict[str, float | list[float] | None]:
    row: dict[str, float | list[float] | None] = {}
    for name, (value, above, below) in parts.items():
        interval = None if value is None else ratio_interval(above, below, documents)
        if interval is not None and interval[0] == interval[1]:
            # Where no item errs, no resample differs: an interval without width would claim certainty.
            interval = None
        row |= {name: value, f"{name}_ci": None if interval is None else list(interval)}
    return row


def _share_test(first: Column, second: Column, documents: Sequence[str], binary: bool) -> dict[str, Any]:
    paired = paired_difference(first, second, documents)
    return {
        "accuracy_p": mcnemar_exact(first == 1, second == 1, documents) if binary else paired["t_p"],
        "accuracy_difference": paired["difference"],
        "accuracy_ci": [paired["ci_low"], paired["ci_high"]],
        "accuracy_se": finite(paired["se"]),
        "n": paired["n_items"],
        "documents": paired["n_documents"],
    }


def summarise(items: Sequence[Mapping[str, Any]], chance: float | int | None = None) -> dict[str, Any]:
    """The ``conditions``, ``tests``, ``by_kind`` and ``chance`` of results.json from per-item scores.

    An item is {"id", "document", "kind", "chance", "correct": {condition: bool}, "nats": {condition: sum of nats over
    the scored tokens}, "tokens", "generated": {condition: bool}}; without answers to choose from, ``correct`` and
    ``generated`` are absent and what needs them is None. Every item carries the same conditions. Chance is the items'
    mean unless given. Differences are first minus second: mapped better means > 0 in accuracy and < 0 in nats. Raises
    KvxferError without items, for a missing condition and for a score that is not finite.
    """
    scores = _Scores(items)
    if chance is None:
        chance = float(np.mean([item.get("chance") or 0.0 for item in items]))
    conditions = {
        c: _share_row(scores.correct, c, chance, scores.documents, True)
        | {"generated": float(scores.generated[c].mean()) if c in scores.generated else None}
        | _nats_row(scores, c)
        | {"n": len(items)}
        for c in scores.conditions
    }
    tests = {
        f"{first}_vs_{second}": _test_row(scores, first, second)
        for first, second in COMPARISONS
        if first in scores.nats and second in scores.nats
    }
    kinds = np.array([str(item.get("kind", "")) for item in items])
    by_kind = {
        str(kind): {c: float(right[kinds == kind].mean()) for c, right in scores.correct.items()}
        for kind in dict.fromkeys(kinds.tolist())
        if scores.correct
    }
    return {"conditions": conditions, "tests": tests, "by_kind": by_kind, "chance": chance}


class _Scores:
    """The items' scores as arrays, one per condition."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        require_items(len(items))
        first = items[0]
        self.conditions = [c for c in CONDITIONS if c in first["nats"]] + sorted(set(first["nats"]) - set(CONDITIONS))
        self.documents = [str(item["document"]) for item in items]
        self.tokens = np.array([item["tokens"] for item in items], dtype=np.float64)
        self.nats = {c: self._column(items, "nats", c).astype(np.float64) for c in self.conditions}
        self.correct, self.generated = (
            {c: self._column(items, key, c).astype(np.float64) for c in self.conditions if c in (first.get(key) or {})}
            for key in ("correct", "generated")
        )
        for condition, values in self.nats.items():
            for item, value in zip(items, values, strict=True):
                if not math.isfinite(value):
                    raise KvxferError(
                        f"eval: item {item['id']} has {value} nats under condition {condition} and must have a finite "
                        "number; check the map and dtype"
                    )

    @staticmethod
    def _column(items: Sequence[Mapping[str, Any]], key: str, condition: str) -> np.ndarray:
        for item in items:
            if condition not in (item.get(key) or {}):
                raise KvxferError(
                    f"eval: item {item.get('id')} has no {key} for condition {condition}, which the first item has; "
                    "score every item under every condition"
                )
        return np.array([item[key][condition] for item in items])

    def per_token(self, condition: str) -> float:
        """Nats per scored token."""
        return float(self.nats[condition].sum() / self.tokens.sum())


def _nats_row(scores: _Scores, condition: str) -> dict[str, Any]:
    """Nats per token, perplexity and the gap recovered in nats."""
    mapped = scores.per_token(condition)
    row: dict[str, Any] = {
        "perplexity": math.exp(mapped) if mapped < MOST_NATS else None,
        "nats": mapped,
        "nats_ci": list(mean_interval(scores.nats[condition], scores.documents, scores.tokens)),
    }
    parts: dict[str, tuple[float | None, Column, Column]] = {}
    for name, base in {"gap_recovered_nats": "source", "context_recovered_nats": "no_context"}.items():
        row |= {name: None, f"{name}_ci": None}
        if {"ceiling", base} <= set(scores.conditions):
            share = gap_recovered_nats(mapped, scores.per_token(base), scores.per_token("ceiling"))
            start = scores.nats[base]
            parts[name] = (share, start - scores.nats[condition], start - scores.nats["ceiling"])
    return row | _ratios(parts, scores.documents)


def _test_row(scores: _Scores, first: str, second: str) -> dict[str, Any]:
    nats = paired_difference(scores.nats[first], scores.nats[second], scores.documents, scores.tokens)
    if first in scores.correct and second in scores.correct:
        row = _share_test(scores.correct[first], scores.correct[second], scores.documents, True)
    else:
        row = dict.fromkeys(("accuracy_p", "accuracy_difference", "accuracy_ci", "accuracy_se"))
    return row | nats_test(nats)


def nats_test(paired: Mapping[str, float | int]) -> dict[str, Any]:
    """What :func:`paired_difference` found of nats, under the keys of results.json."""
    return {
        "nll_p": paired["t_p"],
        "nll_difference": paired["difference"],
        "nll_ci": [paired["ci_low"], paired["ci_high"]],
        "nll_se": finite(paired["se"]),
        "nll_sign_p": paired["sign_p"],
        "nll_above": paired["above"],
        "n": paired["n_items"],
        "documents": paired["n_documents"],
    }


def finite(value: float | int) -> float | None:
    """A number as JSON can hold it: None for what is unbounded."""
    return float(value) if math.isfinite(value) else None


def scored_lists(data: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Every list of ``items`` with the nats of a mapped cache, by where it is in the results.

    A list's name is made of the plain values beside it, as ``domain toy, prefix 48``.
    """
    return dict(_lists(data, ()))


def paired_item(
    item: Mapping[str, Any],
    nats: float | None = None,
    correct: bool | None = None,
    score: float | None = None,
    tokens: int = 1,
) -> Mapping[str, Any]:
    """One item under its mapped cache.

    Args:
        nats: less is better; of all its ``tokens``.
        correct: right or wrong.
        score: where an answer is more or less right: more is better.
    """
    found: dict[str, Any] = {"id": item["id"], "document": item["document"], "tokens": tokens}
    given = {"nats": nats, "correct": correct, "score": score}
    return found | {key: {"mapped": value} for key, value in given.items() if value is not None}


def _lists(value: Any, said: tuple[str, ...]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    if isinstance(value, list):
        for item in value:
            yield from _lists(item, said)
    elif isinstance(value, Mapping):
        plain = [f"{key} {item}" for key, item in value.items() if isinstance(item, str | int)]
        items = value.get("items")
        if _are_scored(items):
            yield ", ".join((*said, *plain)), list(items or [])
        for key, item in value.items():
            if key != "items":
                yield from _lists(item, said)


def _are_scored(items: Any) -> bool:
    if not isinstance(items, list) or not items or not isinstance(items[0], Mapping):
        return False
    needed = {"id", "document", "tokens", "nats"}
    return all(needed <= set(item) and "mapped" in item["nats"] for item in items)
