"""Positive definite solves that do not fail in silence."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError

_TRIES = 9
_EPSILON = 1e-13


class Gram:
    """A centred Gram to solve with: by Cholesky for one λ, by one eigendecomposition where every column has its own.

    Args:
        matrix: float64, symmetric.
    """

    def __init__(self, matrix: Float[Tensor, "features features"]) -> None:
        if not torch.isfinite(matrix).all():
            raise KvxferError(_NOT_FINITE)
        self.matrix = matrix

    @cached_property
    def unit(self) -> float:
        """The mean of the diagonal: what a λ of 1 adds to every direction."""
        return float(self.matrix.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))

    @cached_property
    def _eigen(self) -> tuple[Float[Tensor, " features"], Float[Tensor, "features features"]]:
        values, vectors = torch.linalg.eigh(self.matrix)
        return values.clamp_min(0), vectors

    def ridge(
        self, right: Float[Tensor, "features columns"], lam: float
    ) -> tuple[Float[Tensor, "features columns"], float]:
        """Solve ``(gram + lam * unit * I) w = right`` by an equilibrated Cholesky factorisation.

        Scaling rows and columns to a unit diagonal changes the rounding, not the solution. Where the matrix is still
        not positive definite, or only by rounding, lam is raised tenfold until it is.

        Returns:
            The solution and the lam that was used: larger than the one asked for when it had to be raised.

        Raises:
            KvxferError: something is not finite, or the matrix stays indefinite at a lam 1e8 times the one asked for.
        """
        if not torch.isfinite(right).all():
            raise KvxferError(_NOT_FINITE)
        diagonal = self.matrix.diagonal()
        used = lam
        for _ in range(_TRIES):
            penalised = diagonal + used * self.unit
            scale = penalised.clamp_min(self.unit * 1e-15).rsqrt()
            scaled = self.matrix * scale[:, None] * scale
            scaled.diagonal().copy_(penalised * scale * scale)
            factor, info = torch.linalg.cholesky_ex(scaled)
            # A pivot this small is what rounding leaves of a dependent column: its weight would be noise.
            pivots = factor.diagonal().square()
            if not int(info) and float(pivots.min()) > len(self.matrix) * torch.finfo(torch.float64).eps:
                solution = torch.cholesky_solve(right * scale[:, None], factor) * scale[:, None]
                if torch.isfinite(solution).all():
                    return solution, used
            used = max(used, _EPSILON) * 10
        raise KvxferError(
            f"a Gram of {len(self.matrix)} features stays indefinite at penalty.lam={used:.0e}: "
            "use more calibration rows (corpus.rows.fit) or fewer features (solver.k, features)"
        )

    def ridge_per_column(
        self, right: Float[Tensor, "features columns"], lams: Float[Tensor, " columns"]
    ) -> Float[Tensor, "features columns"]:
        """Solve ``(gram + lams[j] * unit * I) w_j = right_j`` for every column j, by one eigendecomposition.

        Directions that the data do not span get no weight, however small their penalty.
        """
        if not torch.isfinite(right).all():
            raise KvxferError(_NOT_FINITE)
        values, vectors = self._eigen
        floor = _EPSILON * float(values[-1]) + torch.finfo(torch.float64).tiny
        denominator = (values[:, None] + lams * self.unit).clamp_min(floor)
        kept = (values > floor)[:, None]
        return vectors @ torch.where(kept, (vectors.T @ right) / denominator, 0)


_NOT_FINITE = "the moments are not finite: calibrate again and look at the rows that calibration skipped"
