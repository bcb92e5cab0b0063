"""Does a map still do what its fit said? R² on the prompts of an evaluation against R² on the fit's held-out rows.

What is stale, swapped or misread (another rotation, permuted layers, a neighbour's map) shows here first, since it
leaves the fit's own report as it was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.files import read_json
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.content_errors import content_errors
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair

TOLERATED_DROP = 0.15
"""R² of one target layer and kind may be so much below the fit's held-out one. Evaluation rows of the calibrated text
were at most 0.004 below it on both offline pairs; the rest is room for prompts of another make-up."""

FEWEST_TOKENS = 64
"""Fewer mapped tokens, all prompts together, say nothing of R²."""


def recorded_r2(directory: Path) -> dict[Output, float]:
    """The held-out R² of every target layer and kind that the fit recorded beside its map; none without a record."""
    file = directory / DIAGNOSTICS
    if not file.is_file():
        return {}
    try:
        layers = read_json(file)["layers"]
        found = {(row["layer"], row["kind"]): row["r2_held_out"] for row in layers if "r2_held_out" in row}
    except (KeyError, TypeError, ValueError) as error:
        raise KvxferError(f"{file} is no record of a fit ({error}): train again with force=true") from error
    return {output: float(value) for output, value in found.items() if value is not None}


def check_fit(
    pair: Pair, mapper: Mapper, cache_map: CacheMap, directory: Path, plan: Plan, ids: Int[Tensor, "rows tokens"]
) -> dict[str, Any] | None:
    """R² of every target layer and kind on the mapped tokens of some prompts, against the fit's held-out R².

    Args:
        directory: where the map and its fit's record lie.
        ids: prompts of one length: a few rows of the calibrated text, ``FEWEST_TOKENS`` mapped tokens or more.

    Returns:
        ``outputs`` (``layer``, ``kind``, ``r2``, ``recorded``, ``drop``; ``r2`` and ``drop`` are None where the mapped
        content is not finite), ``worst`` (the one of the largest drop), ``below`` (those whose drop is more than
        ``tolerated``), ``tokens`` and ``passed``. None where the fit recorded nothing.

    Raises:
        KvxferError: too few tokens, or a record of other layers than the map's.
    """
    recorded = recorded_r2(directory)
    if not recorded:
        return None
    if set(recorded) != set(cache_map.layers):
        raise KvxferError(
            f"{directory / DIAGNOSTICS} records {len(recorded)} layers and kinds and the map has "
            f"{len(cache_map.layers)}: it is the record of another map; train again with force=true"
        )
    first, stop = plan.mapped_span(ids.shape[1])
    tokens = ids.shape[0] * (stop - first)
    if tokens < FEWEST_TOKENS:
        raise KvxferError(
            f"R² over {tokens} mapped tokens says nothing: give {FEWEST_TOKENS} or more (longer prompts, more rows, or "
            f"a lower plan.exact_first={plan.exact_first})"
        )
    errors = content_errors(pair, mapper, plan, ids)
    outputs: list[dict[str, Any]] = []
    for layer, kind in sorted(recorded):
        r2, fits = errors.by_output[layer, kind].r2(), recorded[layer, kind]
        values = {"r2": r2, "drop": fits - r2} if math.isfinite(r2) else {"r2": None, "drop": None}
        outputs.append({"layer": layer, "kind": kind, "recorded": fits, **values})
    below = [row for row in outputs if row["drop"] is None or row["drop"] > TOLERATED_DROP]
    worst = max(outputs, key=lambda row: math.inf if row["drop"] is None else row["drop"])
    return {
        "outputs": outputs,
        "worst": worst,
        "below": below,
        "tolerated": TOLERATED_DROP,
        "tokens": tokens,
        "passed": not below,
    }
