"""How near mapped content is to the target's own, over the tokens that a plan has mapped."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.maps.blocks import KINDS, Output
from kvxfer.models.kv import KV

_Content = Float[Tensor, "rows heads tokens dim"]


@dataclass
class ContentErrors:
    """Sums over the tokens of each row and head of one output: enough for R² of any set of rows.

    Attributes:
        tokens: of each row.
        first: sums of the true content ``[heads, dim]`` of each row, about the first row's mean.
        square: their squares' sums ``[heads]``.
        error: sums of the squared error ``[heads]``.
    """

    tokens: list[int] = field(default_factory=list)
    first: list[Float[Tensor, "heads dim"]] = field(default_factory=list)
    square: list[Float[Tensor, " heads"]] = field(default_factory=list)
    error: list[Float[Tensor, " heads"]] = field(default_factory=list)
    pilot: Float[Tensor, "heads 1 dim"] | None = None

    def add(self, true: _Content, mapped: _Content) -> None:
        true, mapped = true.double(), mapped.double()
        if self.pilot is None:
            self.pilot = true[0].mean(1, keepdim=True)
        # Shifted, because a mean that is large against the deviation would cost the variance its digits.
        shifted = true - self.pilot
        self.tokens += [true.shape[2]] * true.shape[0]
        self.first += list(shifted.sum(2).cpu())
        self.square += list(shifted.square().sum((2, 3)).cpu())
        self.error += list((mapped - true).square().sum((2, 3)).cpu())

    def sums(self) -> tuple[Float[Tensor, "rows heads"], Float[Tensor, "rows heads"]]:
        """The squared error of each row and head, and the true content's squared deviation from the mean of all rows.

        A head whose content does not vary, beyond what rounding leaves, has deviations of zero.
        """
        first, square = torch.stack(self.first), torch.stack(self.square)
        tokens = torch.tensor(self.tokens, dtype=torch.float64)[:, None]
        mean = first.sum(0) / tokens.sum()
        deviation = square - 2 * (first * mean).sum(-1) + tokens * mean.square().sum(-1)
        size = 0.0 if self.pilot is None else self.pilot.square().sum((1, 2)).cpu()
        least = torch.finfo(torch.float64).eps * tokens.sum() * size
        return torch.stack(self.error), torch.where(deviation.sum(0) > least, deviation, 0.0)

    def r2(self) -> float:
        """One minus error over deviation of each head, averaged over heads, as the fit reports it.

        A head that does not vary counts as 0. Not finite where the mapped content is not.
        """
        error, deviation = (x.sum(0) for x in self.sums())
        varies = deviation > 0
        return float(torch.where(varies, 1 - error / torch.where(varies, deviation, 1.0), 0.0).mean())


class MappedErrors:
    """The errors of every output of a map, over batches of rows."""

    def __init__(self, layers: int) -> None:
        self.by_output: dict[Output, ContentErrors] = {
            (layer, kind): ContentErrors() for kind in KINDS for layer in range(layers)
        }

    def add(self, true: KV, mapped: KV, first: int, stop: int) -> None:
        """Add tokens ``first`` to ``stop`` of two caches in content space."""
        for (layer, kind), errors in self.by_output.items():
            mine, theirs = (getattr(kv, kind)[layer][:, :, first:stop] for kv in (true, mapped))
            errors.add(mine, theirs)
