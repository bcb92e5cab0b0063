"""Ridge regression: per target layer and kind, one multi-output solve over all heads of its k source layers.

The form of arXiv 2608.03893: all heads of a target layer share their inputs, so its per-head ridges are one solve.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import DESIGNS, KINDS, Block, Features
from kvxfer.linalg import solve_ridge
from kvxfer.moments import Moments, Output
from kvxfer.penalties import Isotropic
from kvxfer.r2 import HeldOut
from kvxfer.ranks import Full
from kvxfer.selection import choose_top_k, single_layer_scores
from kvxfer.solvers.base import Fit, LinearLayer, Splits

EDGE_GAIN = 1e-4
"""R² by which the last step towards a grid's end must still gain for the end to be called too near."""


@dataclass(frozen=True)
class Ridge:
    """Plain ridge with bias.

    Args:
        k: how many source layers feed a target layer.
        selection: ``shared`` (keys and values read the same layers) or ``separate``.
        selection_lam: λ of the single-layer fits that rank source layers.
        features: the design.
        penalty: λ, fixed or chosen per target layer and kind.
        rank: what the map may span.
    """

    k: int
    selection: str = "shared"
    selection_lam: float = 1e-3
    features: Features = DESIGNS["same"]
    penalty: Isotropic = field(default_factory=Isotropic)
    rank: Full = field(default_factory=Full)
    name: str = "ridge"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise KvxferError(f"solver.k={self.k} must be 1 or more source layers")
        if self.selection not in ("shared", "separate"):
            raise KvxferError(f"solver.selection={self.selection!r} is neither 'shared' nor 'separate'")
        if not self.selection_lam >= 0:
            raise KvxferError(f"solver.selection_lam={self.selection_lam} must be 0 or more")

    def steps(self, moments: Moments) -> int:
        """Single-layer fits, then one fit per target layer and kind."""
        return len(_candidates(moments)) * len(KINDS) + len(moments.layout.outputs)

    def fit(self, splits: Splits, advance: Callable[[], None] = lambda: None) -> Fit:
        """Rank source layers, then solve each distinct design once for all outputs that share it."""
        candidates = _candidates(splits.fit)
        scores = single_layer_scores(
            splits.fit, splits.validation, self.features, candidates, self.selection_lam, advance
        )
        selection = choose_top_k(scores, candidates, self.k, self.selection == "shared")
        shared: dict[tuple[Block, ...], list[Output]] = defaultdict(list)
        for output, chosen in selection.chosen.items():
            shared[self.features.blocks(output[1], chosen)].append(output)
        layers: dict[Output, LinearLayer] = {}
        records: dict[Output, dict[str, Any]] = {}
        for blocks, outputs in shared.items():
            for output, (layer, record) in self._solve(splits, blocks, outputs).items():
                layers[output], records[output] = layer, record
                advance()
        order = sorted(layers, key=lambda output: (KINDS.index(output[1]), output[0]))
        curves = {"lam": {f"{o[1]}.{o[0]}": records[o].pop("curve") for o in order}}
        return Fit({o: layers[o] for o in order}, selection, [records[o] for o in order], curves)

    def _solve(
        self, splits: Splits, blocks: tuple[Block, ...], outputs: list[Output]
    ) -> dict[Output, tuple[LinearLayer, dict[str, Any]]]:
        """Solve one design for the outputs that share it, each with its own best λ on the validation split."""
        gram, cross = splits.fit.design(blocks), splits.fit.targets(blocks, outputs)
        mean_x, mean_y = splits.fit.mean_of(blocks), splits.fit.mean_target(outputs)
        best = torch.full((len(outputs),), -torch.inf, dtype=torch.float64)
        weight, chosen = torch.zeros_like(cross), [0.0] * len(outputs)
        used = [0.0] * len(outputs)
        curve = []
        width = splits.fit.layout.width
        validation = HeldOut(splits.validation, blocks, outputs)
        for lam in self.penalty.candidates:
            solution, spent = solve_ridge(gram, cross, lam)
            bias = mean_y - mean_x @ solution
            score = validation.r2(solution, bias)
            curve.append((lam, score.tolist()))
            for n in torch.nonzero(score > best).flatten().tolist():
                columns = slice(n * width, (n + 1) * width)
                weight[:, columns], chosen[n], used[n] = solution[:, columns], lam, spent
            best = torch.maximum(best, score)
        bias = mean_y - mean_x @ weight
        held_out, in_sample = (HeldOut(m, blocks, outputs).r2(weight, bias) for m in (splits.held_out, splits.fit))
        result = {}
        for n, output in enumerate(outputs):
            columns = slice(n * width, (n + 1) * width)
            record = {
                "layer": output[0],
                "kind": output[1],
                "source_layers": " ".join(str(x) for x in sorted({block.layer for block in blocks})),
                "features": len(blocks) * width,
                "lam": chosen[n],
                "lam_used": used[n],
                "raised": used[n] != chosen[n],
                "at_grid_edge": beyond_grid([scores[n] for _, scores in curve]),
                "r2_fit": float(in_sample[n]),
                "r2_validation": float(best[n]),
                "r2_held_out": float(held_out[n]),
                "curve": [[lam, scores[n]] for lam, scores in curve],
            }
            result[output] = (_layer(blocks, weight[:, columns], bias[columns]), record)
        return result


def beyond_grid(scores: list[float]) -> bool:
    """Whether a wider grid may score better: the best λ is at an end, and the one before it clearly worse."""
    if len(scores) < 2:
        return False
    best = max(scores)
    return max(scores[0] - scores[1], scores[-1] - scores[-2]) > EDGE_GAIN and best in (scores[0], scores[-1])


def _layer(blocks: tuple[Block, ...], weight: Tensor, bias: Tensor) -> LinearLayer:
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise KvxferError("a fitted map is not finite: raise penalty.lam or calibrate on more rows (corpus.rows.fit)")
    return LinearLayer(blocks, weight.float().contiguous(), bias.float().contiguous())


def _candidates(moments: Moments) -> list[int]:
    return sorted({block.layer for block in moments.layout.blocks})
