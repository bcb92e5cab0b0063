"""Queries as attention sees them (rotated and scaled by the model), caught on their way into the attention function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_caught: ContextVar[dict[int, Tensor]] = ContextVar("caught")


@contextmanager
def captured_queries(body: Any) -> Iterator[dict[int, Tensor]]:
    """Inside the block, a forward of ``body`` leaves each layer's queries in the dictionary, by layer index.

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
