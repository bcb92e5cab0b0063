"""A map of a pair's geometry with random weights: it costs what a fitted one costs, and is worth nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import HeadLocal, Ridge, Solver
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import KINDS, RANDOM, Features, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models.pair import Pair


def random_map(pair: Pair, solver: Solver, manifest: Mapping[str, Any]) -> CacheMap:
    """A map of the form that the solver and its dials give, over k source layers at each target layer's relative depth.

    Args:
        manifest: what a fitted map's manifest would say; it is marked as random here.

    Raises:
        KvxferError: the form is only known once a solver has seen data (automatic choices, random features).
    """
    if not isinstance(solver, Ridge | HeadLocal) or not isinstance(solver.k, int):
        raise KvxferError(
            f"solver.name={solver.name} with solver.k={getattr(solver, 'k', None)} leaves the map's form to data, "
            "which a pair of random weights has none of: set solver=ridge or head_local, and solver.k to a number"
        )
    if any(getattr(solver.features, kind) for kind in RANDOM):
        raise KvxferError(
            f"features={solver.features.name} reads random features of calibrated layers, and a pair of random weights "
            "has no calibration: choose other features (e.g. same, previous)"
        )
    source, target = pair.source.geometry, pair.target.geometry
    if solver.method == "all":
        raise KvxferError(
            "solver.method=all reads as many source layers as were calibrated, and here none were: set "
            f"solver.method=topk and solver.k, at most {source.layers}"
        )
    if solver.k > source.layers:
        raise KvxferError(f"solver.k={solver.k} is more than the source's {source.layers} layers: lower solver.k")
    draw = torch.Generator().manual_seed(0)
    layers = {}
    for layer in range(target.layers):
        chosen = nearest(layer * (source.layers - 1) / max(target.layers - 1, 1), solver.k, source.layers)
        for kind in KINDS:
            layers[layer, kind] = _layer(pair, solver, kind, chosen, draw)
    return CacheMap(layers, {**manifest, "random": True})


def nearest(depth: float, k: int, layers: int) -> list[int]:
    """The k layers nearest to a depth, ascending."""
    return sorted(sorted(range(layers), key=lambda layer: abs(layer - depth))[:k])


def _layer(pair: Pair, solver: Ridge | HeadLocal, kind: str, chosen: list[int], draw: torch.Generator) -> LinearLayer:
    geometry = pair.target.geometry
    width, features = geometry.kv_width, solver.features
    blocks = features.blocks(kind, chosen)
    read = width * sum(block.is_source for block in blocks) + _extra_columns(features, pair)
    groups = geometry.kv_heads if isinstance(solver, HeadLocal) else 1
    columns = width // groups
    ranks = solver.rank.ranks(solver.rank_width(width, geometry.kv_heads))
    if len(ranks) > 1:
        raise KvxferError("rank.r=auto is chosen on data, which a pair of random weights has none of: set a number")
    inner = ranks[0] if ranks else columns
    weight = _normal((groups, read // groups, inner), read // groups, draw)
    right = _normal((groups, inner, columns), inner, draw) if ranks else None
    return LinearLayer(blocks, weight, torch.zeros(width), right)


def _normal(shape: tuple[int, int, int], inputs: int, draw: torch.Generator) -> Float[Tensor, "groups rows columns"]:
    """Numbers that keep the size of what they multiply."""
    return torch.randn(shape, generator=draw) / inputs**0.5


def _extra_columns(features: Features, pair: Pair) -> int:
    """Columns of the blocks that no source layer gives."""
    widths = {"embedding": pair.target.geometry.hidden, "source_hidden": pair.source.geometry.hidden}
    return sum(widths.get(block.kind, pair.target.geometry.kv_width) for block in features.extras)


def with_random_trunks(cache_map: CacheMap, hidden: int, depth: int, share: bool, instead: bool) -> CacheMap:
    """The map with random trunks over the columns that its outputs read.

    Args:
        hidden, depth: the width and number of the hidden layers, which are followed by a ReLU.
        share: outputs that read the same columns share a trunk; otherwise each has one of its own.
        instead: the outputs' linear parts are left out.
    """
    draw = torch.Generator().manual_seed(1)
    readers: dict[Any, list[Output]] = {}
    for output, layer in cache_map.layers.items():
        readers.setdefault(layer.blocks if share else output, []).append(output)
    trunks = []
    for outputs in readers.values():
        layer = cache_map.layers[outputs[0]]
        widths = [layer.weight.shape[0] * layer.weight.shape[1]] + [hidden] * depth
        weights = tuple(_normal((1, a, b), a, draw)[0] for a, b in itertools.pairwise(widths))
        readouts = {output: _normal((1, hidden, cache_map.width), hidden, draw)[0] for output in outputs}
        trunks.append(Trunk(layer.blocks, weights, tuple(torch.zeros(hidden) for _ in weights), "relu", readouts))
    layers = cache_map.layers
    if instead:
        nothing = torch.zeros(1, 0, cache_map.width)
        layers = {output: LinearLayer((), nothing, layer.bias) for output, layer in layers.items()}
    return CacheMap(layers, cache_map.manifest, cache_map.random, tuple(trunks))
