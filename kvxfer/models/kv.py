"""The tensors of a KV cache, layer by layer, free of any library's cache class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LayerTensors = list[Float[Tensor, "batch heads tokens dim"]]


@dataclass(frozen=True)
class KV:
    """Keys and values of every layer, each ``[batch, kv_heads, tokens, head_dim]``.

    Keys are rotated (as a cache holds them) or in content space (as maps read and write them); the holder knows which.
    ``hidden`` is the model's final hidden state of every token, kept only where a map reads it beside the cache.
    """

    keys: LayerTensors
    values: LayerTensors
    hidden: Float[Tensor, "batch tokens hidden"] | None = None

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def tokens(self) -> int:
        return self.keys[0].shape[2]

    def apply(self, function: Callable[[Tensor], Tensor]) -> KV:
        """The same function of every tensor (the hidden state has no axis of heads)."""
        hidden = None if self.hidden is None else function(self.hidden)
        return KV([function(k) for k in self.keys], [function(v) for v in self.values], hidden)

    def span(self, start: int, stop: int) -> KV:
        """Tokens ``start`` to ``stop`` (a view)."""
        return self.apply(lambda x: x[..., start:stop, :])

    def starting_with(self, first: KV) -> KV:
        """The same tokens, those that ``first`` has taken from there."""
        return KV.join([first, self.span(first.tokens, self.tokens)])

    def rows(self, index: Tensor | slice) -> KV:
        return self.apply(lambda x: x[index])

    def zeros(self) -> KV:
        """A cache of the same shape that holds nothing."""
        return self.apply(torch.zeros_like)

    @staticmethod
    def join(parts: list[KV]) -> KV:
        """Caches of consecutive tokens, one after the other; hidden states only if every part has them."""
        parts = [part for part in parts if part.tokens]
        if len(parts) == 1:
            return parts[0]

        def joined(kind: str) -> LayerTensors:
            return [torch.cat(tensors, dim=2) for tensors in zip(*(getattr(p, kind) for p in parts), strict=True)]

        states = [part.hidden for part in parts if part.hidden is not None]
        hidden = torch.cat(states, dim=1) if len(states) == len(parts) else None
        return KV(joined("keys"), joined("values"), hidden)
