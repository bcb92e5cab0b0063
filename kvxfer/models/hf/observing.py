"""What a model's attention reads and gives: its queries and outputs as they pass, and its output projections."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvxfer.errors import KvxferError
from kvxfer.models.kv import KV, LayerTensors

_caught: ContextVar[dict[int, Tensor]] = ContextVar("caught")
TRAINED_INSTEAD = "solver=ridge or another closed form, which does without"

LayerOutputs = list[Float[Tensor, "batch tokens hidden"]]


@dataclass(frozen=True)
class Observed:
    """A model's own reading of some tokens, all in its dtype.

    Attributes:
        kv: its cache (rotated keys).
        queries: each layer's queries as attention sees them (rotated, scaled by the model).
        attention: each layer's attention output, after its output projection with its bias.
        logits: of every token; None unless asked for.
    """

    kv: KV
    queries: LayerTensors
    attention: LayerOutputs
    logits: Float[Tensor, "batch tokens vocab"] | None


@dataclass(frozen=True)
class Followed:
    """What a model makes of tokens that follow a cache: its logits, float32, and each layer's attention output."""

    logits: Float[Tensor, "batch tokens vocab"]
    attention: LayerOutputs


@contextmanager
def captured_outputs(body: Any, name: str) -> Iterator[dict[int, Tensor]]:
    """Inside the block, a forward of ``body`` leaves what each layer's o_proj gives in the dictionary, by layer."""
    found: dict[int, Tensor] = {}
    hooks = []
    try:
        for number, projection in enumerate(output_projections(body, name, TRAINED_INSTEAD)):

            def keep(module: Any, inputs: Any, output: Tensor, number: int = number) -> None:
                found[number] = output

            hooks.append(projection.register_forward_hook(keep))
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(body: Any, name: str) -> nn.ModuleList:
    """A decoder's list of layers, which not every class keeps under this name."""
    if not isinstance(found := getattr(body, "layers", None), nn.ModuleList):
        raise KvxferError(f"{name}: {type(body).__name__} keeps no list of layers, which this needs; unsupported")
    return found


def attentions(body: Any, name: str, instead: str) -> list[Any]:
    """Each layer's attention module; ``instead`` is the setting that does without, for the error."""
    layers = getattr(body, "layers", None) or ()
    found = [getattr(layer, "self_attn", None) for layer in layers]
    if not found or None in found:
        missing = f"layer {found.index(None)} has" if found else "layers have"
        raise KvxferError(f"{name}: {missing} no self_attn, whose output could be looked at; set {instead}")
    return found


def output_projections(body: Any, name: str, instead: str) -> list[Any]:
    """Each layer's o_proj, a plain matrix; ``instead`` is the setting that does without, for the error."""
    found = []
    for number, attention in enumerate(attentions(body, name, instead)):
        projection = getattr(attention, "o_proj", None)
        weight = getattr(projection, "weight", None)
        if projection is None:
            raise KvxferError(f"{name}: layer {number} has no o_proj to weigh values by; set {instead}")
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            raise KvxferError(f"{name}: layer {number}'s o_proj is no plain matrix (quantised?); set {instead}")
        found.append(projection)
    return found


@contextmanager
def captured_queries(body: Any) -> Iterator[dict[int, Tensor]]:
    """Inside the block, a forward of ``body`` leaves each layer's queries in the dictionary, by layer index.

    They are as attention sees them (rotated and scaled by the model), caught on their way into the attention function.
    The attention implementation is the model's own ("sdpa" in place of a fused one) and is put back on the way out.
    """
    configs = list({id(m.config): m.config for m in body.modules() if hasattr(m, "config")}.values())
    before = [(config, config._attn_implementation) for config in configs]
    base = "eager" if body.config._attn_implementation == "eager" else "sdpa"
    name = f"kvxfer_queries_{base}"
    AttentionInterface.register(name, _catching_eager if base == "eager" else _catching_sdpa)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    found: dict[int, Tensor] = {}
    token = _caught.set(found)
    try:
        for config, _ in before:
            config._attn_implementation = name
        yield found
    finally:
        _caught.reset(token)
        for config, implementation in before:
            config._attn_implementation = implementation


def _catching_sdpa(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    _caught.get()[module.layer_idx] = query
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)


def _catching_eager(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    _caught.get()[module.layer_idx] = query
    return sys.modules[type(module).__module__].eager_attention_forward(module, query, *args, **kwargs)
