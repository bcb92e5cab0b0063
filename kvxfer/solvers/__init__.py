"""Closed-form solvers, one per file, behind the interface of ``base``."""

from kvxfer.solvers.base import Fit, LinearLayer, Solver, Splits
from kvxfer.solvers.ridge import Ridge

SOLVERS = {"ridge": Ridge}

__all__ = ["SOLVERS", "Fit", "LinearLayer", "Ridge", "Solver", "Splits"]
