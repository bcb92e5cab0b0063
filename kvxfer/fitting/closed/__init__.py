"""Closed-form solvers, one per file, behind the interface of ``solver``."""

from kvxfer.fitting.closed.auto import CLOSED_FORMS, Auto
from kvxfer.fitting.closed.head_local import HeadLocal
from kvxfer.fitting.closed.ridge import Ridge
from kvxfer.fitting.closed.solver import Fit, Solver, Splits
from kvxfer.fitting.closed.weighted import Weighted

SOLVERS: dict[str, type[Solver]] = {**CLOSED_FORMS, "auto": Auto}

__all__ = ["SOLVERS", "Auto", "Fit", "HeadLocal", "Ridge", "Solver", "Splits", "Weighted"]
