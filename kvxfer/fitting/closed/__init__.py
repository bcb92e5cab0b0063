"""Closed-form solvers, one per file, behind the interface of ``base``."""

from kvxfer.fitting.closed.auto import Auto
from kvxfer.fitting.closed.head_local import HeadLocal
from kvxfer.fitting.closed.ridge import Ridge
from kvxfer.fitting.closed.solver import Fit, LinearLayer, Solver, Splits
from kvxfer.fitting.closed.weighted import Weighted

SOLVERS = {"ridge": Ridge, "head_local": HeadLocal, "weighted": Weighted, "auto": Auto}

__all__ = ["SOLVERS", "Auto", "Fit", "HeadLocal", "LinearLayer", "Ridge", "Solver", "Splits", "Weighted"]
