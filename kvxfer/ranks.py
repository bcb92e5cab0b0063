"""What a map may span."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Full:
    """No restriction: the weight is one dense matrix."""

    name: str = "full"

    def to_dict(self) -> dict[str, object]:
        """For manifests."""
        return {"name": self.name}


RANKS = {"full": Full}
