"""The shapes of published models, and models of those shapes with random weights: to time a pair without its weights.

Every number is that of the model's own config on the hub. Only the decoder counts: of a vision-language checkpoint the
language model is built.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from kvxfer.errors import KvxferError
from kvxfer.models.geometry import Geometry
from kvxfer.models.hf.checks import check_attention
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import DTYPES, resolve_device
from kvxfer.models.hf.model import LoadedModel

REVISION = "random weights"

_QWEN = {"rope_type": "default", "rope_theta": 1e6}
_LLAMA = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Shape:
    """A decoder's shape under its config's names; ``billions`` are the parameters that its publisher states."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(repr=False)
    billions: float
    tie_word_embeddings: bool = False
    head_dim: int = 128


PUBLISHED = {
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, _QWEN, 0.596, True),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 16, 8, 6144, 151936, 40960, _QWEN, 1.72, True),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 9728, 151936, 40960, _QWEN, 4.02, True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, _QWEN, 8.19),
    "qwen3-14b": Shape("qwen3", 40, 5120, 40, 8, 17408, 151936, 40960, _QWEN, 14.77),
    "qwen3-32b": Shape("qwen3", 64, 5120, 64, 8, 25600, 151936, 40960, _QWEN, 32.76),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 12, 2, 8960, 151936, 32768, _QWEN, 1.54, True),
    "qwen2.5-3b": Shape("qwen2", 36, 2048, 16, 2, 11008, 151936, 32768, _QWEN, 3.09, True),
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 14336, 128256, 131072, _LLAMA, 8.03),
    "llama-3.1-70b": Shape("llama", 80, 8192, 64, 8, 28672, 128256, 131072, _LLAMA, 70.55),
    "ministral3-3b": Shape("ministral3", 26, 3072, 32, 8, 9216, 131072, 262144, _YARN, 3.4, True),
    "ministral3-8b": Shape("ministral3", 34, 4096, 32, 8, 14336, 131072, 262144, _YARN, 8.4),
    "ministral3-14b": Shape("ministral3", 40, 5120, 32, 8, 16384, 131072, 262144, _YARN | {"rope_theta": 1e9}, 13.5),
    "mistral-nemo-12b": Shape("mistral", 40, 5120, 32, 8, 14336, 131072, 131072, _QWEN, 12.25),
}
"""By the name that ``pair.source`` and ``pair.target`` take under ``pair=geometry``."""


def published_config(name: str, layers: int | None, key: str) -> PreTrainedConfig:
    """The config of a published shape, with its first ``layers`` layers if that is given.

    Raises KvxferError, naming ``key``, for a name that is not in the table.
    """
    if name not in PUBLISHED:
        raise KvxferError(
            f"{key}={name}: no published shape of that name; with pair=geometry there are {', '.join(PUBLISHED)}"
        )
    shape = asdict(PUBLISHED[name])
    del shape["billions"]
    if layers is not None:
        shape["num_hidden_layers"] = min(layers, shape["num_hidden_layers"])
    if shape["model_type"] == "mistral":
        shape["sliding_window"] = None
    return AutoConfig.for_model(**shape, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def published_geometry(name: str, layers: int | None, key: str) -> Geometry:
    """The geometry of a published shape, or of its first layers."""
    return read_geometry(published_config(name, layers, key), f"{key} {name}")


def random_model(
    name: str, layers: int | None, dtype: str, device: str, attention: str, key: str, seed: int = 0
) -> LoadedModel:
    """A model of a published shape with random weights, made in its dtype where it is to run.

    Args:
        layers: only so many of its first layers; None for all.
        device: as of a pair, or "meta": a model without weights, which tells what it would be.

    Raises KvxferError for an unknown name, dtype or device, and where the weights do not fit.
    """
    if dtype not in DTYPES:
        raise KvxferError(f"pair.dtype: {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    place = torch.device("meta") if device == "meta" else resolve_device(device)
    config = published_config(name, layers, key)
    check_attention(config, attention, dtype, place, f"{key} {name}")
    devices = [place] if place.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.device(place):
            torch.manual_seed(seed)
            lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
    except torch.OutOfMemoryError as error:
        raise KvxferError(
            f"{key}={name}: {PUBLISHED[name].billions:g} billion weights do not fit {place}; set pair.layers=2 to time "
            "a slice"
        ) from error
    whole = published_geometry(name, None, key)
    geometry = read_geometry(config, f"{key} {name}")
    return LoadedModel(lm, stand_in_tokenizer(), geometry, name, REVISION, whole=whole)


def stand_in_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 257 bytes and marks: random weights mean nothing by a token, but a pair must share one."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
