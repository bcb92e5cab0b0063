"""The parts of a map as its manifest and tensors give them: every shape is checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvxfer.maps.blocks import KINDS, RANDOM, Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.maps.trunks import Trunk, read_trunks


def hidden_columns(manifest: Mapping[str, Any], side: str) -> int:
    """Columns of a model's embedding and hidden states."""
    return manifest["pair"][side]["geometry"]["hidden"]


def read_parts(
    manifest: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[Output, LinearLayer], RandomFeatures | None, tuple[Trunk, ...]]:
    """What a map's tensors make up: its linear layers, random features and trunks.

    Raises:
        KvxferError, KeyError, TypeError, ValueError, AttributeError: the tensors are not those that it describes.
    """
    biases = [len(tensor) for name, tensor in tensors.items() if name.startswith(KINDS) and name.endswith(".bias")]
    width = max(biases, default=0)
    random = RandomFeatures.of(tensors, [int(layer) for layer in manifest["random_layers"]], width)
    trunks = read_trunks(manifest["trunks"], tensors, lambda block: _width(block, width, manifest, random))
    return _layers(manifest, tensors, random), random, trunks


def _layers(
    manifest: Mapping[str, Any], tensors: dict[str, Tensor], random: RandomFeatures | None
) -> dict[Output, LinearLayer]:
    """The layers that a manifest's blocks and the tensors make up: all of them, each of its blocks' width."""
    layers = {}
    for name, blocks in manifest["blocks"].items():
        kind, _, layer = name.partition(".")
        parts = tuple(Block.parse(str(block)) for block in blocks)
        weight, bias, right = tensors[f"{name}.weight"], tensors[f"{name}.bias"], tensors.get(f"{name}.right")
        groups, features, inner = weight.shape
        last = inner if right is None else right.shape[-1]
        widths = [_width(part, len(bias), manifest, random) for part in parts]
        if (groups * features, groups * last) != (sum(widths), len(bias)) or any(width % groups for width in widths):
            raise ValueError(f"{name}: {len(parts)} blocks do not fit a weight of {tuple(weight.shape)}")
        if groups > 1 and not (parts and all(part.is_source for part in parts)):
            raise ValueError(f"{name}: a head-local weight reads source blocks only")
        if right is not None and right.shape[:2] != (groups, inner):
            raise ValueError(f"{name}: factors of {tuple(weight.shape)} and {tuple(right.shape)} do not fit")
        layers[int(layer), kind] = LinearLayer(parts, weight, bias, right)
    biases = sum(name.endswith(".bias") for name in tensors)
    if not layers or set(layers) != {(layer, kind) for layer in range(biases // len(KINDS)) for kind in KINDS}:
        raise ValueError(f"{len(layers)} layers and kinds of {biases}")
    return layers


def _width(block: Block, kv_width: int, manifest: Mapping[str, Any], random: RandomFeatures | None) -> int:
    """Columns of a block where one layer's keys have ``kv_width``."""
    if block.kind == "embedding":
        return hidden_columns(manifest, "target")
    if block.kind == "source_hidden":
        return hidden_columns(manifest, "source")
    if block.kind not in RANDOM:
        return kv_width
    return (random.widths if random is not None else {})[block.kind]
