"""How a map shrinks. λ is relative: 1 adds the mean diagonal of the centred Gram to every direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvxfer.errors import KvxferError

LAM_GRID = tuple(10.0**power for power in range(-9, 1))
"""What ``penalty.lam=auto`` chooses from, on the validation split."""


@dataclass(frozen=True)
class Isotropic:
    """Ridge: the same penalty in every direction.

    Args:
        lam: λ relative to the mean diagonal of the centred Gram (so 0.001 is a thousandth of a feature's mean
            variance), or ``auto``: chosen for every target layer and kind on the validation split.
    """

    lam: float | str = "auto"
    name: str = "isotropic"

    def __post_init__(self) -> None:
        known = self.lam == "auto" if isinstance(self.lam, str) else math.isfinite(self.lam) and self.lam >= 0
        if not known:
            raise KvxferError(f"penalty.lam={self.lam} must be a number of 0 or more, or auto")

    @property
    def candidates(self) -> tuple[float, ...]:
        """The λ to try."""
        return LAM_GRID if isinstance(self.lam, str) else (float(self.lam),)

    def to_dict(self) -> dict[str, object]:
        """For manifests: the option, its value and the convention."""
        return {"name": self.name, "lam": self.lam, "convention": "relative to the mean diagonal of the centred Gram"}


PENALTIES = {"isotropic": Isotropic}
