"""Head-local ridge: each target head reads only the source heads of the same index (CacheBridge, arXiv 2609.00891)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.closed_form import ClosedForm
from kvxfer.fitting.closed.solver import Subproblem
from kvxfer.maps.blocks import Block
from kvxfer.moments.layout import Layout


@dataclass(frozen=True)
class HeadLocal(ClosedForm):
    """As many times smaller and cheaper than ridge as there are heads; the manifest's form says which it is."""

    name: str = "head_local"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features.extras:
            raise KvxferError(
                f"solver=head_local reads source heads only, but features={self.features.name} has "
                f"{self.features.extras[0].kind}: use solver=ridge"
            )

    def rank_width(self, width: int, heads: int) -> int:
        """A rank is that of one head's map."""
        return width // heads

    def parts(self, blocks: tuple[Block, ...], layout: Layout) -> list[Subproblem]:
        columns = torch.arange(len(blocks) * layout.width).view(len(blocks), layout.heads, layout.dim)
        return [
            Subproblem(columns[:, head].flatten(), slice(head * layout.dim, (head + 1) * layout.dim), [head])
            for head in range(layout.heads)
        ]
