"""Running a map: a source's cache in content space becomes the target's, in content space."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Product:
    """Outputs that read the same blocks in the same form, as one batched matrix product."""

    blocks: tuple[Block, ...]
    outputs: list[Output]
    weight: Float[Tensor, "batches features inner"]
    right: Float[Tensor, "batches inner columns"] | None
    bias: Float[Tensor, "outputs width"]
    groups: int

    def run(self, content: KV) -> Float[Tensor, "batch tokens outputs width"]:
        """The content of every output."""
        parts = torch.stack([columns(content, block) for block in self.blocks], dim=2).to(self.weight)
        batch, tokens, blocks, width = parts.shape
        if self.groups == 1:
            x = parts.flatten(2).flatten(0, 1)[None]
        else:
            x = parts.unflatten(-1, (self.groups, width // self.groups)).permute(3, 0, 1, 2, 4)
            x = x.reshape(self.groups, batch * tokens, blocks * (width // self.groups))
        y = x @ self.weight
        if self.right is not None:
            # Each output has its own second factor.
            y = y.unflatten(-1, (len(self.outputs), -1)).transpose(1, 2)
            y = y @ self.right.unflatten(0, (self.groups, len(self.outputs)))
            y = y.transpose(1, 2)
        else:
            y = y.unflatten(-1, (len(self.outputs), -1))
        y = y.permute(1, 2, 0, 3).flatten(2)
        return (y + self.bias).view(batch, tokens, len(self.outputs), width)


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
        shared: dict[tuple[tuple[Block, ...], int, int], list[Output]] = {}
        for output, layer in cache_map.layers.items():
            shared.setdefault((layer.blocks, layer.groups, layer.weight.shape[-1]), []).append(output)
        self.products = []
        for (blocks, groups, _), outputs in shared.items():
            parts = [cache_map.layers[output] for output in outputs]
            weight = torch.cat([part.weight for part in parts], dim=2).to(device, dtype)
            bias = torch.stack([part.bias for part in parts]).to(device, dtype)
            rights = [part.right for part in parts if part.right is not None]
            # Group-major, so that a view gives [groups, outputs].
            right = torch.stack(rights, dim=1).flatten(0, 1).to(device, dtype) if rights else None
            self.products.append(_Product(blocks, outputs, weight, right, bias, groups))
        self.layers = 1 + max(layer for layer, _ in cache_map.layers)

    @torch.inference_mode()
    def map(self, content: KV) -> KV:
        """The target's content of every token of the source's content (both ``[batch, heads, tokens, dim]``)."""
        heads = content.keys[0].shape[1]
        mapped: dict[Output, Tensor] = {}
        for product in self.products:
            result = product.run(content)
            for n, output in enumerate(product.outputs):
                mapped[output] = result[:, :, n].unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()
        return KV(
            [mapped[layer, "keys"] for layer in range(self.layers)],
            [mapped[layer, "values"] for layer in range(self.layers)],
        )
