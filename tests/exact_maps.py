"""A model as its own source and target, and the map that is then exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvxfer.files import write_json
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import KINDS, Block
from kvxfer.maps.columns import read_source
from kvxfer.maps.linear import LinearLayer
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair


def with_itself(pair: Pair) -> Pair:
    """The pair's target as source and target."""
    return replace(pair, source=pair.target)


def exact_map(pair: Pair) -> CacheMap:
    """Every target layer's content is the source layer's of the same number."""
    width = pair.target.geometry.kv_width
    layers = {
        (layer, kind): LinearLayer((Block(layer, kind),), torch.eye(width)[None], torch.zeros(width))
        for layer in range(pair.target.geometry.layers)
        for kind in KINDS
    }
    return CacheMap(layers, {})


def changed(cache_map: CacheMap, layer: int, kind: str, factor: float) -> CacheMap:
    """The same map with one output's weight multiplied."""
    part = cache_map.layers[layer, kind]
    return CacheMap({**cache_map.layers, (layer, kind): replace(part, weight=part.weight * factor)}, {})


def record_fit(directory: Path, cache_map: CacheMap, r2: float = 1.0) -> None:
    """A fit's record that gives every layer and kind the same held-out R²."""
    layers = [{"layer": layer, "kind": kind, "r2_held_out": r2} for layer, kind in cache_map.layers]
    write_json(directory / DIAGNOSTICS, {"layers": layers})


def mapped_content(pair: Pair, mapper: Mapper, ids: Tensor) -> KV:
    """What the map makes of the source's content of these tokens: the target's, in content space, float32."""
    return mapper.map(pair.content("source", read_source(pair, ids, mapper.extras)), ids)
