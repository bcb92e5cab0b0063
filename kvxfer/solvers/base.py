"""The one interface of every closed-form solver: moments in, a linear map out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kvxfer.features import Block
from kvxfer.moments import Moments, Output
from kvxfer.selection import Selection


@dataclass(frozen=True)
class Splits:
    """Moments of the three calibration splits: fit on the first, choose on the second, report on the third."""

    fit: Moments
    validation: Moments
    held_out: Moments


@dataclass(frozen=True)
class LinearLayer:
    """``x @ weight + bias``, float32, where x are the columns of ``blocks`` side by side."""

    blocks: tuple[Block, ...]
    weight: Float[Tensor, "features width"]
    bias: Float[Tensor, " width"]


@dataclass(frozen=True)
class Fit:
    """What a solver returns.

    Attributes:
        layers: the map, for every target layer and kind.
        selection: the chosen source layers and the scores behind the choice.
        diagnostics: one flat record per target layer and kind (λ, R², notes), for tables.
        curves: quality against each value that was chosen automatically.
    """

    layers: dict[Output, LinearLayer]
    selection: Selection
    diagnostics: list[dict[str, Any]]
    curves: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Solver(Protocol):
    """A fitting method. Its dataclass fields are its hyperparameters; penalty, rank and features are its dials."""

    name: str

    def steps(self, moments: Moments) -> int:
        """How often ``fit`` will call ``advance``."""
        ...

    def fit(self, splits: Splits, advance: Callable[[], None]) -> Fit:
        """Fit on ``splits.fit``, choose on ``splits.validation``, report R² on ``splits.held_out``."""
        ...
