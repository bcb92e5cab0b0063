"""Closed-form solvers, one per file, behind the interface of ``base``."""

from kvxfer.solvers.auto import Auto
from kvxfer.solvers.base import Fit, LinearLayer, Solver, Splits
from kvxfer.solvers.head_local import HeadLocal
from kvxfer.solvers.ridge import Ridge
from kvxfer.solvers.weighted import Weighted

SOLVERS = {"ridge": Ridge, "head_local": HeadLocal, "weighted": Weighted, "auto": Auto}

__all__ = ["SOLVERS", "Auto", "Fit", "HeadLocal", "LinearLayer", "Ridge", "Solver", "Splits", "Weighted"]
