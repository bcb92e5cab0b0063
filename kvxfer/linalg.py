"""Positive definite solves that do not fail in silence."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError

_TRIES = 9


def solve_ridge(
    gram: Float[Tensor, "features features"], right: Float[Tensor, "features columns"], lam: float
) -> tuple[Float[Tensor, "features columns"], float]:
    """Solve ``(gram + lam * mean(diag(gram)) * I) w = right`` by an equilibrated Cholesky factorisation in float64.

    Scaling rows and columns to a unit diagonal changes the rounding, not the solution. Where the matrix is still not
    positive definite, or only by rounding, lam is raised tenfold until it is.

    Returns:
        The solution and the lam that was used: larger than the one asked for when it had to be raised.

    Raises:
        KvxferError: the Gram is not finite, or stays indefinite at a lam 1e8 times the one asked for.
    """
    if not torch.isfinite(gram).all() or not torch.isfinite(right).all():
        raise KvxferError("the moments are not finite: calibrate again and look at the rows that calibration skipped")
    diagonal = gram.diagonal()
    unit = float(diagonal.mean().clamp_min(torch.finfo(torch.float64).tiny))
    used = lam
    for _ in range(_TRIES):
        penalised = diagonal + used * unit
        scale = penalised.clamp_min(unit * 1e-15).rsqrt()
        scaled = gram * scale[:, None] * scale
        scaled.diagonal().copy_(penalised * scale * scale)
        factor, info = torch.linalg.cholesky_ex(scaled)
        # A pivot this small is what rounding leaves of a dependent column: its weight would be noise.
        pivots = factor.diagonal().square()
        if not int(info) and float(pivots.min()) > len(gram) * torch.finfo(torch.float64).eps:
            solution = torch.cholesky_solve(right * scale[:, None], factor) * scale[:, None]
            if torch.isfinite(solution).all():
                return solution, used
        used = max(used, 1e-13) * 10
    raise KvxferError(
        f"a Gram of {len(gram)} features stays indefinite at penalty.lam={used:.0e}: "
        "use more calibration rows (corpus.rows.fit) or fewer features (solver.k, features)"
    )
