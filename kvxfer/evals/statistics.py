"""From per-item scores to the conditions and tests of results.json.

The primitives (intervals, exact McNemar, paired differences, ratios) live in ``intervals`` and are offered here too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.intervals import (
    accuracy_interval,
    floor_normalised,
    gap_recovered,
    gap_recovered_nats,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    ratio_interval,
    require_items,
    retention,
)

__all__ = [
    "COMPARISONS",
    "CONDITIONS",
    "accuracy_interval",
    "floor_normalised",
    "gap_recovered",
    "gap_recovered_nats",
    "mcnemar_exact",
    "mean_interval",
    "paired_difference",
    "ratio_interval",
    "retention",
    "summarise",
]

_TRANSFERRED = ("ceiling", "identity", "source", "mapped", "mapped_all")
CONDITIONS = (*_TRANSFERRED, "floor", "raw_copy", "ancestor_copy", "wrong_donor", "random_map", "no_context")
COMPARISONS = (
    ("mapped", "source"),
    ("mapped", "ceiling"),
    ("mapped_all", "source"),
    ("mapped_all", "ceiling"),
    ("mapped", "ancestor_copy"),
)
MOST_NATS = 700.0  # exp of more overflows


class _Scores:
    """The items' scores as arrays, one per condition."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        require_items(len(items))
        first = items[0]
        self.conditions = [c for c in CONDITIONS if c in first["nats"]] + sorted(set(first["nats"]) - set(CONDITIONS))
        self.documents = [str(item["document"]) for item in items]
        self.tokens = np.array([item["tokens"] for item in items], dtype=np.float64)
        self.nats = {c: self._column(items, "nats", c).astype(np.float64) for c in self.conditions}
        self.correct = {
            c: self._column(items, "correct", c).astype(bool) for c in self.conditions if first.get("correct")
        }
        generated = first.get("generated") or {}
        self.generated = {
            c: self._column(items, "generated", c).astype(bool) for c in self.conditions if c in generated
        }
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

    def accuracy(self, condition: str) -> float | None:
        return float(self.correct[condition].mean()) if condition in self.correct else None

    def per_token(self, condition: str) -> float:
        """Nats per scored token."""
        return float(self.nats[condition].sum() / self.tokens.sum())


def _accuracy_row(scores: _Scores, condition: str, chance: float | int) -> dict[str, Any]:
    """Accuracy and its ratios; all None without answers to be right or wrong about."""
    names = ("accuracy", "retention", "retention_floor_normalised", "gap_recovered")
    row: dict[str, Any] = {key: None for name in names for key in (name, f"{name}_ci")} | {"generated": None}
    if condition in scores.generated:
        row["generated"] = float(scores.generated[condition].mean())
    mapped = scores.accuracy(condition)
    if mapped is None:
        return row
    right = scores.correct[condition].astype(np.float64)
    row |= {"accuracy": mapped, "accuracy_ci": list(accuracy_interval(scores.correct[condition], scores.documents))}
    ceiling, source = scores.accuracy("ceiling"), scores.accuracy("source")
    parts: dict[str, tuple[float | None, np.ndarray, np.ndarray]] = {}
    if ceiling is not None:
        best = scores.correct["ceiling"].astype(np.float64)
        parts["retention"] = (retention(mapped, ceiling), right, best)
        normalised = floor_normalised(mapped, ceiling, chance)
        parts["retention_floor_normalised"] = (normalised, right - chance, best - chance)
        if source is not None:
            base = scores.correct["source"].astype(np.float64)
            parts["gap_recovered"] = (gap_recovered(mapped, source, ceiling), right - base, best - base)
    return row | _ratios(parts, scores.documents)


def _ratios(
    parts: Mapping[str, tuple[float | None, np.ndarray, np.ndarray]], documents: Sequence[str]
) -> dict[str, float | list[float] | None]:
    row: dict[str, float | list[float] | None] = {}
    for name, (value, above, below) in parts.items():
        interval = None if value is None else ratio_interval(above, below, documents)
        if interval is not None and interval[0] == interval[1]:
            # Where no item errs, no resample differs: an interval without width would claim certainty.
            interval = None
        row |= {name: value, f"{name}_ci": None if interval is None else list(interval)}
    return row


def _nats_row(scores: _Scores, condition: str) -> dict[str, Any]:
    """Nats per token, perplexity and the gap recovered in nats."""
    mapped = scores.per_token(condition)
    row: dict[str, Any] = {
        "perplexity": math.exp(mapped) if mapped < MOST_NATS else None,
        "nats": mapped,
        "nats_ci": list(mean_interval(scores.nats[condition], scores.documents, scores.tokens)),
        "gap_recovered_nats": None,
        "gap_recovered_nats_ci": None,
    }
    if not {"ceiling", "source"} <= set(scores.conditions):
        return row
    base = scores.nats["source"]
    gap = gap_recovered_nats(mapped, scores.per_token("source"), scores.per_token("ceiling"))
    parts = {"gap_recovered_nats": (gap, base - scores.nats[condition], base - scores.nats["ceiling"])}
    return row | _ratios(parts, scores.documents)


def _test_row(scores: _Scores, first: str, second: str) -> dict[str, Any]:
    nats = paired_difference(scores.nats[first], scores.nats[second], scores.documents, scores.tokens)
    row: dict[str, Any] = {
        "accuracy_p": None,
        "accuracy_difference": None,
        "accuracy_ci": None,
        "nll_p": nats["t_p"],
        "nll_difference": nats["difference"],
        "nll_ci": [nats["ci_low"], nats["ci_high"]],
        "n": nats["n_items"],
        "documents": nats["n_documents"],
    }
    if first in scores.correct:
        a, b = scores.correct[first], scores.correct[second]
        paired = paired_difference(a, b, scores.documents)
        row |= {
            "accuracy_p": mcnemar_exact(a, b),
            "accuracy_difference": paired["difference"],
            "accuracy_ci": [paired["ci_low"], paired["ci_high"]],
        }
    return row


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
        c: _accuracy_row(scores, c, chance) | _nats_row(scores, c) | {"n": len(items)} for c in scores.conditions
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
