"""The only package that touches transformers: configs, weights, caches, rotary modules, queries."""

from __future__ import annotations

from kvxfer.hf.files import folder_digest
from kvxfer.hf.geometry import read_geometry
from kvxfer.hf.load import (
    ModelSpec,
    check_exists,
    content_digest,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolved_revision,
)
from kvxfer.hf.model import LoadedModel, Running
from kvxfer.hf.observing import Followed, Observed
from kvxfer.hf.published import PUBLISHED, published_geometry, random_model

__all__ = [
    "PUBLISHED",
    "Followed",
    "LoadedModel",
    "ModelSpec",
    "Observed",
    "Running",
    "check_exists",
    "content_digest",
    "folder_digest",
    "load_config",
    "load_model",
    "load_tokenizer",
    "published_geometry",
    "random_model",
    "read_geometry",
    "resolve_device",
    "resolved_revision",
]
