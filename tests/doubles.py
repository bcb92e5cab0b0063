"""Tiny random models: one per class and rotary type in memory, and on disk a double of every pair option.

A double has the option's model classes, rotary type, ratio of query heads to KV heads, and (nearly) its depth ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.utils import logging

VOCABULARY = 384
WINDOW = 512
TEXT = (
    "the key is in the kitchen and anna has the red box . who has the box ? anna . where is the key ? kitchen .",
    "models of one family read the same prompt, the small one first and then the large one, token by token.",
    "def add(a, b):\n    return a + b\n",
    "one two three four five six seven eight nine ten 0 1 2 3 4 5 6 7 8 9",
)


@dataclass(frozen=True)
class Shape:
    """One side of a double. ``ratio`` is query heads to KV heads."""

    layers: int
    ratio: int
    hidden: int
    tied: bool = False


@dataclass(frozen=True)
class Double:
    """How the two sides are built, and their shapes. ``depths`` are the real models' layers."""

    build: Callable[[Shape, bool], PreTrainedModel]
    source: Shape
    target: Shape
    depths: tuple[int, int]


def tiny_tokenizer(bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 384 tokens, the same on every call."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT * 4, trainer)
    special = {"eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    """A checkpoint folder as a hub would serve it: safetensors, config and tokenizer."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(directory)
    return directory


def make_double(option: str, directory: Path) -> tuple[Path, Path]:
    """The folders of a random source and target that stand in for the option's models."""
    double = DOUBLES[option]
    tokenizer = tiny_tokenizer(bos=double.build in (_llama, _mistral, _ministral3))
    folders = []
    sides = {"source": double.source, "target": double.target}
    if double.source is double.target:
        del sides["target"]  # one checkpoint is both
    for seed, (side, shape) in enumerate(sides.items()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = double.build(shape, side == "source")
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    torch.nn.init.normal_(parameter, std=0.5)
        folders.append(save(model.to(torch.bfloat16), tokenizer, directory / side))
    return folders[0], folders[-1]


def _common(shape: Shape, head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 2 * shape.ratio,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "tie_word_embeddings": shape.tied,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def _qwen3(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen3ForCausalLM(Qwen3Config(**_common(shape, 16), max_position_embeddings=40960, rope_parameters=rotary))


def _qwen2(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen2ForCausalLM(Qwen2Config(**_common(shape, 8), max_position_embeddings=32768, rope_parameters=rotary))


def _llama(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return LlamaForCausalLM(LlamaConfig(**_common(shape, 8), max_position_embeddings=131072, rope_parameters=rotary))


def _smollm2(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {"rope_type": "default", "rope_theta": 1e5}
    return LlamaForCausalLM(LlamaConfig(**_common(shape, 8), max_position_embeddings=8192, rope_parameters=rotary))


def _mistral(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {"rope_type": "default", "rope_theta": 1e8 if source else 1e6}
    window, positions = (WINDOW, WINDOW) if source else (None, 131072)
    return MistralForCausalLM(
        MistralConfig(
            **_common(shape, 16), max_position_embeddings=positions, sliding_window=window, rope_parameters=rotary
        )
    )


def _ministral3(shape: Shape, source: bool) -> PreTrainedModel:
    rotary = {
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
    text = Ministral3Config(**_common(shape, 16), max_position_embeddings=262144, rope_parameters=rotary)
    vision = PixtralVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        image_size=28,
        patch_size=14,
    )
    config = Mistral3Config(
        text_config=text,
        vision_config=vision,
        image_token_index=0,
        spatial_merge_size=1,
        tie_word_embeddings=shape.tied,
    )
    return Mistral3ForConditionalGeneration(config)


QWEN3 = {
    "0.6b": Shape(3, 2, 32, tied=True),
    "1.7b": Shape(3, 2, 64, tied=True),
    "4b": Shape(4, 4, 80, tied=True),
    "8b": Shape(4, 4, 64),
    "14b": Shape(5, 5, 80),
}

# All 30 layers, so that the option's drop_layers hold for it.
SMOLLM2 = Shape(30, 3, 48, tied=True)

DOUBLES = {
    "qwen3_0.6b_1.7b": Double(_qwen3, QWEN3["0.6b"], QWEN3["1.7b"], (28, 28)),
    "qwen3_0.6b_4b": Double(_qwen3, QWEN3["0.6b"], QWEN3["4b"], (28, 36)),
    "qwen3_1.7b_4b": Double(_qwen3, QWEN3["1.7b"], QWEN3["4b"], (28, 36)),
    "qwen3_8b_32b": Double(_qwen3, QWEN3["8b"], Shape(7, 8, 80), (36, 64)),
    "qwen3_14b_32b": Double(_qwen3, QWEN3["14b"], Shape(8, 8, 80), (40, 64)),
    "qwen2.5_1.5b_3b": Double(_qwen2, Shape(3, 6, 96, tied=True), Shape(4, 8, 128, tied=True), (28, 36)),
    "llama3.1_8b_70b": Double(_llama, Shape(2, 4, 64), Shape(5, 8, 128), (32, 80)),
    "ministral3_3b_8b": Double(_ministral3, Shape(3, 4, 96, tied=True), Shape(4, 4, 128), (26, 34)),
    "ministral3_3b_14b": Double(_ministral3, Shape(2, 4, 96, tied=True), Shape(3, 4, 160), (26, 40)),
    "ministral3_8b_14b": Double(_ministral3, Shape(5, 4, 128), Shape(6, 4, 160), (34, 40)),
    "ministral8b_nemo12b": Double(_mistral, Shape(6, 4, 128), Shape(7, 4, 160), (36, 40)),
    "smollm2_healed": Double(_smollm2, replace(SMOLLM2, layers=24), SMOLLM2, (24, 30)),
    "smollm2_mild": Double(_smollm2, SMOLLM2, SMOLLM2, (30, 30)),
    "custom": Double(_qwen3, QWEN3["0.6b"], QWEN3["1.7b"], (28, 28)),
}

ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
CLASSES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "windowed": (MistralConfig, MistralForCausalLM, {"sliding_window": 64}),
}
PARTIAL: dict[str, tuple[type, type, dict[str, Any]]] = {
    "phi3": (Phi3Config, Phi3ForCausalLM, {"partial_rotary_factor": 0.5}),
    "stablelm": (StableLmConfig, StableLmForCausalLM, {"partial_rotary_factor": 0.25}),
}
FAMILIES = [f"{name}-{rotary}" for name in ("qwen3", "qwen2", "llama", "mistral") for rotary in ROTARY]
FAMILIES += ["windowed-default", "phi3-default", "stablelm-default"]


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model of a family "class-rotary": 2 layers, 4 query heads over 2 KV heads of 16, 256 positions."""
    name, rotary = family.split("-")
    config_class, model_class, options = {**CLASSES, **PARTIAL}[name]
    parameters = {**ROTARY[rotary], **{k: v for k, v in options.items() if k == "partial_rotary_factor"}}
    common = _common(Shape(2, 2, 64), 16) | {"max_position_embeddings": 256, "rope_parameters": parameters}
    config = config_class(**common | options | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    return model
