"""Intervals, paired tests and ratios over scored items; the resampling unit is the document, not the item.

Items of one document share its text, so they are not independent. Intervals therefore resample whole documents. With a
single document nothing can be said about others: intervals then resample its items and the paired t-test says p = 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Shaped
from scipy import stats

from kvxfer.errors import KvxferError

LEVEL = 0.95
RESAMPLES = 2000
SEED = 0
NEAR_ZERO = 1e-9

Interval = tuple[float, float]


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
    return max(low, 0.0), min(high, 1.0)


def mcnemar_exact(a: Bool[np.ndarray, " items"], b: Bool[np.ndarray, " items"]) -> float:
    """Two-sided p of the exact McNemar test: are the items that only a gets right as many as those only b does?

    1.0 when no item separates them.
    """
    require_items(len(a))
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    if only_a + only_b == 0:
        return 1.0
    return float(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue)


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
    """Mean of a minus mean of b over the same items, with a paired test and interval over documents.

    ``difference`` is sum(a - b) / sum(weights) (weights: 1 per item, or tokens when a and b are sums over tokens),
    ``ci_low`` and ``ci_high`` its 95 % bootstrap interval, ``t_p`` the p of a paired t-test of the documents' means.
    """
    require_items(len(a))
    delta = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    counts = np.ones(len(delta)) if weights is None else np.asarray(weights, dtype=np.float64)
    low, high = mean_interval(delta, documents, counts)
    count = len(set(documents))
    sums, sizes = _document_sums([delta, counts], documents)
    return {
        "difference": float(delta.sum() / counts.sum()),
        "ci_low": low,
        "ci_high": high,
        "t_p": _paired_t(sums / sizes) if count > 1 else 1.0,
        "n_items": len(delta),
        "n_documents": count,
    }


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

    None when the ceiling is not above the source: there is no gap, and a ratio would flip its sign.
    """
    return _ratio(mapped - source, ceiling - source)


def gap_recovered_nats(mapped: float, source: float, ceiling: float) -> float | None:
    """The same in nats, where lower is better: (source - mapped) / (source - ceiling)."""
    return _ratio(source - mapped, source - ceiling)


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
