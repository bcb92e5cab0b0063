"""Does a map hold at prefixes longer than the rows it was calibrated on? Paired over the same scored tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvxfer.evals.statistics import outcome, paired_difference, ratio_difference

Items = Sequence[Mapping[str, Any]]


def _nats(items: Items, condition: str) -> Float[np.ndarray, " items"]:
    return np.array([item["nats"][condition] for item in items])


def gap(items: Items) -> dict[str, float | None]:
    """The source's nats per token less the ceiling's, with the paired test that says whether there is a gap at all."""
    tokens, documents = np.array([item["tokens"] for item in items]), [item["document"] for item in items]
    return _row(paired_difference(_nats(items, "source"), _nats(items, "ceiling"), documents, tokens))


def change(before: Items, after: Items) -> dict[str, dict[str, float | None]]:
    """What a longer prefix changes, second less first, on the same scored tokens.

    Returns:
        ``ceiling``: nats per token of the target itself; ``loss``: those that the mapped cache costs against it;
        ``gap_recovered``: the share of the gap between source and ceiling. Each ``difference``, ``ci_low``,
        ``ci_high``, ``p``: paired t over documents, and for the share its delta-method form.
    """
    documents, tokens = [item["document"] for item in after], np.array([item["tokens"] for item in after])
    shorter, longer = ({c: _nats(items, c) for c in ("ceiling", "source", "mapped")} for items in (before, after))
    loss, loss_before = (nats["mapped"] - nats["ceiling"] for nats in (longer, shorter))
    shares, shares_before = (
        (nats["source"] - nats["mapped"], nats["source"] - nats["ceiling"]) for nats in (longer, shorter)
    )
    return {
        "ceiling": _row(paired_difference(longer["ceiling"], shorter["ceiling"], documents, tokens)),
        "loss": _row(paired_difference(loss, loss_before, documents, tokens)),
        "gap_recovered": ratio_difference(shares, shares_before, documents),
    }


def compared(points: Sequence[Mapping[str, Any]], calibrated: int | None) -> dict[str, Any]:
    """What every length of one domain changes from the reference: the calibrated length, or else the shortest.

    Args:
        points: of one domain, by ascending prefix, with their items.
    """
    lengths = [point["prefix"] for point in points]
    known = calibrated in lengths
    reference = calibrated if known else lengths[0]
    before = points[lengths.index(reference)]["items"]
    found = []
    for point in points:
        test = gap(point["items"])
        row = {"prefix": point["prefix"], "gap": test, "has_gap": has_gap(test)}
        if point["prefix"] != reference:
            row["change"] = change(before, point["items"])
        found.append(row)
    documents = {item["document"] for item in before}
    about = {"domain": points[0]["domain"], "rows": len(before), "documents": len(documents)}
    return {**about, "reference": reference, "reference_is_calibrated": known, "lengths": found}


def _row(test: Mapping[str, float | int]) -> dict[str, float | None]:
    return {**{key: float(test[key]) for key in ("difference", "ci_low", "ci_high")}, "p": float(test["t_p"])}


def has_gap(test: Mapping[str, Any]) -> bool:
    """Whether the ceiling is shown to beat the source: only there can a map do so."""
    ci = (test["ci_low"], test["ci_high"])
    return outcome(test["p"], test["difference"], ci, higher_is_better=True) == "better"
