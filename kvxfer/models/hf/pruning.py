"""The same model without some of its layers: its config, then its weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from kvxfer.errors import KvxferError


def kept_layers(layers: int, drop: tuple[int, ...], key: str) -> list[int]:
    """The layers of ``layers`` that are left; ``key`` names the side of the pair in errors.

    Raises KvxferError for a layer that the model doesn't have, and when none would be left.
    """
    beyond = [layer for layer in drop if not 0 <= layer < layers]
    if beyond:
        raise KvxferError(
            f"{key}.drop_layers={list(drop)}: no layer {beyond[0]}; the model has layers 0 to {layers - 1}"
        )
    kept = [layer for layer in range(layers) if layer not in drop]
    if not kept:
        raise KvxferError(f"{key}.drop_layers={list(drop)}: all {layers} layers are dropped; leave 1 or more")
    return kept


def prune_config(config: PreTrainedConfig, drop: tuple[int, ...], key: str) -> PreTrainedConfig:
    """A copy of the config whose (text) decoder lacks the dropped layers; the config itself if none is dropped."""
    if not drop:
        return config
    config = copy.deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    kept = kept_layers(decoder.num_hidden_layers, drop, key)
    _shorten(decoder, kept)
    return config


def prune_model(lm: Any, drop: tuple[int, ...], key: str) -> None:
    """Take the dropped layers out of a loaded language model, in place, and number the others anew."""
    if not drop:
        return
    body = lm.base_model
    layers = getattr(body, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise KvxferError(f"{key}.drop_layers: {type(body).__name__} keeps no list of layers; unsupported, give []")
    kept = kept_layers(len(layers), drop, key)
    body.layers = nn.ModuleList(layers[index] for index in kept)
    for index, layer in enumerate(body.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index
    for config in {id(m.config): m.config for m in lm.modules() if hasattr(m, "config")}.values():
        _shorten(config.get_text_config(decoder=True), kept)


def _shorten(config: PreTrainedConfig, kept: list[int]) -> None:
    before = config.num_hidden_layers
    config.num_hidden_layers = len(kept)
    for field in ("layer_types", "layers_block_type"):
        types = getattr(config, field, None)
        if types is not None and len(types) == before:
            setattr(config, field, [types[layer] for layer in kept])
