"""The table that puts every solver through one suite (``tests/solvers/test_matrix.py``). A new solver is one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kvxfer.features import Features
from kvxfer.penalties import Isotropic
from kvxfer.solvers import Ridge, Solver
from tests.samples import reference_ridge


@dataclass(frozen=True)
class Case:
    """How the suite makes a solver, and what it may expect.

    Attributes:
        build: a solver of a design, λ (a number or ``auto``), k and the selection's mode.
        reference: float64 weight and bias from raw rows and λ, where the solver has a plain answer; else None.
        tolerance: how far the map may lie from the reference, relative to its largest number.
        automatic: whether λ may be ``auto``, chosen on the validation split.
    """

    build: Callable[[Features, float | str, int, str], Solver]
    reference: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    tolerance: float = 1e-6
    automatic: bool = True


def _ridge(features: Features, lam: float | str, k: int, selection: str) -> Solver:
    return Ridge(k=k, selection=selection, features=features, penalty=Isotropic(lam))


SOLVER_MATRIX = {"ridge": Case(_ridge, reference_ridge)}
