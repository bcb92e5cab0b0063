"""Held-out quality of a linear map, from moments alone."""

from __future__ import annotations

from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.linalg import NOT_FINITE
from kvxfer.maps.blocks import Block, Output
from kvxfer.moments.moments import Moments
from kvxfer.moments.query_metric import Metrics


class HeldOut:
    """The moments of one design and some outputs, gathered once to score any number of maps.

    Args:
        moments: those of the split to score on.
        blocks: the design.
        outputs: what is predicted; their columns lie side by side.
    """

    def __init__(self, moments: Moments, blocks: tuple[Block, ...], outputs: list[Output]) -> None:
        self.blocks, self.outputs = blocks, outputs
        self.count = moments.count
        self.gram, self.cross = moments.design(blocks), moments.targets(blocks, outputs)
        # One value that is not finite makes the sum so.
        if not torch.isfinite(self.cross.sum() + self.gram.sum()):
            raise KvxferError(NOT_FINITE)
        self.mean_x, self.mean_y = moments.mean_of(blocks), moments.mean_target(outputs)
        self.total, self.square = moments.variance_target(outputs), moments.centred_square(outputs)
        self.shape = (len(outputs), moments.layout.heads, moments.layout.dim)

    def only(self, n: int) -> HeldOut:
        """The same design with output n alone."""
        single = copy(self)
        width = self.shape[1] * self.shape[2]
        columns = slice(n * width, (n + 1) * width)
        single.outputs, single.shape = self.outputs[n : n + 1], (1, *self.shape[1:])
        single.cross, single.square = self.cross[:, columns], self.square[n : n + 1]
        single.mean_y, single.total = self.mean_y[columns], self.total[columns]
        return single

    def part(self, features: Int[Tensor, " features"], columns: slice, heads: list[int]) -> HeldOut:
        """Some features of the design, and some columns (whole heads) of every output."""
        if len(features) == len(self.gram) and len(heads) == self.shape[1]:
            return self
        own = copy(self)
        count, _, dim = self.shape
        own.shape = (count, len(heads), dim)
        own.gram, own.mean_x = self.gram[features][:, features], self.mean_x[features]
        own.cross = self.cross[features].view(len(features), count, -1)[:, :, columns].flatten(1)
        own.mean_y, own.total = (x.view(count, -1)[:, columns].flatten() for x in (self.mean_y, self.total))
        own.square = self.square[:, heads]
        return own

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
        return self.r2_of_heads(self.residual(weight, bias).view(self.shape).sum(-1))

    def r2_of_heads(self, residual: Float[Tensor, "*lams outputs heads"]) -> Float[Tensor, "*lams outputs"]:
        """The same from residuals that are summed over the columns of each head."""
        rounding = torch.finfo(torch.float64).eps * self.count * self.mean_y**2
        total, least = (x.view(self.shape).sum(-1) for x in (self.total, rounding))
        varies = total > least
        return torch.where(varies, 1 - residual / torch.where(varies, total, 1.0), 0.0).mean(-1)

    def metric_r2(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"], metrics: Metrics
    ) -> Float[Tensor, " outputs"]:
        """The same in the outputs' metric M: 1 - tr(M residual) / tr(M total) of each head, averaged over heads."""
        scores = []
        dim = self.shape[2]
        rounding = torch.finfo(torch.float64).eps * self.count
        offset = self.mean_x @ weight + bias - self.mean_y
        for n, output in enumerate(self.outputs):
            metric = metrics.by_output[output].matrix
            per_head = []
            for head in range(self.shape[1]):
                columns = slice((n * self.shape[1] + head) * dim, (n * self.shape[1] + head + 1) * dim)
                w, c, o = weight[:, columns], self.cross[:, columns], offset[columns]
                half = w.T @ c
                error = self.square[n, head] - half - half.T + w.T @ self.gram @ w + self.count * torch.outer(o, o)
                total, mean = (metric[head] * self.square[n, head]).sum(), self.mean_y[columns]
                varies = total > rounding * (mean @ metric[head] @ mean)
                per_head.append(torch.where(varies, 1 - (metric[head] * error).sum() / total, 0.0))
            scores.append(torch.stack(per_head).mean())
        return torch.stack(scores)
