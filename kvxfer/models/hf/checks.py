"""What a config, a tokenizer and installed packages tell before weights are read: what can not work is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedConfig
from transformers.quantizers import AutoHfQuantizer

from kvxfer.errors import KvxferError
from kvxfer.models.hf.tokenizers import SAMPLES, special_ids
from kvxfer.models.hub import first_line
from kvxfer.models.spec import ModelSpec

ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
_EVERYWHERE = ("sdpa", "eager")  # no package and no GPU needed; the quicker first

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json")
_CONVERTED = (".model", ".tiktoken")


def check_attention(config: PreTrainedConfig, attention: str, dtype: str, device: torch.device, name: str) -> None:
    """Refuse an attention implementation that is not installed, or that this model, device or dtype can't have.

    The error names one that works. On device "meta" nothing runs.
    """
    if attention not in ATTENTION:
        raise KvxferError(f"pair.attention: {attention!r} is not supported; use one of {', '.join(ATTENTION)}")
    decoder = config.get_text_config(decoder=True)
    reason = _refusal(decoder, attention)
    if reason is None and attention.startswith("flash") and (device.type not in ("cuda", "meta") or dtype == "float32"):
        reason = "it needs a CUDA GPU, and pair.dtype bfloat16 or float16"
    if reason is None:
        return
    works = [each for each in _EVERYWHERE if each != attention and _refusal(decoder, each) is None]
    advice = f"set pair.attention={works[0]}" if works else "choose another model"
    raise KvxferError(f"pair.attention={attention}: {name} can't run with it ({reason}); {advice}")


def _refusal(decoder: PreTrainedConfig, attention: str) -> str | None:
    """Why a decoder can't be built with an attention implementation; None if it can."""
    if attention == "sdpa" and getattr(decoder, "attn_logit_softcapping", None):
        return f"it leaves out attn_logit_softcapping: {decoder.attn_logit_softcapping}"
    try:
        with torch.device("meta"):
            AutoModel.from_config(copy.deepcopy(decoder), attn_implementation=attention)
    except (ImportError, ValueError) as error:
        return first_line(error)
    return None


def check_quantised(config: PreTrainedConfig, name: str) -> None:
    """Refuse a quantised checkpoint whose package or hardware is not there."""
    given = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    try:
        quantizer = AutoHfQuantizer.from_config(copy.deepcopy(given), pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # every method of quantisation has errors of its own
        raise KvxferError(
            f"{name}: its weights are quantised (quant_method: {method}) and can't be read here ({first_line(error)}); "
            "install what that names, or give the model without quantisation"
        ) from error


def check_tokenizer(tokenizer: Any, vocabulary: int, spec: ModelSpec, key: str) -> None:
    """Refuse a tokenizer that reads no text, and one with ids that plain text gives and the embedding does not have.

    Args:
        vocabulary: how many tokens the model embeds.
    """
    entries, special = tokenizer.get_vocab(), special_ids(tokenizer)
    if set(entries.values()) <= special or not all(tokenizer.encode(s, add_special_tokens=False) for s in SAMPLES):
        raise KvxferError(f"{key}.model: {spec.model!r} has no tokenizer that reads text; {tokenizer_advice(spec)}")
    marks = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    beyond = {index: token for token, index in entries.items() if index >= vocabulary}
    met = [index for index in beyond if index in marks or index not in special]
    if met:
        raise KvxferError(
            f"{key}.model: the tokenizer of {spec.model!r} has ids up to {max(beyond)}, the model embeds {vocabulary} "
            f"(vocab_size), and text may give {beyond[min(met)]!r} ({min(met)}); resize the model's embedding, or give "
            "the tokenizer that it was trained with"
        )


def tokenizer_advice(spec: ModelSpec) -> str:
    """What to do about a tokenizer that is not there or can't be read, by the files of a local folder."""
    names = [] if spec.folder is None else [path.name for path in spec.folder.iterdir()]
    if "tokenizer.json" not in names and any(Path(name).suffix in _CONVERTED for name in names):
        return (
            "it is converted from an older form with sentencepiece or tiktoken: install both and protobuf, or save "
            "tokenizer.json beside it"
        )
    if not any(name in _VOCABULARIES for name in names):
        return "put the files of its tokenizer (tokenizer.json, tokenizer_config.json) beside config.json"
    return "save its tokenizer again (tokenizer.json), of the class that tokenizer_config.json names"
