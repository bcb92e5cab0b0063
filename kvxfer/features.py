"""What a map may read at a token: a design is a list of named blocks of feature columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvxfer.errors import KvxferError

KINDS = ("keys", "values")


@dataclass(frozen=True, order=True)
class Block:
    """All heads of one source layer's keys or values, of this token (offset 0) or of an earlier one (offset -1)."""

    layer: int
    kind: str
    offset: int = 0

    @property
    def name(self) -> str:
        """The block's name in files: ``keys.3`` or ``values.3@-1``."""
        return f"{self.kind}.{self.layer}" + (f"@{self.offset}" if self.offset else "")

    @staticmethod
    def parse(name: str) -> Block:
        """The block of a name."""
        head, _, offset = name.partition("@")
        kind, _, layer = head.partition(".")
        if kind not in KINDS or not layer.isdigit():
            raise KvxferError(f"{name!r} is no block name (expected e.g. keys.3 or values.3@-1)")
        return Block(int(layer), kind, int(offset or 0))


@dataclass(frozen=True)
class Features:
    """Which blocks of its source layers a target layer reads.

    Args:
        name: the option's name.
        kinds: ``same`` (keys from keys, values from values: arXiv 2608.03893) or ``both`` (each from both).
        previous: how many earlier tokens are read too (0 or more).
    """

    name: str
    kinds: str = "same"
    previous: int = 0

    def __post_init__(self) -> None:
        if self.kinds not in ("same", "both"):
            raise KvxferError(f"features.kinds={self.kinds!r} is neither 'same' nor 'both'")
        if self.previous < 0:
            raise KvxferError(f"features.previous={self.previous} must be 0 or more earlier tokens")

    def blocks(self, kind: str, layers: Iterable[int]) -> tuple[Block, ...]:
        """The design of a target's keys or values over the given source layers, in column order."""
        kinds = KINDS if self.kinds == "both" else (kind,)
        return tuple(
            Block(layer, k, -back) for layer in sorted(layers) for k in kinds for back in range(self.previous + 1)
        )

    def covers(self, other: Features) -> bool:
        """Whether moments kept for this design also serve the other."""
        return (self.kinds == "both" or other.kinds == "same") and self.previous >= other.previous


DESIGNS = {
    "same": Features("same"),
    "both": Features("both", kinds="both"),
    "previous": Features("previous", kinds="both", previous=1),
}
