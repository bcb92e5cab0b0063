"""A map's random twin: a control that reads what the map reads and costs what it costs."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import Output


def random_twin(cache_map: CacheMap, heads: int, seed: int = 0) -> CacheMap:
    """The same blocks, forms and shapes with weights that write into random directions.

    The weights of every output and head are the fitted ones times a random rotation of that head's columns (uniform
    over all of them). So each token's key or value is exactly as long as the map's, and what the map has over its twin
    is what it was fitted to. Weights drawn one by one would be no fair control: fitted ones cancel one another over
    columns that are alike, and others of their size gave keys and values up to hundreds of times too long.

    Args:
        heads: KV heads of the target.
    """
    draw = torch.Generator().manual_seed(seed)
    dim = cache_map.width // heads
    layers, turns = {}, dict[Output, Float[Tensor, "heads dim dim"]]()
    for output, layer in cache_map.layers.items():
        turn = turns[output] = _rotations(heads, dim, draw)
        bias = _turned(layer.bias[None, None], turn)[0, 0]
        if layer.right is None:
            layers[output] = replace(layer, weight=_turned(layer.weight, turn), bias=bias)
        else:
            layers[output] = replace(layer, right=_turned(layer.right, turn), bias=bias)
    trunks = []
    for trunk in cache_map.trunks:
        readouts = {output: _turned(each[None], turns[output])[0] for output, each in trunk.readouts.items()}
        trunks.append(replace(trunk, readouts=readouts))
    return CacheMap(layers, cache_map.manifest, cache_map.random, tuple(trunks))


def _rotations(heads: int, dim: int, draw: torch.Generator) -> Float[Tensor, "heads dim dim"]:
    """Uniformly drawn orthogonal matrices, float64."""
    q, r = torch.linalg.qr(torch.randn(heads, dim, dim, generator=draw, dtype=torch.float64))
    # Without its signs the decomposition would not be a uniform draw.
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]


def _turned(
    columns: Float[Tensor, "groups rows columns"], turn: Float[Tensor, "heads dim dim"]
) -> Float[Tensor, "groups rows columns"]:
    """Every head's columns times its matrix; a group is a head, or one holds all heads side by side."""
    by_head = columns.double().unflatten(-1, (-1, turn.shape[1]))
    if columns.shape[0] == 1:
        turned = torch.einsum("grhd,hde->grhe", by_head, turn)
    else:
        turned = torch.einsum("hrgd,hde->hrge", by_head, turn)
    return turned.flatten(2).to(columns.dtype)
