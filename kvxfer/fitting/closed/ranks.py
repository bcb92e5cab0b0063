"""What a map may span."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.moments.query_metric import Metric

Factors = tuple[Float[Tensor, "features rank"], Float[Tensor, "rank columns"]]

AUTO_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
AUTO_LOSS = 0.005
"""``rank.r=auto`` takes the smallest rank whose validation R² is within this of the full map's."""


@runtime_checkable
class Rank(Protocol):
    """A restriction of one output's weight."""

    @property
    def name(self) -> str:
        """The option's name."""
        ...

    @property
    def needs_metric(self) -> bool:
        """Whether ``reduce`` reads the output's metric."""
        ...

    def ranks(self, width: int) -> tuple[int, ...]:
        """The ranks to try for ``width`` output columns, ascending; none (or the width) for no restriction."""
        ...

    def to_dict(self) -> dict[str, object]:
        """For manifests."""
        ...


@dataclass(frozen=True)
class Full:
    """No restriction. ``r`` and ``metric`` are not read; they are there so that grids over both options compose."""

    r: int | float | str | None = None
    metric: str | None = None
    name: str = "full"
    needs_metric = False

    def ranks(self, width: int) -> tuple[int, ...]:
        """None to try."""
        return ()

    def to_dict(self) -> dict[str, object]:
        """For manifests."""
        return {"name": self.name}


@dataclass(frozen=True)
class Reduced:
    """Reduced-rank regression on the map's output (Izenman 1975), stored as two factors.

    Args:
        r: an integer, a fraction of the output width (below 1), or ``auto`` (smallest without loss on validation).
        metric: ``isotropic`` keeps the directions of most predicted variance, ``attention`` those that the output's
            metric weighs most.
    """

    r: int | float | str | None = "auto"
    metric: str = "isotropic"
    name: str = "reduced"

    def __post_init__(self) -> None:
        known = self.r == "auto" if isinstance(self.r, str) else self.r is not None and self.r > 0
        whole = isinstance(self.r, int) or (isinstance(self.r, float) and self.r < 1)
        if self.r == 1.0 and isinstance(self.r, float):
            raise KvxferError(
                "rank.r=1.0 is the whole output width: use rank=full instead, or rank.r=1 for one direction"
            )
        if not known or not (whole or self.r == "auto"):
            raise KvxferError(f"rank.r={self.r} must be an integer of 1 or more, a fraction below 1, or auto")
        if self.metric not in ("isotropic", "attention"):
            raise KvxferError(f"rank.metric={self.metric!r} is neither 'isotropic' nor 'attention'")

    @property
    def needs_metric(self) -> bool:
        """Whether the output's metric decides which directions are kept."""
        return self.metric == "attention"

    def ranks(self, width: int) -> tuple[int, ...]:
        """The ranks to try for ``width`` output columns; the automatic choice may end at the width itself."""
        if isinstance(self.r, str):
            return tuple(sorted({max(1, round(share * width)) for share in AUTO_SHARES}))
        rank = max(1, round(self.r * width)) if isinstance(self.r, float) else int(self.r or 0)
        if rank >= width:
            raise KvxferError(f"rank.r={self.r} must be below the {width} output columns: use rank=full instead")
        return (rank,)

    def to_dict(self) -> dict[str, object]:
        """For manifests."""
        return {"name": self.name, "r": self.r, "metric": self.metric}


def reduce(
    weight: Float[Tensor, "features columns"],
    gram: Float[Tensor, "features features"],
    rank: int,
    metric: Metric | None,
    heads: list[int],
) -> Factors:
    """The best rank-r map that predicts what ``weight`` predicts, in the metric of the output (or plainly).

    With M the metric, V the first r eigenvectors of M^½ W'AW M^½: left = W M^½ V, right = V' M^-½.
    """
    root: Any = torch.eye(weight.shape[1], dtype=weight.dtype)
    inverse = root
    if metric is not None:
        root, inverse = (torch.block_diag(*part[heads]) for part in metric.roots)
    scaled = weight @ root
    _, vectors = torch.linalg.eigh(scaled.T @ gram @ scaled)
    kept = vectors[:, -rank:].flip(1)
    return scaled @ kept, kept.T @ inverse


RANKS = {"full": Full, "reduced": Reduced}
