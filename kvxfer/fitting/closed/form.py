"""What a closed form is before anything is solved: its hyperparameters, and the independent solves that make it up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.judges import CRITERIA
from kvxfer.fitting.closed.penalties import LAM_GRID, Isotropic, Penalty
from kvxfer.fitting.closed.ranks import Full, Rank
from kvxfer.fitting.closed.selection import METHODS
from kvxfer.fitting.closed.solver import Splits
from kvxfer.maps.blocks import DESIGNS, Block, Features, Output
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments

_OPTIONS = {
    "method": METHODS,
    "selection": ("shared", "separate"),
    "criterion": CRITERIA,
    "k_per": ("pair", "layer"),
}


@dataclass(frozen=True)
class Dials:
    """The hyperparameters that all solvers from moments share.

    Args:
        k: how many source layers feed a target layer, or ``auto``: the k in 1, 2, 4, 8, ... whose maps score best on
            the validation split.
        k_per: whether ``auto`` is one k for the ``pair``, or one for every target ``layer`` (and kind, if they are
            selected separately).
        method: ``topk`` (the best single layers), ``greedy`` (forward selection) or ``all``.
        selection: ``shared`` (keys and values read the same layers) or ``separate``.
        selection_lam: λ of the fits that rank source layers, or ``auto``: every target layer has each source layer at
            its own best λ of ``LAM_GRID`` on the validation split.
        criterion: what selection and automatic choices maximise: ``r2``, ``query`` (R² in the output's metric) or
            ``attention`` (what is right of the attention's output on the probe).
        pool: how many of the best single layers greedy selection considers.
        features: the design.
        penalty: how the map shrinks.
        rank: what the map may span.
    """

    k: int | float | str
    method: str = "topk"
    selection: str = "shared"
    selection_lam: float | str = 1e-3
    criterion: str = "r2"
    pool: int = 6
    k_per: str = "pair"
    features: Features = DESIGNS["same"]
    penalty: Penalty = field(default_factory=Isotropic)
    rank: Rank = field(default_factory=Full)

    def __post_init__(self) -> None:
        k = self.k
        if k != "auto" if isinstance(k, str) else not (math.isfinite(k) and k == int(k) and k >= 1):
            raise KvxferError(f"solver.k={self.k} must be 1 or more source layers (a whole number), or auto")
        for key, options in _OPTIONS.items():
            if getattr(self, key) not in options:
                raise KvxferError(f"solver.{key}={getattr(self, key)!r} is none of {', '.join(options)}")
        lam = self.selection_lam
        if lam != "auto" if isinstance(lam, str) else not 0 <= lam < math.inf:
            raise KvxferError(f"solver.selection_lam={lam} must be a number of 0 or more, or auto")
        if self.pool < 1:
            raise KvxferError(f"solver.pool={self.pool} must be 1 or more source layers")

    @property
    def needs_metrics(self) -> bool:
        """Whether penalty, rank or criterion read the outputs' metrics."""
        return self.penalty.needs_metric or self.rank.needs_metric or self.criterion == "query"

    @property
    def selection_lams(self) -> tuple[float, ...]:
        """Every λ at which source layers are scored."""
        return LAM_GRID if isinstance(self.selection_lam, str) else (float(self.selection_lam),)

    @property
    def needs_probe(self) -> bool:
        """Whether the criterion is measured on the probe."""
        return self.criterion == "attention"

    @property
    def needs_weights(self) -> bool:
        """Whether the solver reads ``splits.weighted``."""
        return False

    def rank_width(self, width: int, heads: int) -> int:
        """The columns that a rank must stay below: of an output of so many columns and heads, or of what is solved."""
        return width


@dataclass(frozen=True)
class Subproblem:
    """One independent solve: feature columns of a design, and the columns and heads of an output that they give."""

    features: Tensor
    columns: slice
    heads: list[int]


@dataclass(frozen=True)
class Form(Dials, ABC):
    """One closed form: which solves make it up, from which moments."""

    name: str = "closed"

    @abstractmethod
    def parts(self, blocks: tuple[Block, ...], layout: Layout) -> list[Subproblem]:
        """The independent solves that make up one output from a design."""

    def moments(self, splits: Splits, split: str, outputs: list[Output]) -> Moments:
        """The moments that outputs are fitted, chosen or reported on; source layers are ranked by the plain ones."""
        return splits.moments(split, outputs)

    def apart(self, outputs: list[Output]) -> list[list[Output]]:
        """The outputs of one design in groups that may share a solve."""
        return [outputs]

    def notes(self, splits: Splits, outputs: list[Output], features: int) -> dict[str, Any]:
        """What else a record says of outputs that were solved together from so many features."""
        return {}
