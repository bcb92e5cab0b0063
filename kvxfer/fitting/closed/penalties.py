"""How a map shrinks. λ is relative: 1 adds the mean diagonal of the centred Gram to every direction."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.moments.query_metric import Metric

LAM_GRID = tuple(10.0**power for power in range(-9, 1))
"""What ``penalty.lam=auto`` chooses from, on the validation split."""

ALPHA_GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What ``penalty.alpha=auto`` chooses from."""

Setting = dict[str, float]


@runtime_checkable
class Penalty(Protocol):
    """How a solve is penalised."""

    @property
    def name(self) -> str:
        """The option's name."""
        ...

    @property
    def per_block(self) -> bool:
        """Whether λ is relative to each block's own mean diagonal."""
        ...

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """The settings to try; the best on the validation split is kept."""
        ...

    @property
    def references(self) -> tuple[Setting, ...]:
        """Settings that are scored beside the candidates, for the report, and never chosen."""
        ...

    @property
    def narrows(self) -> bool:
        """Whether λ at an α above 0 is looked for only near the best λ of ridge."""
        ...

    @property
    def needs_metric(self) -> bool:
        """Whether ``solve`` reads the output's metric."""
        ...

    def solve(
        self, gram: Gram, right: Float[Tensor, "features columns"], setting: Setting, heads: list[int], metric: Any
    ) -> tuple[Float[Tensor, "features columns"], float]:
        """The weight of one output's columns under a setting, and the λ that was used."""
        ...

    def to_dict(self) -> dict[str, object]:
        """For manifests: the option, its values and the convention."""
        ...


def _lams(lam: float | str) -> tuple[float, ...]:
    known = lam == "auto" if isinstance(lam, str) else math.isfinite(lam) and lam >= 0
    if not known:
        raise KvxferError(f"penalty.lam={lam} must be a number of 0 or more, or auto")
    return LAM_GRID if isinstance(lam, str) else (float(lam),)


def _convention(per_block: bool) -> dict[str, object]:
    """What λ is relative to, for manifests; the key is there only where it is not the default."""
    if per_block:
        return {"convention": "relative to the mean diagonal of each block of the centred Gram", "per_block": True}
    return {"convention": "relative to the mean diagonal of the centred Gram"}


@dataclass(frozen=True)
class Isotropic:
    """Ridge: the same penalty in every direction.

    Args:
        lam: λ relative to the mean diagonal of the centred Gram (so 0.001 is a thousandth of a feature's mean
            variance), or ``auto``: chosen for every target layer and kind on the validation split.
        alpha: not read; it is there so that grids over both penalties compose.
        per_block: λ is relative to the mean diagonal of each block's own part of the Gram, as if all blocks had been
            brought to the same mean variance first.
    """

    lam: float | str = "auto"
    alpha: float | str | None = None
    per_block: bool = False
    name: str = "isotropic"
    needs_metric = False
    narrows = False

    def __post_init__(self) -> None:
        _lams(self.lam)

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """Every λ to try."""
        return tuple({"lam": lam} for lam in _lams(self.lam))

    @property
    def references(self) -> tuple[Setting, ...]:
        """Nothing to compare with."""
        return ()

    def solve(
        self, gram: Gram, right: Float[Tensor, "features columns"], setting: Setting, heads: list[int], metric: Any
    ) -> tuple[Float[Tensor, "features columns"], float]:
        """One Cholesky factorisation for all columns."""
        return gram.ridge(right, setting["lam"])

    def to_dict(self) -> dict[str, object]:
        """For manifests: the option, its value and the convention."""
        return {"name": self.name, "lam": self.lam, **_convention(self.per_block)}


@dataclass(frozen=True)
class Attention:
    """A penalty that is light where the target's attention looks: λ / Λⱼ^α in the eigenbasis of the output's metric.

    Minimises the sum of squared errors plus the penalty; α = 0 is ridge exactly. Λ has mean 1 per head.

    Args:
        lam: as for ridge.
        alpha: 0 to 1, or ``auto``.
        per_block: as for ridge.
    """

    lam: float | str = "auto"
    alpha: float | str | None = "auto"
    per_block: bool = False
    name: str = "attention"
    needs_metric = True

    def __post_init__(self) -> None:
        _lams(self.lam)
        number = not isinstance(self.alpha, str | None) and 0 <= self.alpha <= 1
        if self.alpha != "auto" and not number:
            raise KvxferError(f"penalty.alpha={self.alpha} must be a number from 0 to 1, or auto")

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """Every λ with every α, ridge first; equal scores favour the smaller α."""
        alphas = ALPHA_GRID if isinstance(self.alpha, str) else (float(self.alpha or 0.0),)
        return tuple({"lam": lam, "alpha": alpha} for alpha, lam in itertools.product(alphas, _lams(self.lam)))

    @property
    def narrows(self) -> bool:
        """Where both are chosen: a full grid of both would cost five times as much for the same choice."""
        return isinstance(self.lam, str) and isinstance(self.alpha, str)

    @property
    def references(self) -> tuple[Setting, ...]:
        """Ridge at every λ, which a fixed α is compared with."""
        return () if isinstance(self.alpha, str) else tuple({"lam": lam, "alpha": 0.0} for lam in _lams(self.lam))

    def solve(
        self, gram: Gram, right: Float[Tensor, "features columns"], setting: Setting, heads: list[int], metric: Metric
    ) -> tuple[Float[Tensor, "features columns"], float]:
        """Rotate the columns of each head into its metric's eigenbasis, solve, rotate back."""
        if setting["alpha"] == 0:
            return gram.ridge(right, setting["lam"])
        values, vectors = metric.eigen
        dim = values.shape[-1]
        rotation = torch.block_diag(*vectors[heads])
        lams = setting["lam"] / values[heads].flatten() ** setting["alpha"]
        if right.shape[1] != len(heads) * dim:
            raise KvxferError(f"a metric of {len(heads)} heads of {dim} does not fit {right.shape[1]} output columns")
        return gram.ridge_per_column(right @ rotation, lams) @ rotation.T, setting["lam"]

    def to_dict(self) -> dict[str, object]:
        """For manifests: the option, its values and the convention."""
        return {"name": self.name, "lam": self.lam, "alpha": self.alpha, **_convention(self.per_block)}


PENALTIES = {"isotropic": Isotropic, "attention": Attention}
