"""Between the library's cache class and KV. Nothing else knows what a transformers cache looks like."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import DynamicCache

from kvxfer.errors import KvxferError
from kvxfer.models.kv import KV


def build_cache(kv: KV | None) -> DynamicCache:
    """A fresh cache that holds ``kv`` (rotated keys), or nothing.

    It is made without a config on purpose: with one, sliding-window layers would keep only their last window.
    """
    cache = DynamicCache()
    if kv is not None and kv.tokens:
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            cache.update(keys, values, layer)
    return cache


def read_cache(cache: DynamicCache, name: str) -> KV:
    """Keys (rotated) and values of every layer; a layer without them is refused, ``name`` says whose."""
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None or getattr(layer, "values", None) is None:
            raise KvxferError(f"{name}: layer {index} caches no keys and values ({type(layer).__name__}); unsupported")
    return KV([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers])


def cache_keyword(forward: Callable[..., Any]) -> str:
    """The name under which a forward takes its cache: ``cache`` from transformers 5.24 on, before it another."""
    parameters = inspect.signature(forward).parameters
    for keyword in ("cache", "past_key_values"):
        if keyword in parameters:
            return keyword
    raise KvxferError("the model's forward takes no key-value cache; only decoders with one can form a pair")
