"""A cache as a map reads and writes it: views of what holds it, so that what holds it may be of any kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvxfer.models import rope
from kvxfer.models.kv import KV

Angles = Callable[
    [slice, slice], tuple[Float[Tensor, "#batch tokens 1 rotary"], Float[Tensor, "#batch tokens 1 rotary"]]
]
"""Of some rows and tokens, what ``rope.turn_into`` turns their keys by."""

Turn = tuple[Tensor, Tensor] | None
"""Such angles, or None in content space."""


@dataclass(frozen=True)
class Views:
    """Keys and values of every layer, as views.

    Attributes:
        keys, values: of every layer, in any dtype and layout.
        angles: what takes keys read to content space, or keys written out of it; None where they are in it.
        hidden: the model's final hidden states, where a map reads them.
    """

    keys: list[Float[Tensor, "batch tokens heads dim"]]
    values: list[Float[Tensor, "batch tokens heads dim"]]
    angles: Angles | None = None
    hidden: Float[Tensor, "batch tokens hidden"] | None = None

    @staticmethod
    def of(kv: KV, angles: Angles | None = None) -> Views:
        """Views of a cache ``[batch, heads, tokens, dim]``."""
        keys, values = ([x.transpose(1, 2) for x in layers] for layers in (kv.keys, kv.values))
        return Views(keys, values, angles, kv.hidden)

    def copy(self, kind: str, layer: int, rows: slice, tokens: slice, turn: Turn, out: Tensor) -> None:
        """Some tokens of a layer, in content space, into ``out`` (``[rows, tokens, heads, dim]``, any dtype)."""
        _copy(kind, getattr(self, kind)[layer][rows, tokens], turn, out)

    def put(self, kind: str, layer: int, rows: slice, tokens: slice, turn: Turn, x: Tensor) -> None:
        """Content of some tokens into a layer."""
        _copy(kind, x, turn, getattr(self, kind)[layer][rows, tokens])

    def turn(self, rows: slice, tokens: slice) -> Turn:
        """What turns some tokens' keys."""
        return None if self.angles is None else self.angles(rows, tokens)


def _copy(kind: str, x: Tensor, turn: Turn, out: Tensor) -> None:
    if turn is not None and kind == "keys":
        rope.turn_into(out, x, *turn)
    else:
        out.copy_(x)
