"""Scores of the same samples under several conditions: shares, ratios and paired tests, whatever the score is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvxfer.evals.intervals import (
    accuracy_interval,
    floor_normalised,
    gap_recovered,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    ratio_interval,
    require_items,
    retention,
)

Column = Float[np.ndarray, " samples"]
COMPARED = ("source", "ceiling")
"""What the mapped cache is tested against."""


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
    conditions = {name: _row(scores, name, chance, documents, binary) for name in scores}
    tests = {
        f"mapped_vs_{other}": _test(scores["mapped"], scores[other], documents, binary)
        for other in COMPARED
        if "mapped" in scores and other in scores
    }
    return {"conditions": conditions, "tests": tests}


def is_binary(scores: Mapping[str, Column]) -> bool:
    """Whether every sample is right or wrong under every condition."""
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in scores.values())


def _row(
    scores: Mapping[str, Column], name: str, chance: Column, documents: Sequence[str], binary: bool
) -> dict[str, Any]:
    own, best, base = scores[name], scores["ceiling"], scores["source"]
    value, ceiling, source = (float(values.mean()) for values in (own, best, base))
    interval = accuracy_interval(own == 1, documents) if binary else mean_interval(own, documents)
    ratios = {
        "retention": (retention(value, ceiling), own, best),
        "retention_floor_normalised": (
            floor_normalised(value, ceiling, float(chance.mean())),
            own - chance,
            best - chance,
        ),
        "gap_recovered": (gap_recovered(value, source, ceiling), own - base, best - base),
    }
    row: dict[str, Any] = {"accuracy": value, "accuracy_ci": list(interval), "n": len(own)}
    for key, (ratio, above, below) in ratios.items():
        drawn = None if ratio is None else ratio_interval(above, below, documents)
        row |= {key: ratio, f"{key}_ci": None if drawn is None else list(drawn)}
    return row


def _test(first: Column, second: Column, documents: Sequence[str], binary: bool) -> dict[str, Any]:
    paired = paired_difference(first, second, documents)
    p = mcnemar_exact(first == 1, second == 1) if binary else paired["t_p"]
    return {
        "test": "mcnemar" if binary else "paired_t",
        "accuracy_p": p,
        "accuracy_difference": paired["difference"],
        "accuracy_ci": [paired["ci_low"], paired["ci_high"]],
        "n": paired["n_items"],
        "documents": paired["n_documents"],
    }
