"""What a mapped cache is worth on rows that come in batches: sums that are merged, so that batches leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

Columns = Float[Tensor, "rows tokens width"]


@dataclass(frozen=True)
class Spread:
    """Squared errors of several layers, and the truth's squared deviations from its mean: float64 sums.

    Attributes:
        tokens: how many were counted.
        error: the sum of squared errors of each layer.
        mean: the truth's mean over tokens.
        deviation: the sum of its squared deviations from it.
    """

    tokens: int
    error: Float[Tensor, " layers"]
    mean: Float[Tensor, "layers width"]
    deviation: Float[Tensor, " layers"]

    @staticmethod
    def of(true: Sequence[Columns], found: Sequence[Columns]) -> Spread:
        """Of one tensor of each for every layer."""
        # No float64 on Apple's GPUs.
        home = "cpu" if true[0].device.type == "mps" else true[0].device
        error, mean, deviation = [], [], []
        for each in zip(true, found, strict=True):
            mine, theirs = (x.detach().flatten(0, 1).to(home).double() for x in each)
            error.append((theirs - mine).square().sum())
            mean.append(mine.mean(0))
            deviation.append((mine - mean[-1]).square().sum())
        stacked = (torch.stack(part).cpu() for part in (error, mean, deviation))
        return Spread(true[0].shape[0] * true[0].shape[1], *stacked)

    def merged(self, other: Spread) -> Spread:
        """Of the tokens of both (Chan's rule)."""
        tokens = self.tokens + other.tokens
        apart = other.mean - self.mean
        between = apart.square().sum(-1) * self.tokens * other.tokens / tokens
        return Spread(
            tokens,
            self.error + other.error,
            self.mean + apart * other.tokens / tokens,
            self.deviation + other.deviation + between,
        )

    @property
    def explained(self) -> Float[Tensor, " layers"]:
        """1 - error / deviation, as R²; 0 where the truth does not vary."""
        varies = self.deviation > 0
        return torch.where(varies, 1 - self.error / torch.where(varies, self.deviation, 1), 0)


@dataclass(frozen=True)
class Measures:
    """A map against the target's own cache, on some rows.

    Attributes:
        tokens: the continuation's, over all rows.
        kl: KL(target || mapped) of their next-token distributions, nats per token, the target going on over the mapped
            prefix.
        cosine: by target layer, the mean over these tokens of the cosine of the true and the mapped attention output
            (the target's own queries, keys and values of the continuation).
        attention: errors of the attention output by target layer, all of the row mapped.
    """

    tokens: int
    kl: float
    cosine: Float[Tensor, " layers"]
    attention: Spread

    @property
    def attention_score(self) -> Float[Tensor, " layers"]:
        """Attention-output scores as ``kvxfer.fitting.closed.attention.LayerAttention`` has them, both kinds mapped."""
        return self.attention.explained

    def merged(self, other: Measures) -> Measures:
        """Of the rows of both."""
        tokens = self.tokens + other.tokens
        mine, theirs = self.tokens / tokens, other.tokens / tokens
        return Measures(
            tokens,
            mine * self.kl + theirs * other.kl,
            mine * self.cosine + theirs * other.cosine,
            self.attention.merged(other.attention),
        )

    @staticmethod
    def over(batches: Sequence[Measures]) -> Measures:
        return reduce(Measures.merged, batches)
