"""Running a map: a source's cache in content space becomes the target's, in content space."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.extras import TargetTokens, block_columns, columns
from kvxfer.features import Block
from kvxfer.kv import KV, LayerTensors
from kvxfer.maps import CacheMap
from kvxfer.moments import Output
from kvxfer.trunks import ACTIVATIONS, Trunk

if TYPE_CHECKING:
    from kvxfer.pairs import Pair

__all__ = ["Mapper", "columns"]


Read = Callable[[Block], Float[Tensor, "batch tokens width"]]


@dataclass(frozen=True)
class _Product:
    """Outputs that read the same blocks in the same form, as one batched matrix product."""

    blocks: tuple[Block, ...]
    outputs: list[Output]
    weight: Float[Tensor, "groups features all_inner"]
    right: Float[Tensor, "groups_outputs inner columns"] | None
    bias: Float[Tensor, "outputs width"]
    groups: int

    def run(self, read: Read, shape: tuple[int, int]) -> Float[Tensor, "batch tokens outputs width"]:
        """The linear part of every output.

        Args:
            read: gives a block's columns.
            shape: rows and tokens.
        """
        parts = [read(block).to(self.weight) for block in self.blocks]
        if not parts:
            return self.bias.expand(*shape, *self.bias.shape)
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
        return (y + self.bias).view(*shape, len(self.outputs), -1)


@dataclass(frozen=True)
class _Trunks:
    """Trunks of one form over the same blocks: each layer of all of them is one batched matrix product.

    Attributes:
        outputs: of each trunk, those that read it; every trunk has as many.
        first: of the first hidden layers, side by side: they read the same columns.
        later: of the hidden layers after it.
        biases: of each hidden layer.
        readouts: of each trunk, those of its outputs side by side.
    """

    blocks: tuple[Block, ...]
    outputs: list[list[Output]]
    activation: str
    first: Float[Tensor, "inputs all_hidden"]
    later: list[Float[Tensor, "trunks _ _"]]
    biases: list[Float[Tensor, "trunks 1 _"]]
    readouts: Float[Tensor, "trunks hidden all_columns"]

    @staticmethod
    def of(trunks: list[Trunk], device: str | torch.device, dtype: torch.dtype) -> _Trunks:
        """Trunks of the same blocks, activation, hidden widths and number of readouts."""
        layers = list(zip(*(trunk.weights for trunk in trunks), strict=True))
        biases = zip(*(trunk.biases for trunk in trunks), strict=True)
        readouts = torch.stack([torch.cat(list(trunk.readouts.values()), dim=1) for trunk in trunks])
        return _Trunks(
            trunks[0].blocks,
            [list(trunk.readouts) for trunk in trunks],
            trunks[0].activation,
            torch.cat(layers[0], dim=1).to(device, dtype),
            [torch.stack(layer).to(device, dtype) for layer in layers[1:]],
            [torch.stack(bias)[:, None].to(device, dtype) for bias in biases],
            readouts.to(device, dtype),
        )

    def run(self, read: Read) -> Iterator[tuple[Output, Float[Tensor, "batch tokens width"]]]:
        """What every output that reads one of the trunks gets from it; ``read`` gives a block's columns."""
        x = torch.cat([read(block).to(self.first) for block in self.blocks], dim=-1)
        act = ACTIVATIONS[self.activation]
        count = len(self.outputs)
        h = (x.flatten(0, 1) @ self.first).unflatten(-1, (count, -1)).transpose(0, 1)
        h = act(h + self.biases[0])
        for weight, bias in zip(self.later, self.biases[1:], strict=True):
            h = act(h @ weight + bias)
        found = (h @ self.readouts).unflatten(-1, (len(self.outputs[0]), -1))
        for number, outputs in enumerate(self.outputs):
            for n, output in enumerate(outputs):
                yield output, found[number, :, n].unflatten(0, x.shape[:2])


class Mapper:
    """A map ready to run on a device: target layers that read the same blocks are one matrix product, and so are
    the layers of trunks that read the same blocks.

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
        self.pair, self.extras, self.dtype = pair, cache_map.extras, dtype
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
        self.trunks = [_Trunks.of(trunks, device, dtype) for trunks in _alike(cache_map.trunks)]
        self.layers = 1 + max(layer for layer, _ in cache_map.layers)
        self.lookback = max((-block.offset for block in cache_map.blocks), default=0)
        """How many tokens before a token the map reads."""

    @torch.inference_mode()
    def map(self, content: KV, ids: Int[Tensor, "batch tokens"] | None = None) -> KV:
        """The target's content of every token of the source's content (both ``[batch, heads, tokens, dim]``).

        Args:
            ids: the tokens themselves, needed by a map that reads what the target knows of them.
        """
        known = TargetTokens(None, None)
        if self.pair is not None and ids is not None:
            known = TargetTokens.of(self.pair, ids, self.extras)
        return self.content(content, known)

    def content(self, source: KV, known: TargetTokens) -> KV:
        """The same where what the target knows of the tokens has been computed already, and in the caller's mode.

        Within ``torch.no_grad()`` it gives tensors that a training step can go on with, which ``map``'s are not.
        """
        heads = source.keys[0].shape[1]
        found: dict[Block, Tensor] = {}

        def read(block: Block) -> Tensor:
            if block not in found:
                found[block] = block_columns(source, known, self.random, block)
            return found[block]

        mapped: dict[Output, Tensor] = {}
        for product in self.products:
            result = product.run(read, (source.batch, source.tokens))
            for n, output in enumerate(product.outputs):
                mapped[output] = result[:, :, n]
        for trunks in self.trunks:
            for output, part in trunks.run(read):
                mapped[output] = mapped[output] + part

        def of(kind: str) -> LayerTensors:
            columns = (mapped[layer, kind].unflatten(-1, (heads, -1)) for layer in range(self.layers))
            return [each.transpose(1, 2).contiguous() for each in columns]

        return KV(of("keys"), of("values"))


def _alike(trunks: tuple[Trunk, ...]) -> list[list[Trunk]]:
    """Trunks by what makes them one batched product."""
    groups: dict[Any, list[Trunk]] = {}
    for trunk in trunks:
        hidden = tuple(weight.shape[1] for weight in trunk.weights)
        groups.setdefault((trunk.blocks, hidden, trunk.activation, len(trunk.readouts)), []).append(trunk)
    return list(groups.values())
