"""Which positions and tokens have outlier norms: attention sinks carry no content and would rule a regression."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvxfer.models.kv import KV

RATIO = 3.0
"""A norm this many times the row's median, or this many times below it, is an outlier."""

POSITIONS = 32
SHARE, OCCURRENCES = 0.5, 8


class SinkCounter:
    """Counts outliers of one model's cache by position and by token; norms do not change under rotation.

    A token is an outlier if its key or value norm is one, in any layer, against the median of its own row. All
    attributes are tensors, and are the state.
    """

    def __init__(self, vocabulary: int) -> None:
        self.by_position = torch.zeros(2, POSITIONS, dtype=torch.int64)
        self.by_token = torch.zeros(2, vocabulary, dtype=torch.int64)
        self.ratio = torch.zeros(POSITIONS, dtype=torch.float64)

    def update(self, kv: KV, ids: Tensor) -> None:
        """Add rows: a cache and its token ids ``[rows, tokens]``."""
        if not len(ids):
            return
        worst = torch.ones(ids.shape, device=kv.keys[0].device)
        for tensor in (*kv.keys, *kv.values):
            norms = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).mean(1)
            ratio = norms / norms.median(dim=1, keepdim=True).values.clamp_min(1e-12)
            worst = torch.maximum(worst, torch.maximum(ratio, 1 / ratio.clamp_min(1e-12)))
        worst, ids = worst.cpu(), ids.cpu()
        outlier = worst > RATIO
        seen = min(POSITIONS, ids.shape[1])
        self.by_position[0, :seen] += outlier[:, :seen].sum(0)
        self.by_position[1, :seen] += len(ids)
        self.ratio[:seen] = torch.maximum(self.ratio[:seen], worst[:, :seen].double().amax(0))
        # The first position is a sink whatever stands there: it would mark its token.
        later, flags = ids[:, 1:].flatten(), outlier[:, 1:].flatten()
        size = self.by_token.shape[1]
        self.by_token[0] += torch.bincount(later[flags], minlength=size)
        self.by_token[1] += torch.bincount(later, minlength=size)

    def report(self, tokenizer: Any) -> dict[str, Any]:
        """Positions, and tokens after the first position, that are outliers at least half of the time."""
        rows = self.by_position[1].clamp_min(1)
        positions = [
            {"position": p, "share": float(self.by_position[0, p] / rows[p]), "largest_ratio": float(self.ratio[p])}
            for p in range(POSITIONS)
            if self.by_position[1, p] and self.by_position[0, p] >= SHARE * rows[p]
        ]
        outliers, seen = self.by_token
        often = torch.nonzero((seen >= OCCURRENCES) & (outliers >= SHARE * seen)).flatten().tolist()
        tokens = [{"token": tokenizer.decode([t]), "id": t, "share": float(outliers[t] / seen[t])} for t in often]
        return {
            "rule": f"norm {RATIO:g} times the row's median or its inverse",
            "positions": positions,
            "tokens": tokens,
        }
