"""Which source layers feed a target layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import KINDS, Output

Scorer = Callable[[tuple[int, ...]], dict[str, Float[Tensor, " targets"]]]
"""Held-out scores, by kind, of every target layer when it reads some source layers."""


@dataclass(frozen=True)
class Selection:
    """The outcome: scores of single source layers, and the chosen ones (ascending) per target layer and kind.

    The score of a source layer that a target layer does not keep is minus infinity, in JSON null.
    """

    candidates: list[int]
    scores: dict[str, Float[Tensor, "targets candidates"]]
    chosen: dict[Output, tuple[int, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: rows are target layers, columns candidate source layers."""
        layers = range(len(self.scores["keys"]))
        return {
            "candidates": self.candidates,
            **{f"r2_{kind}": _finite(self.scores[kind]) for kind in KINDS},
            **{f"chosen_{kind}": [list(self.chosen[layer, kind]) for layer in layers] for kind in KINDS},
        }


def _finite(scores: Float[Tensor, "targets candidates"]) -> list[list[float | None]]:
    return [[None if score == -math.inf else score for score in row] for row in scores.tolist()]


def single_layer_scores(
    scorer: Scorer, candidates: list[int], advance: Callable[[], None]
) -> dict[str, Float[Tensor, "targets candidates"]]:
    scores: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for layer in candidates:
        for kind, score in scorer((layer,)).items():
            scores[kind].append(score)
            advance()
    return {kind: torch.stack(columns, dim=1) for kind, columns in scores.items()}


def ranked(
    scores: dict[str, Float[Tensor, "targets candidates"]], candidates: list[int], shared: bool
) -> dict[Output, list[int]]:
    """The candidates of every target layer and kind, best first; equal scores favour the earlier layer.

    Those that a target layer does not keep, whose score is minus infinity, are left out.

    Args:
        shared: keys and values of a target layer use the same source layers, ranked by the mean of both scores (as in
            arXiv 2608.03893); otherwise each kind has its own.
    """
    mean = torch.stack(list(scores.values())).mean(0)
    order = {}
    for kind in KINDS:
        for layer, row in enumerate(best(mean if shared else scores[kind], candidates)):
            order[layer, kind] = row
    return order


def best(scores: Float[Tensor, "targets candidates"], candidates: list[int]) -> list[list[int]]:
    """The candidates of every target layer, best first, without those whose score is minus infinity."""
    indices = torch.sort(scores, dim=1, descending=True, stable=True).indices.tolist()
    return [[candidates[i] for i in row if own[i] > -math.inf] for row, own in zip(indices, scores, strict=True)]


def check_k(k: int, candidates: list[int], kept: int | None = None) -> None:
    """Refuse more source layers than there are, or than each target layer keeps."""
    if kept is not None and k > kept:
        raise KvxferError(
            f"solver.k={k} is more than the {kept} source layers that the calibration keeps for each target layer: "
            "lower solver.k or raise calibration.keep_layers"
        )
    if not 1 <= k <= len(candidates):
        raise KvxferError(f"solver.k={k} must be from 1 to {len(candidates)}, the source layers that were calibrated")


def counts(most: int) -> list[int]:
    """How many source layers are tried where that is to be chosen: 1, 2, 4, ... and all that there are."""
    return sorted({min(2**power, most) for power in range(most.bit_length() + 1)})


def choose_top_k(order: dict[Output, list[int]], k: int) -> dict[Output, tuple[int, ...]]:
    return {output: tuple(sorted(layers[:k])) for output, layers in order.items()}


def choose_greedily(
    scorer: Scorer, order: dict[Output, list[int]], k: int, pool: int, shared: bool
) -> dict[Output, tuple[int, ...]]:
    """Forward selection among the ``pool`` best single layers: each step adds the layer that scores best with the rest.

    A set that several target layers consider is scored once.
    """
    known: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def score(kind: str, layers: tuple[int, ...], target: int) -> float:
        if layers not in known:
            known[layers] = scorer(layers)
        return sum(float(known[layers][each][target]) for each in (KINDS if shared else (kind,)))

    chosen: dict[Output, tuple[int, ...]] = {}
    for (target, kind), layers in order.items():
        if shared and kind != KINDS[0]:
            chosen[target, kind] = chosen[target, KINDS[0]]
            continue
        found: tuple[int, ...] = (layers[0],)
        while len(found) < k:
            options = [tuple(sorted((*found, layer))) for layer in layers[: max(pool, k)] if layer not in found]
            found = max(options, key=lambda option: score(kind, option, target))
        chosen[target, kind] = found
    return chosen
