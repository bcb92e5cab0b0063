"""Running a map: a source's cache in content space becomes the target's, in content space."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.columns import TargetTokens, block_columns
from kvxfer.maps.trunks import ACTIVATIONS, Trunk
from kvxfer.models.kv import KV

if TYPE_CHECKING:
    from kvxfer.models.pair import Pair


@dataclass(frozen=True)
class _Product:
    """Outputs that read the same blocks in the same form, as one batched matrix product."""

    blocks: tuple[Block, ...]
    outputs: list[Output]
    weight: Float[Tensor, "groups features all_inner"]
    right: Float[Tensor, "groups_outputs inner columns"] | None
    bias: Float[Tensor, "outputs width"]
    groups: int

    def run(self, x: Float[Tensor, "groups rows features"]) -> Float[Tensor, "groups rows outputs columns"]:
        """The linear part of every output, without its bias."""
        y = x @ self.weight
        if self.right is None:
            return y.unflatten(-1, (len(self.outputs), -1))
        # Each output has its own second factor.
        y = y.unflatten(-1, (len(self.outputs), -1)).transpose(1, 2)
        return (y @ self.right.unflatten(0, (self.groups, len(self.outputs)))).transpose(1, 2)


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

    def run(self, x: Float[Tensor, "1 rows inputs"]) -> Iterator[tuple[Output, Float[Tensor, "rows width"]]]:
        """What every output that reads one of the trunks gets from it."""
        act = ACTIVATIONS[self.activation]
        h = act(torch.addmm(self.biases[0].flatten(), x[0], self.first))
        h = h.unflatten(-1, (len(self.outputs), -1)).transpose(0, 1)
        for weight, bias in zip(self.later, self.biases[1:], strict=True):
            h = act(torch.baddbmm(bias, h, weight))
        found = (h @ self.readouts).unflatten(-1, (len(self.outputs[0]), -1))
        for number, outputs in enumerate(self.outputs):
            for n, output in enumerate(outputs):
                yield output, found[number, :, n]


class _Columns:
    """The columns of blocks of one source's content, where and as products read them.

    The last design is kept: what comes next often reads it too.
    """

    def __init__(self, source: KV, extra: Callable[[Block], Tensor], like: Tensor) -> None:
        self.source, self._like = source, like
        self._extra = functools.cache(extra)
        self._last: tuple[tuple[Block, ...], int, Tensor] | None = None

    def design(self, blocks: tuple[Block, ...], groups: int) -> Float[Tensor, "groups rows features"]:
        """The columns of blocks side by side; with groups, group g's are those of head g of every block."""
        if self._last is None or self._last[:2] != (blocks, groups):
            self._last = None  # its memory is free before the next is made
            self._last = (blocks, groups, self._gathered(blocks, groups))
        return self._last[2]

    def _gathered(self, blocks: tuple[Block, ...], groups: int) -> Float[Tensor, "groups rows features"]:
        batch, heads, tokens, dim = self.source.keys[0].shape
        widths = [(heads * dim if b.is_source else self._extra(b).shape[-1]) // groups for b in blocks]
        x = self._like.new_empty((groups, batch, tokens, sum(widths)))
        for block, place in zip(blocks, x.split(widths, dim=-1), strict=True):
            if not block.is_source:
                place.copy_(self._extra(block).view(batch, tokens, groups, place.shape[-1]).permute(2, 0, 1, 3))
                continue
            # Straight from the cache's [batch, heads, tokens, dim], with no columns in between.
            tensor = getattr(self.source, block.kind)[block.layer].view(batch, groups, heads // groups, tokens, dim)
            tensor, place = tensor.permute(1, 0, 3, 2, 4), place.view(groups, batch, tokens, heads // groups, dim)
            if block.offset:
                back = min(-block.offset, tokens)
                place[:, :, :back] = 0
                tensor, place = tensor[:, :, : tokens - back], place[:, :, back:]
            place.copy_(tensor)
        return x.view(groups, batch * tokens, sum(widths))


class Mapper:
    """A map ready to run on a device: target layers that read the same blocks are one matrix product, and so are
    the layers of trunks that read the same blocks.

    For work in content space (training, content errors). Whoever wants a cache that the target can go on from calls
    ``kvxfer.handoff.transfer``, which knows positions, what the map reads and the plan.

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
        self.needs_hidden = any(block.kind == "source_hidden" for block in self.extras)
        """Whether the map reads the source's final hidden states."""

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

        Within ``torch.no_grad()`` it gives tensors that a training step can go on with, which ``map``'s are not. No
        gradient goes through it: ``source`` must not ask for one.
        """
        batch, heads, tokens, dim = source.keys[0].shape
        read = _Columns(source, lambda block: block_columns(source, known, self.random, block), self.products[0].bias)
        mapped: dict[Output, Tensor] = {}
        bare: dict[Output, Tensor] = {}
        for product in self.products:
            groups, count = product.groups, len(product.outputs)
            biases = product.bias.view(count, groups, heads // groups, 1, dim)
            if not product.blocks:
                bare |= zip(product.outputs, biases.flatten(1, 2), strict=True)
                continue
            y = product.run(read.design(product.blocks, groups))
            y = y.view(groups, batch, tokens, count, heads // groups, dim).permute(3, 1, 0, 4, 2, 5)
            for output, part, bias in zip(product.outputs, y, biases, strict=True):
                mapped[output] = _sum(part, bias).view(batch, heads, tokens, dim)
            del y, part
        for trunks in self.trunks:
            for output, part in trunks.run(read.design(trunks.blocks, 1)):
                part = part.view(batch, tokens, heads, dim).transpose(1, 2)
                if output in mapped:
                    mapped[output] += part
                else:
                    mapped[output] = _sum(part, bare[output])
        for output, bias in bare.items():
            mapped.setdefault(
                output, bias.expand(batch, heads, tokens, dim).clone(memory_format=torch.contiguous_format)
            )
        return KV(
            [mapped[layer, "keys"] for layer in range(self.layers)],
            [mapped[layer, "values"] for layer in range(self.layers)],
        )


def _sum(part: Tensor, bias: Tensor) -> Tensor:
    """Both together, laid out as the shape says: one pass, whatever order the axes of ``part`` have in memory."""
    return torch.add(part, bias, out=part.new_empty(part.shape))


def _alike(trunks: tuple[Trunk, ...]) -> list[list[Trunk]]:
    """Trunks by what makes them one batched product."""
    groups: dict[Any, list[Trunk]] = {}
    for trunk in trunks:
        hidden = tuple(weight.shape[1] for weight in trunk.weights)
        groups.setdefault((trunk.blocks, hidden, trunk.activation, len(trunk.readouts)), []).append(trunk)
    return list(groups.values())
