"""Which source layers feed a target layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import KINDS, Features
from kvxfer.linalg import solve_ridge
from kvxfer.moments import Moments, Output
from kvxfer.r2 import HeldOut


@dataclass(frozen=True)
class Selection:
    """The outcome: scores of single source layers, and the chosen ones (ascending) per target layer and kind."""

    candidates: list[int]
    scores: dict[str, Float[Tensor, "targets candidates"]]
    chosen: dict[Output, tuple[int, ...]]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types: rows are target layers, columns candidate source layers."""
        layers = range(len(self.scores["keys"]))
        return {
            "candidates": self.candidates,
            **{f"r2_{kind}": self.scores[kind].tolist() for kind in KINDS},
            **{f"chosen_{kind}": [list(self.chosen[layer, kind]) for layer in layers] for kind in KINDS},
        }


def single_layer_scores(
    fit: Moments,
    validation: Moments,
    features: Features,
    candidates: list[int],
    lam: float,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Float[Tensor, "targets candidates"]]:
    """Held-out R² of every target layer from each source layer alone.

    A source layer's Gram is factored once for all target layers, and both kinds where they read the same blocks.
    """
    scores: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for layer in candidates:
        for blocks in dict.fromkeys(features.blocks(kind, [layer]) for kind in KINDS):
            kinds = [kind for kind in KINDS if features.blocks(kind, [layer]) == blocks]
            outputs = [output for kind in kinds for output in fit.layout.outputs if output[1] == kind]
            weight, _ = solve_ridge(fit.design(blocks), fit.targets(blocks, outputs), lam)
            bias = fit.mean_target(outputs) - fit.mean_of(blocks) @ weight
            found = HeldOut(validation, blocks, outputs).r2(weight, bias).chunk(len(kinds))
            for kind, score in zip(kinds, found, strict=True):
                scores[kind].append(score)
                advance()
    return {kind: torch.stack(columns, dim=1) for kind, columns in scores.items()}


def choose_top_k(
    scores: dict[str, Float[Tensor, "targets candidates"]], candidates: list[int], k: int, shared: bool
) -> Selection:
    """The ``k`` best single layers of every target layer.

    Args:
        shared: keys and values of a target layer use the same source layers, ranked by the mean of both scores (as in
            arXiv 2608.03893); otherwise each kind has its own.
    """
    if not 1 <= k <= len(candidates):
        raise KvxferError(f"solver.k={k} must be from 1 to {len(candidates)}, the source layers that were calibrated")
    mean = torch.stack(list(scores.values())).mean(0)
    chosen = {}
    for kind in KINDS:
        ranking = mean if shared else scores[kind]
        # A stable sort: equal scores favour the earlier layer on every machine.
        order = torch.sort(ranking, dim=1, descending=True, stable=True).indices[:, :k]
        for layer, row in enumerate(order.tolist()):
            chosen[layer, kind] = tuple(sorted(candidates[i] for i in row))
    return Selection(candidates, scores, chosen)
