"""The columns of every feature block: a source layer's, and those that no source layer's keys or values give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import RANDOM, Block, Features
from kvxfer.maps.random_features import RandomFeatures, random_columns
from kvxfer.models.kv import KV

if TYPE_CHECKING:
    from kvxfer.models.pair import Pair


def extra_widths(features: Features, pair: Pair) -> dict[str, int]:
    """Columns of each kind of extra block."""
    target = pair.target.geometry
    return {
        "embedding": target.hidden,
        "layer0_keys": target.kv_width,
        "layer0_values": target.kv_width,
        "random_relu": features.random_relu,
        "random_products": features.random_products,
        "source_hidden": pair.source.geometry.hidden,
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

    def part(self, rows: slice, tokens: slice) -> TargetTokens:
        """The same of some rows and tokens."""
        embeddings = None if self.embeddings is None else self.embeddings[rows, tokens]
        layer0 = None if self.layer0 is None else self.layer0.rows(rows).span(tokens.start, tokens.stop)
        return TargetTokens(embeddings, layer0)

    def columns(self, block: Block) -> Float[Tensor, "batch tokens width"]:
        """The columns of an embedding or first-layer block."""
        if block.kind == "embedding" and self.embeddings is not None:
            return shifted(self.embeddings, block.offset)
        if block.kind.startswith("layer0") and self.layer0 is not None:
            tensor = (self.layer0.keys if block.kind == "layer0_keys" else self.layer0.values)[0]
            return shifted(tensor.transpose(1, 2).flatten(2), block.offset)
        raise KvxferError(f"this map reads {block.name}, so it needs the prompt's token ids and the target model")


def columns(content: KV, block: Block) -> Float[Tensor, "batch tokens width"]:
    """A source block's feature columns: all heads side by side.

    A token that has no predecessor at the block's offset reads zeros there.
    """
    return shifted(getattr(content, block.kind)[block.layer].transpose(1, 2).flatten(2), block.offset)


def block_columns(
    content: KV, known: TargetTokens, random: RandomFeatures | None, block: Block
) -> Float[Tensor, "batch tokens width"]:
    """The columns of any block.

    Args:
        content: the source's, in content space, with its hidden states if the block is ``source_hidden``.
        known: what the target knows of the tokens, for blocks of its embedding or first layer.
        random: the weights of random features, for their blocks.
    """
    if block.is_source:
        return columns(content, block)
    if block.kind in RANDOM:
        return random_columns(random, block, lambda part: columns(content, part))
    if block.kind == "source_hidden":
        return hidden_states(content.hidden)
    return known.columns(block)


def hidden_states(found: Float[Tensor, "batch tokens hidden"] | None) -> Float[Tensor, "batch tokens hidden"]:
    """The source's final hidden states, or an error that says where they come from."""
    if found is None:
        raise KvxferError(
            "this map reads source_hidden.0: it needs the source's final hidden states beside its cache (read_source)"
        )
    return found


def read_source(pair: Pair, ids: Int[Tensor, "batch tokens"], blocks: Iterable[Block]) -> KV:
    """The source's cache of tokens, with its final hidden states if a block reads them."""
    return pair.source.prefill(ids, hidden=any(block.kind == "source_hidden" for block in blocks))
