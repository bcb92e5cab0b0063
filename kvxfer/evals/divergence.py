"""From what was written to how much of it is right, how far it is the ceiling's, and where it parts from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int64

from kvxfer.evals.decoding import CONDITIONS, Decoded
from kvxfer.evals.items import Item
from kvxfer.evals.statistics import accuracy_interval, mcnemar_exact, mean_interval, paired_difference

OTHERS = CONDITIONS[1:]
PER_ITEM = ("agreement", "agreement_sampled", "kl", "top", "exact_sampled", "never_sampled")


def summarise_decoding(items: Sequence[Item], decoded: dict[str, Decoded], dot: int | None) -> dict[str, Any]:
    """The ``conditions``, ``tests``, ``steps`` and ``items`` of the results.

    Args:
        dot: the token that ends an answer; None where there are no answers.
    """
    documents = [item.document for item in items]
    scores = {name: _Scores(items, found, decoded["ceiling"], dot) for name, found in decoded.items()}
    mapped = scores["mapped"]
    return {
        "answers": dot is not None,
        "conditions": {name: _condition(found, documents) for name, found in scores.items()},
        "tests": {
            "mapped_vs_source": _test(mapped, scores["source"], documents),
            "mapped_vs_ceiling": _test(mapped, scores["ceiling"], documents),
        },
        "steps": {name: _steps(scores[name], documents) for name in OTHERS},
        "items": [
            {
                "id": item.id,
                "document": item.document,
                "kind": item.kind,
                **{
                    key: {name: found.of_item(key, n) for name, found in scores.items()} for key in ("exact", *PER_ITEM)
                },
                "parts": {name: _after(found.match[n]) for name, found in scores.items()},
            }
            for n, item in enumerate(items)
        ],
    }


class _Scores:
    """One condition's arrays: ``match`` [items, steps] is where its token is the ceiling's; the rest is per item."""

    def __init__(self, items: Sequence[Item], own: Decoded, ceiling: Decoded, dot: int | None) -> None:
        self.match: Bool[np.ndarray, "items steps"] = own.tokens == ceiling.tokens
        self.match_sampled: Bool[np.ndarray, "items samples steps"] = own.samples == ceiling.samples
        self.kl_steps = own.kl
        sampled = own.samples.shape[1] > 0
        self.columns: dict[str, Float[np.ndarray, " items"] | None] = {
            "agreement": self.match.mean(1),
            "agreement_sampled": self.match_sampled.mean((1, 2)) if sampled else None,
            "kl": own.kl.mean(1),
            "top": own.top.mean(1),
            "never_sampled": self.match_sampled.all(2).mean(1) if sampled else None,
            "exact_sampled": None,
        }
        self.exact: Bool[np.ndarray, " items"] | None = None
        if dot is not None:
            self.exact = np.array([_is(row, item, dot) for row, item in zip(own.tokens, items, strict=True)])
            if sampled:
                right = [[_is(row, item, dot) for row in rows] for rows, item in zip(own.samples, items, strict=True)]
                self.columns["exact_sampled"] = np.array(right, dtype=np.float64).mean(1)

    def of_item(self, key: str, n: int) -> bool | float | None:
        """One item's number."""
        if key == "exact":
            return None if self.exact is None else bool(self.exact[n])
        column = self.columns[key]
        return None if column is None else float(column[n])


def _is(tokens: Int64[np.ndarray, " steps"], item: Item, dot: int) -> bool:
    """Whether what is written is the answer and its dot."""
    wanted = (*item.answer, dot)
    return tuple(tokens[: len(wanted)].tolist()) == wanted


def _after(match: Bool[np.ndarray, " steps"]) -> int | None:
    """The first place, from 1 on, that differs; None if none does."""
    return None if match.all() else int(np.argmin(match)) + 1


def _median(match: Bool[np.ndarray, "*rows steps"]) -> float | None:
    """The median of where rows part from the ceiling; None if it is beyond the last step."""
    rows = match.reshape(-1, match.shape[-1])
    places = np.where(rows.all(1), np.inf, np.argmin(rows, axis=1) + 1)
    found = float(np.median(places))
    return found if np.isfinite(found) else None


def _condition(scores: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"exact": None, "exact_ci": None}
    if scores.exact is not None:
        row = {"exact": float(scores.exact.mean()), "exact_ci": list(accuracy_interval(scores.exact, documents))}
    for key in PER_ITEM:
        column = scores.columns[key]
        row[key] = None if column is None else float(column.mean())
        row[f"{key}_ci"] = None if column is None else list(mean_interval(column, documents))
    never: Bool[np.ndarray, " items"] = np.all(scores.match, axis=1)
    row |= {"never": float(never.mean()), "never_ci": list(accuracy_interval(never, documents))}
    sampled = scores.match_sampled.shape[1] > 0
    return {**row, "parts": _median(scores.match), "parts_sampled": _median(scores.match_sampled) if sampled else None}


def _test(first: _Scores, second: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    """First minus second: exact McNemar for exact match, paired t over documents and bootstrap for the rest."""
    row: dict[str, Any] = {"exact_p": None, "exact_difference": None, "exact_ci": None}
    if first.exact is not None and second.exact is not None:
        paired = paired_difference(first.exact, second.exact, documents)
        row = {
            "exact_p": mcnemar_exact(first.exact, second.exact),
            "exact_difference": paired["difference"],
            "exact_ci": [paired["ci_low"], paired["ci_high"]],
        }
    for key in PER_ITEM:
        a, b = first.columns[key], second.columns[key]
        found = None if a is None or b is None else paired_difference(a, b, documents)
        row[f"{key}_difference"] = None if found is None else found["difference"]
        row[f"{key}_p"] = None if found is None else found["t_p"]
        row[f"{key}_ci"] = None if found is None else [found["ci_low"], found["ci_high"]]
    return {**row, "n": len(documents), "documents": len(set(documents))}


def _steps(scores: _Scores, documents: Sequence[str]) -> dict[str, Any]:
    """Means over items at every step, with intervals."""
    columns: dict[str, Float[np.ndarray, "items steps"]] = {
        "agreement": scores.match.astype(np.float64),
        "kl": scores.kl_steps,
        "same_greedy": np.cumprod(scores.match, axis=1).astype(np.float64),
    }
    if scores.match_sampled.shape[1]:
        columns["same_sampled"] = np.cumprod(scores.match_sampled, axis=2).mean(1)
    row: dict[str, Any] = {}
    for key, values in columns.items():
        row[key] = values.mean(0).tolist()
        row[f"{key}_ci"] = [list(mean_interval(column, documents)) for column in values.T]
    return row
