"""Running a map: a source's cache in content space becomes the target's, in content space."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.features import Block
from kvxfer.kv import KV
from kvxfer.maps import CacheMap
from kvxfer.moments import Output


def columns(content: KV, block: Block) -> Float[Tensor, "batch tokens width"]:
    """A block's feature columns: all heads side by side.

    A token that has no predecessor at the block's offset reads zeros there.
    """
    tensor = getattr(content, block.kind)[block.layer].transpose(1, 2).flatten(2)
    if not block.offset:
        return tensor
    shifted = torch.zeros_like(tensor)
    shifted[:, -block.offset :] = tensor[:, : block.offset]
    return shifted


class Mapper:
    """A map ready to run on a device: target layers that read the same blocks are one matrix product.

    Args:
        cache_map: the map.
        device: where it runs.
        dtype: of the products.
    """

    def __init__(
        self, cache_map: CacheMap, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        shared: dict[tuple[Block, ...], list[Output]] = {}
        for output, layer in cache_map.layers.items():
            shared.setdefault(layer.blocks, []).append(output)
        self.groups = []
        for blocks, outputs in shared.items():
            parts = [cache_map.layers[output] for output in outputs]
            weight = torch.cat([part.weight for part in parts], dim=1).to(device, dtype)
            bias = torch.cat([part.bias for part in parts]).to(device, dtype)
            self.groups.append((blocks, outputs, weight, bias))
        self.layers = 1 + max(layer for layer, _ in cache_map.layers)

    @torch.inference_mode()
    def map(self, content: KV) -> KV:
        """The target's content of every token of the source's content (both ``[batch, heads, tokens, dim]``)."""
        heads, dim = content.keys[0].shape[1], content.keys[0].shape[3]
        mapped: dict[Output, Tensor] = {}
        for blocks, outputs, weight, bias in self.groups:
            design = torch.cat([columns(content, block) for block in blocks], dim=-1).to(weight)
            parts = (design @ weight + bias).unflatten(-1, (len(outputs), heads, dim))
            for n, output in enumerate(outputs):
                mapped[output] = parts[:, :, n].transpose(1, 2).contiguous()
        return KV(
            [mapped[layer, "keys"] for layer in range(self.layers)],
            [mapped[layer, "values"] for layer in range(self.layers)],
        )
