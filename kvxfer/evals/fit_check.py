"""Does a map still do what its fit said? What it leaves unexplained on an evaluation's prompts, against its fit's.

Unexplained is 1 - R². R² itself hides harm where it is high: keys that are a tenth too small cost a layer .07 of it,
and are five times as much as the fit left.

What is stale, swapped or misread (another rotation, permuted layers, a neighbour's map) shows here first, since it
leaves the fit's own report as it was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.files import read_json
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.content_errors import MappedErrors

TOLERATED, TOLERATED_MEAN = 1.5, 1.15
"""So many times as much as on the fit's held-out rows may be left unexplained of one target layer and kind, and in the
geometric mean of all. Evaluation rows of the calibrated text reached 1.17 and 1.03 on the toy pair, 1.32 and 1.10 on
the language model."""

LEAST = 1e-3
"""Where the fit leaves less, this counts in its place: such shares are rounding and chance."""

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


@torch.inference_mode()
def handed_errors(transfer: Transfer, ids: Int[Tensor, "rows tokens"]) -> MappedErrors:
    """The errors, in content space, of the cache that a target is handed of some prompts, over its mapped tokens."""
    pair, (head, _) = transfer.pair, transfer.split(ids)
    handed = transfer.handed(transfer.prefill(head), head, transfer.exact(head))
    errors = MappedErrors(handed.layers)
    true, served = (pair.content("target", cache) for cache in (pair.target.prefill(head), handed))
    errors.add(true, served, *transfer.plan.mapped_span(ids.shape[1]))
    return errors


def check_fit(
    transfer: Transfer, cache_map: CacheMap, directory: Path, ids: Int[Tensor, "rows tokens"]
) -> dict[str, Any] | None:
    """R² of every target layer and kind on the mapped tokens of some prompts, against the fit's held-out R².

    It is that of the cache which is handed over, so that what goes wrong after the map shows too.

    Args:
        directory: where the map and its fit's record lie.
        ids: prompts of one length: a few rows of the calibrated text, ``FEWEST_TOKENS`` mapped tokens or more.

    Returns:
        ``outputs`` (``layer``, ``kind``, ``r2``, ``recorded``, ``ratio`` of what is left unexplained to what the fit
        left; ``r2`` and ``ratio`` are None where the mapped content is not finite), ``worst`` (the one of the largest
        ratio), ``beyond`` (those above ``tolerated``), ``mean`` (the geometric mean of the ratios, None where one is)
        with ``tolerated_mean``, ``tokens`` and ``passed``. None where the fit recorded nothing.

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
    plan = transfer.plan
    first, stop = plan.mapped_span(ids.shape[1])
    tokens = ids.shape[0] * (stop - first)
    if tokens < FEWEST_TOKENS:
        raise KvxferError(
            f"R² over {tokens} mapped tokens says nothing: give {FEWEST_TOKENS} or more (longer prompts, more rows, or "
            f"a lower plan.exact_first={plan.exact_first})"
        )
    errors = handed_errors(transfer, ids)
    outputs: list[dict[str, Any]] = []
    for layer, kind in sorted(recorded):
        r2, fits = errors.by_output[layer, kind].r2(), recorded[layer, kind]
        values = {"r2": r2, "ratio": _ratio(r2, fits)} if math.isfinite(r2) else {"r2": None, "ratio": None}
        outputs.append({"layer": layer, "kind": kind, "recorded": fits, **values})
    beyond = [row for row in outputs if row["ratio"] is None or row["ratio"] > TOLERATED]
    known = [row["ratio"] for row in outputs if row["ratio"] is not None]
    mean = math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(outputs) else None
    return {
        "outputs": outputs,
        "worst": max(outputs, key=lambda row: math.inf if row["ratio"] is None else row["ratio"]),
        "beyond": beyond,
        "tolerated": TOLERATED,
        "mean": mean,
        "tolerated_mean": TOLERATED_MEAN,
        "tokens": tokens,
        "passed": not beyond and mean is not None and mean <= TOLERATED_MEAN,
    }


def _ratio(r2: float, recorded: float) -> float:
    return max(1 - r2, LEAST) / max(1 - recorded, LEAST)
