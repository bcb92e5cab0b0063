"""Positive definite solves that do not fail in silence."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.dials import Setting
from kvxfer.moments.query_metric import Metric

_TRIES = 9
_EPSILON = 1e-13
_LEAST = 1e-100
_PANEL = 192
"""Rows of a factor, or of a product with a symmetric matrix, at a time."""
_CLEAR = 1e3
"""How many times rounding the smallest penalised eigenvalue must be for an eigendecomposition to stand for a solve."""


class Gram:
    """A centred Gram to solve with: by Cholesky for one λ, by one eigendecomposition where there are many.

    Args:
        matrix: float64, symmetric.
        blocks: the number of the block that each feature belongs to, where every block is penalised by its own mean
            diagonal; None where all are penalised by that of the whole matrix.
    """

    def __init__(
        self, matrix: Float[Tensor, "features features"], blocks: Int[Tensor, " features"] | None = None
    ) -> None:
        # One value that is not finite makes the sum so.
        if not torch.isfinite(matrix.sum()):
            raise KvxferError(NOT_FINITE)
        self.matrix = matrix
        self._scale = None if blocks is None else self._block_scale(blocks)
        scale = self._scale
        self._scaled = matrix if scale is None else matrix * scale[:, None] * scale

    @cached_property
    def unit(self) -> float:
        """The mean of the diagonal: what a λ of 1 adds to every direction (to each block's, scaled to this mean)."""
        return float(self.matrix.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))

    def _block_scale(self, blocks: Int[Tensor, " features"]) -> Float[Tensor, " features"]:
        """What brings every block to the mean variance of all; 1 where a block does not vary."""
        diagonal, sizes = self.matrix.diagonal(), torch.bincount(blocks)
        means = (torch.bincount(blocks, weights=diagonal) / sizes.clamp_min(1))[blocks]
        varies = means > 1e-15 * self.unit
        return torch.where(varies, self.unit / torch.where(varies, means, 1.0), 1.0).sqrt()

    def _by_scale(self, x: Float[Tensor, "features columns"]) -> Float[Tensor, "features columns"]:
        return x if self._scale is None else x * self._scale[:, None]

    @cached_property
    def eigen(self) -> tuple[Float[Tensor, " features"], Float[Tensor, "features features"]]:
        """E (ascending) and V with ``V diag(1 / (E + lam * unit)) V'`` the inverse that ``ridge`` applies."""
        values, vectors = torch.linalg.eigh(self._scaled)
        return values, self._by_scale(vectors)

    def is_clear(self, lam: float) -> bool:
        """Whether ``eigen`` gives at this λ what ``ridge`` gives, and ``ridge`` would not raise it.

        The least pivot of a matrix scaled to a unit diagonal is at least the ratio of its extreme eigenvalues.
        """
        values, _ = self.eigen
        least, most = float(values[0]) + lam * self.unit, float(values[-1]) + lam * self.unit
        # Where nothing varies the inverses would not be finite.
        return least > max(_CLEAR * len(values) * torch.finfo(torch.float64).eps * most, _LEAST)

    def ridge(
        self, right: Float[Tensor, "features columns"], lam: float
    ) -> tuple[Float[Tensor, "features columns"], float]:
        """Solve ``(gram + lam * unit * I) w = right`` by an equilibrated Cholesky factorisation.

        With blocks, each block's part of I is weighed by its own mean diagonal in place of unit. Scaling rows and
        columns to a unit diagonal changes the rounding, not the solution. Where the matrix is still not positive
        definite, or only by rounding, lam is raised tenfold until it is.

        Returns:
            The solution and the lam that was used: larger than the one asked for when it had to be raised.

        Raises:
            KvxferError: something is not finite, or the matrix stays indefinite at a lam 1e8 times the one asked for.
        """
        if not torch.isfinite(right.sum()):
            raise KvxferError(NOT_FINITE)
        right, diagonal = self._by_scale(right), self._scaled.diagonal()
        used = lam
        for _ in range(_TRIES):
            penalised = diagonal + used * self.unit
            scale = penalised.clamp_min(self.unit * 1e-15).rsqrt()
            factor = self._factorised(penalised, scale)
            if factor is not None:
                solution = right * scale[:, None]
                for triangle, upper in ((factor.T, False), (factor, True)):
                    torch.linalg.solve_triangular(triangle, solution, upper=upper, out=solution)
                if torch.isfinite(solution.sum()):
                    return self._by_scale(solution.mul_(scale[:, None])), used
            used = max(used, _EPSILON) * 10
        raise KvxferError(
            f"a Gram of {len(diagonal)} features stays indefinite at penalty.lam={used:.0e}: "
            "use more calibration rows (corpus.rows.fit) or fewer features (solver.k, features)"
        )

    @cached_property
    def _factor(self) -> Float[Tensor, "features features"]:
        """Where one factor after the other is computed."""
        return torch.empty_like(self._scaled)

    def _factorised(
        self, penalised: Float[Tensor, " features"], scale: Float[Tensor, " features"]
    ) -> Float[Tensor, "features features"] | None:
        """The upper Cholesky factor of the Gram with a diagonal, rows and columns scaled; None where it is singular.

        Below its diagonal the result holds anything, and the next call overwrites it. By panels of rows, what earlier
        panels explain is one product: twice as fast as LAPACK's own at 3,072 features, of which the corners are left.
        """
        factor, features = self._factor, len(scale)
        for top in range(0, features, _PANEL):
            end = min(top + _PANEL, features)
            rows = torch.mul(self._scaled[top:end, top:], scale[top:end, None], out=factor[top:end, top:])
            rows.mul_(scale[top:]).diagonal().copy_(penalised[top:end] * scale[top:end].square())
            if top:
                rows.addmm_(factor[:top, top:end].T, factor[:top, top:], alpha=-1)
            corner, info = torch.linalg.cholesky_ex(rows[:, : end - top], upper=True)
            # A pivot this small is what rounding leaves of a dependent column: its weight would be noise.
            if int(info) or not float(corner.diagonal().square().min()) > features * torch.finfo(torch.float64).eps:
                return None
            rows[:, : end - top] = corner
            if end < features:
                rows[:, end - top :] = torch.linalg.solve_triangular(corner.T, rows[:, end - top :], upper=False)
        return factor

    def ridge_per_column(
        self, right: Float[Tensor, "features columns"], lams: Float[Tensor, " columns"]
    ) -> Float[Tensor, "features columns"]:
        """Solve ``(gram + lams[j] * unit * I) w_j = right_j`` for every column j, by one eigendecomposition.

        Directions that the data do not span get no weight, however small their penalty.
        """
        if not torch.isfinite(right.sum()):
            raise KvxferError(NOT_FINITE)
        values, vectors = self.eigen
        values = values.clamp_min(0)
        floor = _EPSILON * float(values[-1]) + torch.finfo(torch.float64).tiny
        denominator = (values[:, None] + lams * self.unit).clamp_min(floor)
        kept = (values > floor)[:, None]
        return vectors @ torch.where(kept, (vectors.T @ right) / denominator, 0)


