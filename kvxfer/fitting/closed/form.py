"""What a closed form is before anything is solved: the independent solves that make it up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvxfer.fitting.closed.solver import Splits
from kvxfer.fitting.dials import Dials
from kvxfer.maps.blocks import Block, Output
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments


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
