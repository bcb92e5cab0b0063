"""The one interface of every closed-form solver: moments in, a linear map out; and what makes up one closed form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvxfer.fitting.closed.selection import Selection
from kvxfer.fitting.dials import Dials
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.probe import Probe
from kvxfer.moments.query_metric import Metrics


@dataclass(frozen=True)
class Splits:
    """Moments of the three calibration splits: fit on the first, choose on the second, report on the third.

    ``weighted`` gives those of a split whose tokens are weighed by a target layer's attention, ``divergence`` the
    next-token KL of a map's layers in nats per token, where the models are at hand.
    """

    fit: Moments
    validation: Moments
    held_out: Moments
    metrics: Metrics | None = None
    probe: Probe | None = None
    weighted: Callable[[str, int], Moments] | None = None
    divergence: Callable[[dict[Output, LinearLayer]], float] | None = None

    def moments(self, split: str, outputs: list[Output]) -> Moments:
        """The moments that some outputs are fitted, chosen or reported on, without weights."""
        return getattr(self, split)


@dataclass(frozen=True)
class Fit:
    """What a solver returns.

    Attributes:
        layers: the map, for every target layer and kind.
        selection: the chosen source layers and the scores behind the choice.
        diagnostics: one flat record per target layer and kind (λ, R², notes), for tables.
        curves: quality against each value that was chosen automatically.
        candidates: what each of several solvers scored, or why it was left out, if there was a choice.
    """

    layers: dict[Output, LinearLayer]
    selection: Selection
    diagnostics: list[dict[str, Any]]
    curves: dict[str, Any] = field(default_factory=dict)
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Solver(Dials, ABC):
    """A fitting method."""

    name: str = ""

    @abstractmethod
    def steps(self, moments: Moments) -> int:
        """How often ``fit`` will call ``advance``."""

    @abstractmethod
    def fit(self, splits: Splits, advance: Callable[[], None] = lambda: None) -> Fit:
        """Fit on ``splits.fit``, choose on ``splits.validation``, report R² on ``splits.held_out``."""


@dataclass(frozen=True)
class Subproblem:
    """One independent solve: feature columns of a design, and the columns and heads of an output that they give."""

    features: Tensor
    columns: slice
    heads: list[int]


@dataclass(frozen=True)
class Form(Solver):
    """One closed form: which solves make it up, from which moments."""

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
