"""Feature blocks that no source layer gives: what the target knows of a token for nothing, and random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import Block, Features
from kvxfer.kv import KV
from kvxfer.layout import Layout

if TYPE_CHECKING:
    from kvxfer.pairs import Pair

_SEED = 20260803


@dataclass(frozen=True)
class RandomRelu:
    """Random ReLU features of all calibrated source layers: ``relu(x weight + bias)``.

    x are the keys and values of every layer side by side, each layer's kind divided by its own root mean square, so
    that the features need no statistics of the data and every process draws the same ones.
    """

    weight: Float[Tensor, "inputs features"]
    bias: Float[Tensor, " features"]

    @staticmethod
    def draw(inputs: int, features: int) -> RandomRelu:
        """Standard normal weights over the square root of the inputs, biases of deviation one half."""
        generator = torch.Generator().manual_seed(_SEED)
        weight = torch.randn(inputs, features, generator=generator) / inputs**0.5
        return RandomRelu(weight, torch.randn(features, generator=generator) / 2)

    def __call__(self, parts: list[Float[Tensor, "... width"]]) -> Float[Tensor, "... features"]:
        """The features of every layer's keys and values, in the order of :func:`relu_inputs`."""
        scaled = [x / x.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6) for x in parts]
        return torch.relu(torch.cat(scaled, dim=-1) @ self.weight.to(parts[0]) + self.bias.to(parts[0]))


def relu_inputs(layers: list[int]) -> list[Block]:
    """The source blocks that random features read, in order."""
    return [Block(layer, kind) for layer in layers for kind in ("keys", "values")]


def relu_for(layout: Layout) -> RandomRelu | None:
    """The random features of a layout, or None if it keeps none: a function of its layers and widths alone."""
    widths = dict(zip(layout.blocks, layout.widths, strict=True))
    if (block := Block(0, "random_relu")) not in widths:
        return None
    return RandomRelu.draw(len(relu_inputs(layout.source_layers)) * layout.width, widths[block])


def extra_widths(features: Features, pair: Pair) -> dict[str, int]:
    """Columns of each kind of extra block."""
    target = pair.target.geometry
    return {
        "embedding": target.hidden,
        "layer0_keys": target.kv_width,
        "layer0_values": target.kv_width,
        "random_relu": features.random_relu,
    }


def shifted(x: Float[Tensor, "batch tokens width"], offset: int) -> Float[Tensor, "batch tokens width"]:
    """The columns of the token at ``offset`` (0 or less) from each; zeros before the row's start."""
    if not offset:
        return x
    moved = torch.zeros_like(x)
    moved[:, -offset:] = x[:, :offset]
    return moved


@dataclass(frozen=True)
class TargetTokens:
    """What the target knows of tokens without reading their context."""

    embeddings: Float[Tensor, "batch tokens hidden"] | None
    layer0: KV | None

    @staticmethod
    def of(pair: Pair, ids: Int[Tensor, "batch tokens"], blocks: tuple[Block, ...]) -> TargetTokens:
        """Compute what the blocks ask for."""
        kinds = {block.kind for block in blocks}
        embeddings = pair.target.embeddings(ids) if "embedding" in kinds else None
        layer0 = None
        if kinds & {"layer0_keys", "layer0_values"}:
            layer0 = pair.content("target", pair.target.first_layer(ids))
        return TargetTokens(embeddings, layer0)

    def columns(self, block: Block) -> Float[Tensor, "batch tokens width"]:
        """The columns of an embedding or first-layer block."""
        if block.kind == "embedding" and self.embeddings is not None:
            return shifted(self.embeddings, block.offset)
        if self.layer0 is not None:
            tensor = (self.layer0.keys if block.kind == "layer0_keys" else self.layer0.values)[0]
            return shifted(tensor.transpose(1, 2).flatten(2), block.offset)
        raise KvxferError(f"this map reads {block.name}, so it needs the prompt's token ids and the target model")
