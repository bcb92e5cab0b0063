"""Head-local ridge: each target head reads only the source heads of the same index (CacheBridge, arXiv 2609.00891)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvxfer.moments import Moments
from kvxfer.solvers.closed import ClosedForm, Part


@dataclass(frozen=True)
class HeadLocal(ClosedForm):
    """As many times smaller and cheaper than ridge as there are heads; the manifest's form says which it is."""

    name: str = "head_local"

    def parts(self, blocks: int, moments: Moments) -> list[Part]:
        """One solve per head, over that head's columns of every block."""
        layout = moments.layout
        columns = torch.arange(blocks * layout.width).view(blocks, layout.heads, layout.dim)
        return [
            Part(columns[:, head].flatten(), slice(head * layout.dim, (head + 1) * layout.dim), [head])
            for head in range(layout.heads)
        ]
