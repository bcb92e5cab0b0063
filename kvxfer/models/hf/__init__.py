"""The only package that touches transformers: configs, weights, caches, rotary modules, queries."""

from __future__ import annotations

from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import (
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolved_revision,
)
from kvxfer.models.hf.model import LoadedModel, Running
from kvxfer.models.hf.observing import Followed, Observed
from kvxfer.models.hf.published import PUBLISHED, published_geometry, random_model
from kvxfer.models.spec import ModelSpec, check_exists

__all__ = [
    "PUBLISHED",
    "Followed",
    "LoadedModel",
    "ModelSpec",
    "Observed",
    "Running",
    "check_exists",
    "load_config",
    "load_model",
    "load_tokenizer",
    "published_geometry",
    "random_model",
    "read_geometry",
    "resolve_device",
    "resolved_revision",
]