def half_product(
    matrix: Float[Tensor, "features features"], right: Float[Tensor, "features columns"]
) -> Float[Tensor, "features columns"]:
    """``T @ right`` with T + T' the symmetric matrix: half the work where only ``right' matrix right`` is wanted."""
    product = torch.empty(right.shape, dtype=right.dtype, device=right.device)
    for top in range(0, len(matrix), _PANEL):
        end = top + _PANEL
        own = torch.mm(matrix[top:end, top:end], right[top:end], out=product[top:end]).mul_(0.5)
        if end < len(matrix):
            own.addmm_(matrix[top:end, end:], right[end:])
    return product


def penalised(
    gram: Gram, right: Float[Tensor, "features columns"], setting: Setting, heads: list[int], metric: Metric | None
) -> tuple[Float[Tensor, "features columns"], float]:
    """The weight of one output's columns under a penalty's setting, and the λ that was used.

    With α above 0 the columns of each head are rotated into its metric's eigenbasis, solved there and rotated back.
    """
    if not setting.get("alpha"):
        return gram.ridge(right, setting["lam"])
    assert metric is not None
    values, vectors = metric.eigen
    rotation = torch.block_diag(*vectors[heads])
    lams = setting["lam"] / values[heads].flatten() ** setting["alpha"]
    return gram.ridge_per_column(right @ rotation, lams) @ rotation.T, setting["lam"]


def reduce(
    weight: Float[Tensor, "features columns"],
    gram: Float[Tensor, "features features"],
    rank: int,
    metric: Metric | None,
    heads: list[int],
) -> tuple[Float[Tensor, "features rank"], Float[Tensor, "rank columns"]]:
    """The best rank-r map that predicts what ``weight`` predicts, in the metric of the output (or plainly).

    With M the metric, V the first r eigenvectors of M^½ W'AW M^½: left = W M^½ V, right = V' M^-½.
    """
    root: Any = torch.eye(weight.shape[1], dtype=weight.dtype)
    inverse = root
    if metric is not None:
        root, inverse = (torch.block_diag(*part[heads]) for part in metric.roots)
    scaled = weight @ root
    _, vectors = torch.linalg.eigh(scaled.T @ gram @ scaled)
    kept = vectors[:, -rank:].flip(1)
    return scaled @ kept, kept.T @ inverse


NOT_FINITE = "the moments are not finite: calibrate again and look at the rows that calibration skipped"
