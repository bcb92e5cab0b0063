"""Held-out quality of a linear map, from moments alone."""

from __future__ import annotations

from copy import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.linalg import NOT_FINITE, half_product
from kvxfer.maps.blocks import Block, Output
from kvxfer.moments.moments import Moments
from kvxfer.moments.query_metric import Metrics

_NUMBERS = 1 << 20
"""Numbers of a product at a time (8 MiB): few enough to stay near the cores."""


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

    def errors(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, "outputs heads dim dim"]:
        """Sum over tokens of the products of the errors of ``x @ weight + bias``, head by head.

        Expanding the products leaves nothing but moments: total - w'C - C'w + w'Aw of the centred ones, plus count
        times those of the mean error. With A = T + T' the last three are H + H', H = w'(T w - C).
        """
        outputs, heads, dim = self.shape
        offset = (self.mean_x @ weight + bias - self.mean_y).view(self.shape)
        errors = self.square + self.count * offset[..., :, None] * offset[..., None, :]
        size = max(1, _NUMBERS // (len(weight) * heads * dim))
        for first in range(0, outputs, size):
            columns = slice(first * heads * dim, (first + size) * heads * dim)
            own = weight[:, columns]
            rest = half_product(self.gram, own).sub_(self.cross[:, columns])
            by_head = (each.unflatten(1, (-1, dim)).transpose(0, 1) for each in (own, rest))
            half = (next(by_head).mT @ next(by_head)).unflatten(0, (-1, heads))
            errors[first : first + size] += half.add_(half.mT.clone())
        return errors

    def residual(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " columns"]:
        """Sum over tokens of the squared error of ``x @ weight + bias``, per column."""
        return self.errors(weight, bias).diagonal(dim1=-2, dim2=-1).flatten()

    def r2(
        self, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output: 1 - residual / total of each head (summed over its columns), averaged over heads.

        Totals are about the mean of these moments. Summing within a head keeps columns of tiny variance from ruling.
        A head that does not vary, beyond what rounding leaves, has no variance to explain and counts as 0.
        """
        return self.r2_of_errors(self.errors(weight, bias))

    def r2_of_errors(self, errors: Float[Tensor, "outputs heads dim dim"]) -> Float[Tensor, " outputs"]:
        """The same from ``errors``."""
        return self.r2_of_heads(errors.diagonal(dim1=-2, dim2=-1).sum(-1))

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
        return self.metric_r2_of_errors(self.errors(weight, bias), metrics)

    def metric_r2_of_errors(
        self, errors: Float[Tensor, "outputs heads dim dim"], metrics: Metrics
    ) -> Float[Tensor, " outputs"]:
        """The same from ``errors``."""
        metric = torch.stack([metrics.by_output[output].matrix for output in self.outputs])
        mean = self.mean_y.view(*self.shape, 1)
        rounding = torch.finfo(torch.float64).eps * self.count * (mean.mT @ metric @ mean)[..., 0, 0]
        residual, total = ((metric * products).sum((-2, -1)) for products in (errors, self.square))
        varies = total > rounding
        return torch.where(varies, 1 - residual / torch.where(varies, total, 1.0), 0.0).mean(-1)
