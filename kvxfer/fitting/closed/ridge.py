"""Ridge: per target layer and kind, one multi-output solve over all heads of its k source layers.

The form of arXiv 2608.03893: all heads of a target layer share their inputs, so its per-head ridges are one solve.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvxfer.fitting.closed.closed_form import ClosedForm
from kvxfer.fitting.closed.solver import Subproblem
from kvxfer.maps.blocks import Block
from kvxfer.moments.layout import Layout


@dataclass(frozen=True)
class Ridge(ClosedForm):
    """Every target head reads all heads of the chosen source layers."""

    name: str = "ridge"

    def parts(self, blocks: tuple[Block, ...], layout: Layout) -> list[Subproblem]:
        return [Subproblem(torch.arange(layout.width_of(blocks)), slice(0, layout.width), list(range(layout.heads)))]
