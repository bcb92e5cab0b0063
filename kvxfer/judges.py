"""What selection and automatic choices maximise: one score per output of some linear map of a design."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from kvxfer.metrics import Metrics
from kvxfer.r2 import HeldOut

CRITERIA = ("r2", "query")


class Judge(Protocol):
    """Scores a map of one design; more is better, 1 is perfect."""

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One score for each of the outputs whose columns lie side by side.

        Args:
            held: the design, its outputs and their moments on the split to score on.
        """
        ...


@dataclass(frozen=True)
class PlainR2:
    """R² of keys and values."""

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output."""
        return held.r2(weight, bias)


@dataclass(frozen=True)
class QueryR2:
    """R² in each output's metric: errors weighed by what the target's attention sees of them."""

    metrics: Metrics

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output."""
        return held.metric_r2(weight, bias, self.metrics)
