"""Maps with random weights of a pair's true shapes, and the map that changes nothing."""

from __future__ import annotations

import torch

from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import KINDS, Block, Features, Output
from kvxfer.maps.columns import extra_widths
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.maps.random_features import RandomFeatures, RandomProducts, RandomRelu
from kvxfer.models.pair import Pair


def random_map(pair: Pair, features: Features, seed: int = 0) -> CacheMap:
    """Every target layer reads all source layers; outputs are about as large as keys and values are."""
    generator = torch.Generator().manual_seed(seed)
    width, sources = pair.source.geometry.kv_width, range(pair.source.geometry.layers)
    widths = extra_widths(features, pair)
    layers: dict[Output, LinearLayer] = {}
    for layer in range(pair.target.geometry.layers):
        for kind in KINDS:
            blocks = features.blocks(kind, sources)
            columns = sum(widths.get(block.kind, width) for block in blocks)
            weight = torch.randn(1, columns, width, generator=generator) / columns**0.5
            layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(width, generator=generator))
    inputs = len(sources) * len(KINDS) * width
    forms = {"random_relu": RandomRelu, "random_products": RandomProducts}
    parts = {kind: form.draw(inputs, widths[kind]) for kind, form in forms.items() if widths[kind]}
    return CacheMap(layers, {}, RandomFeatures(tuple(sources), parts) if parts else None)


def identity_map(pair: Pair) -> CacheMap:
    """For a pair of one model with itself: every layer is its own."""
    width = pair.target.geometry.kv_width
    layers = {
        (layer, kind): LinearLayer((Block(layer, kind),), torch.eye(width)[None], torch.zeros(width))
        for layer in range(pair.target.geometry.layers)
        for kind in KINDS
    }
    return CacheMap(layers, {})


def direction(pair: Pair, features: Features, exact_first: int = 0) -> Transfer:
    """A handover of the pair through a random map."""
    return Transfer(pair, Mapper(random_map(pair, features), pair=pair), Plan("sinks", exact_first))
