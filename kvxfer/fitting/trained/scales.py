"""Means and deviations of columns over training tokens: what networks standardise what they read and give by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.columns import TargetTokens, block_columns
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.models.kv import KV

_LEAST = 1e-3
"""No column counts as varying less than this share of its block's root mean square deviation: dividing by next to
nothing would blow up what is noise."""


@dataclass(frozen=True)
class Scale:
    """Mean and deviation (above 0) of some columns, float64."""

    mean: Float[Tensor, " columns"]
    deviation: Float[Tensor, " columns"]


@dataclass
class _Sums:
    """Sums over tokens about a pilot mean, so that a large mean does not cost the deviation its digits."""

    pilot: Float[Tensor, " columns"]
    count: int = 0
    first: Tensor | float = 0.0
    second: Tensor | float = 0.0

    def add(self, x: Float[Tensor, "tokens columns"]) -> None:
        shifted = x - self.pilot
        self.count += len(x)
        self.first = self.first + shifted.sum(0)
        self.second = self.second + shifted.square().sum(0)

    def scale(self, name: str) -> Scale:
        first, second = torch.as_tensor(self.first) / self.count, torch.as_tensor(self.second) / self.count
        variance = (second - first.square()).clamp_min(0)
        mean = self.pilot + first
        if not torch.isfinite(mean.sum() + variance.sum()):
            raise KvxferError(f"{name} of the training rows holds numbers that are not finite: check the pair's dtype")
        least = _LEAST * variance.mean().sqrt()
        deviation = variance.sqrt().clamp_min(least) if least > 0 else torch.ones_like(variance)
        return Scale(mean, deviation)


@dataclass
class Scales:
    """The scales of the blocks that are read and of the outputs that are given.

    Args:
        blocks, outputs: which to measure.
        exact: first tokens of a row that no map gives and that are left out.
        random: weights of random features, where a block is of them.
    """

    blocks: Iterable[Block]
    outputs: Iterable[Output]
    exact: int
    random: RandomFeatures | None = None
    _sums: dict[Block | Output, _Sums] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, source: KV, known: TargetTokens, target: KV) -> None:
        """Add some rows: source content, what the target knows of the tokens, and the target's own content."""
        for block in self.blocks:
            self._add(block, block_columns(source, known, self.random, block))
        for layer, kind in self.outputs:
            self._add((layer, kind), getattr(target, kind)[layer].transpose(1, 2).flatten(2))

    def of(self, what: Block | Output) -> Scale:
        """The scale of a block or an output.

        Raises:
            KvxferError: it is not finite.
        """
        name = f"block {what.name}" if isinstance(what, Block) else f"{what[1]} of layer {what[0]}"
        return self._sums[what].scale(name)

    def _add(self, what: Block | Output, columns: Float[Tensor, "rows tokens width"]) -> None:
        x = columns[:, self.exact :].flatten(0, 1).double()
        self._sums.setdefault(what, _Sums(x.mean(0))).add(x)
