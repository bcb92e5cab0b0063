"""What a model's cache looks like: the numbers that decide whether two models can form a pair."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rotary:
    """How keys are rotated. ``scaling`` multiplies cos and sin (YaRN); ``dim`` is the part of the head that turns."""

    type: str
    theta: float
    dim: int
    scaling: float = 1.0
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Geometry:
    """A decoder's shape. ``attention`` names the layout of each layer; ``window`` is the shortest sliding window."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    rotary: Rotary
    attention: tuple[str, ...]
    window: int | None
    max_positions: int
    body_parameters: int

    @property
    def kv_width(self) -> int:
        """Columns of one layer's keys (or values): heads times head size."""
        return self.kv_heads * self.head_dim

    def prefill_flops(self, tokens: int) -> float:
        """FLOPs per token of a prefill of ``tokens`` tokens: 2 per matrix weight, plus causal attention's two products.

        The vocabulary projection is left out: a prefill that only fills a cache does not need it.
        """
        attention = 2 * 2 * self.layers * self.heads * self.head_dim * (tokens + 1) / 2
        return 2.0 * self.body_parameters + attention

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "attention": list(self.attention)}
