"""Held-out R² of a linear map, from moments alone."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.features import Block
from kvxfer.moments import Moments, Output


class HeldOut:
    """The moments of one design and some outputs, gathered once to score any number of maps.

    Args:
        moments: those of the split to score on.
        blocks: the design.
        outputs: what is predicted; their columns lie side by side.
    """

    def __init__(self, moments: Moments, blocks: tuple[Block, ...], outputs: list[Output]) -> None:
        self.count = moments.count
        self.gram, self.cross = moments.design(blocks), moments.targets(blocks, outputs)
        self.mean_x, self.mean_y = moments.mean_of(blocks), moments.mean_target(outputs)
        self.total = moments.variance_target(outputs)
        self.shape = (len(outputs), moments.layout.heads, moments.layout.dim)

    def residual(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " columns"]:
        """Sum over tokens of the squared error of ``x @ weight + bias``, per column.

        Expanding the square leaves nothing but moments: total - 2 w'C + w'Aw of the centred ones, plus count times the
        squared error of the mean.
        """
        explained = (weight * (2 * self.cross - self.gram @ weight)).sum(0)
        return self.total - explained + self.count * (self.mean_x @ weight + bias - self.mean_y) ** 2

    def r2(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output: 1 - residual / total of each head (summed over its columns), averaged over heads.

        Totals are about the mean of these moments. Summing within a head keeps columns of tiny variance from ruling.
        A head that does not vary, beyond what rounding leaves, has no variance to explain and counts as 0.
        """
        rounding = torch.finfo(torch.float64).eps * self.count * self.mean_y**2
        residual, total, least = (
            x.view(self.shape).sum(-1) for x in (self.residual(weight, bias), self.total, rounding)
        )
        varies = total > least
        return torch.where(varies, 1 - residual / torch.where(varies, total, 1.0), 0.0).mean(-1)
