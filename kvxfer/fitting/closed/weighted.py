"""Weighted ridge: a token counts as much as the target layer's own attention looks at it.

That the receiver's attention should weigh the tokens of the regression is the idea of CacheBridge's attention repair
(arXiv 2609.00891). Ours is simpler: one fixed, clipped weight per token and target layer, pooled over query heads
(``kvxfer.moments.token_weights``), in the one solve that ridge makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.ridge import Ridge
from kvxfer.fitting.closed.solver import Splits
from kvxfer.maps.blocks import Output
from kvxfer.moments.moments import Moments
from kvxfer.moments.spec import WEIGHTED_SPLITS

ENOUGH = 5
"""Effective tokens per feature below which a record says that they are few."""


@dataclass(frozen=True)
class Weighted(Ridge):
    """Ridge on every target layer's weighted tokens.

    λ and the like are chosen on the weighted validation split; source layers are ranked, and R² is reported, without
    weights.
    """

    name: str = "weighted"

    needs_weights = True

    def moments(self, splits: Splits, split: str, outputs: list[Output]) -> Moments:
        """The target layer's weighted moments where there are any: on the fit and validation splits."""
        if splits.weighted is None:
            raise KvxferError(
                "solver=weighted reads moments whose tokens are weighed, which this calibration does not have: "
                "set calibration.weights=attention"
            )
        if split not in WEIGHTED_SPLITS:
            return splits.moments(split, outputs)
        return splits.weighted(split, outputs[0][0])

    def apart(self, outputs: list[Output]) -> list[list[Output]]:
        """Each target layer has weights of its own."""
        return [[o for o in outputs if o[0] == layer] for layer in sorted({layer for layer, _ in outputs})]

    def notes(self, splits: Splits, outputs: list[Output], features: int) -> dict[str, Any]:
        """The effective number of fit tokens (Kish 1965), and whether it is small for so many features."""
        effective = self.moments(splits, "fit", outputs).effective
        return {"effective_tokens": effective, "few_tokens": effective < ENOUGH * features}
