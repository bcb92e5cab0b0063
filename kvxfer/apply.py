"""Running a map: a source's cache in content space becomes the target's, in content space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.extras import TargetTokens, block_columns, columns
from kvxfer.features import Block
from kvxfer.kv import KV
from kvxfer.maps import CacheMap
from kvxfer.moments import Output

if TYPE_CHECKING:
    from kvxfer.pairs import Pair

__all__ = ["Mapper", "columns"]


@dataclass(frozen=True)
class _Product:
    """Outputs that read the same blocks in the same form, as one batched matrix product."""

    blocks: tuple[Block, ...]
    outputs: list[Output]
    weight: Float[Tensor, "groups features all_inner"]
    right: Float[Tensor, "groups_outputs inner columns"] | None
    bias: Float[Tensor, "outputs width"]
    groups: int

    def run(
        self, read: Callable[[Block], Float[Tensor, "batch tokens width"]]
    ) -> Float[Tensor, "batch tokens outputs width"]:
        """The content of every output; ``read`` gives a block's columns."""
        parts = [read(block).to(self.weight) for block in self.blocks]
        batch, tokens = parts[0].shape[:2]
        if self.groups == 1:
            x = torch.cat(parts, dim=-1).flatten(0, 1)[None]
        else:
            x = torch.stack(parts, dim=2).unflatten(-1, (self.groups, -1)).permute(3, 0, 1, 2, 4)
            x = x.flatten(1, 2).flatten(2)
        y = x @ self.weight
        if self.right is not None:
            # Each output has its own second factor.
            y = y.unflatten(-1, (len(self.outputs), -1)).transpose(1, 2)
            y = y @ self.right.unflatten(0, (self.groups, len(self.outputs)))
            y = y.transpose(1, 2)
        else:
            y = y.unflatten(-1, (len(self.outputs), -1))
        y = y.permute(1, 2, 0, 3).flatten(2)
        return (y + self.bias).view(batch, tokens, len(self.outputs), -1)


class Mapper:
    """A map ready to run on a device: target layers that read the same blocks are one matrix product.

    Args:
        cache_map: the map.
        device: where it runs.
        dtype: of the products.
        pair: needed by a map that reads what the target knows of a token.
    """

    def __init__(
        self,
        cache_map: CacheMap,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        pair: Pair | None = None,
    ) -> None:
        self.pair, self.extras = pair, cache_map.extras
        self.random = None if cache_map.random is None else cache_map.random.to(device)
        shared: dict[tuple[tuple[Block, ...], int, int, bool], list[Output]] = {}
        for output, layer in cache_map.layers.items():
            form = (layer.blocks, layer.groups, layer.weight.shape[-1], layer.right is None)
            shared.setdefault(form, []).append(output)
        self.products = []
        for (blocks, groups, *_), outputs in shared.items():
            parts = [cache_map.layers[output] for output in outputs]
            weight = torch.cat([part.weight for part in parts], dim=2).to(device, dtype)
            bias = torch.stack([part.bias for part in parts]).to(device, dtype)
            rights = [part.right for part in parts if part.right is not None]
            # Group-major, so that a view gives [groups, outputs].
            right = torch.stack(rights, dim=1).flatten(0, 1).to(device, dtype) if rights else None
            self.products.append(_Product(blocks, outputs, weight, right, bias, groups))
        self.layers = 1 + max(layer for layer, _ in cache_map.layers)
        self.lookback = max(-block.offset for product in self.products for block in product.blocks)
        """How many tokens before a token the map reads."""

    @torch.inference_mode()
    def map(self, content: KV, ids: Int[Tensor, "batch tokens"] | None = None) -> KV:
        """The target's content of every token of the source's content (both ``[batch, heads, tokens, dim]``).

        Args:
            ids: the tokens themselves, needed by a map that reads what the target knows of them.
        """
        heads = content.keys[0].shape[1]
        known = TargetTokens(None, None)
        if self.pair is not None and ids is not None:
            known = TargetTokens.of(self.pair, ids, self.extras)
        found: dict[Block, Tensor] = {}

        def read(block: Block) -> Tensor:
            if block not in found:
                found[block] = block_columns(content, known, self.random, block)
            return found[block]

        mapped: dict[Output, Tensor] = {}
        for product in self.products:
            result = product.run(read)
            for n, output in enumerate(product.outputs):
                mapped[output] = result[:, :, n].unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
        return KV(
            [mapped[layer, "keys"] for layer in range(self.layers)],
            [mapped[layer, "values"] for layer in range(self.layers)],
        )
