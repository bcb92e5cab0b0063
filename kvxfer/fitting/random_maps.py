"""A map of a pair's geometry with random weights: it costs what a fitted one costs, and is worth nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import HeadLocal, Ridge, Solver
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import KINDS, RANDOM
from kvxfer.maps.columns import extra_widths
from kvxfer.maps.linear import LinearLayer
from kvxfer.models.pair import Pair
from kvxfer.moments.schedule import nearest


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


def _layer(pair: Pair, solver: Ridge | HeadLocal, kind: str, chosen: list[int], draw: torch.Generator) -> LinearLayer:
    geometry = pair.target.geometry
    width, features = geometry.kv_width, solver.features
    blocks = features.blocks(kind, chosen)
    widths = extra_widths(features, pair)
    read = sum(widths.get(block.kind, width) for block in blocks)
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
