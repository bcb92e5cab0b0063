"""Geometry comes from the config alone, and what is unsupported is refused in one line by field and value."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RwkvConfig,
    SmolLM3Config,
)

from kvxfer.errors import KvxferError
from kvxfer.models.hf.geometry import read_geometry
from tests.doubles import FAMILIES, ROTARY, tiny_model


def small(**changes: object) -> dict[str, object]:
    return {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1e4, **more}


LONG = rope("longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=64)
REFUSALS: list[tuple[PreTrainedConfig, str]] = [
    (Qwen3NextConfig(), r"qwen3_next has recurrent or hybrid layers \(linear_num_value_heads: 32\)"),
    (MambaConfig(), r"mamba has recurrent or hybrid layers \(state_size: 16\)"),
    (JambaConfig(), r"jamba has recurrent or hybrid layers \(mamba_d_state: 16\)"),
    (Lfm2Config(full_attn_idxs=[2]), "layer 0 of lfm2 is conv"),
    (Llama4TextConfig(), "layer 0 of llama4_text is chunked_attention"),
    (RwkvConfig(), r"rwkv has no attention heads"),
    (DeepseekV3Config(), r"deepseek_v3 has latent attention \(kv_lora_rank: 512\)"),
    (Gemma3nTextConfig(), r"gemma3n_text shares keys and values between layers \(num_kv_shared_layers: 15\)"),
    (SmolLM3Config(), r"smollm3 has layers without rotary embedding \(first: 3\)"),
    (Gemma3TextConfig(), "gemma3_text has a rotary embedding per layer type"),
    (GPT2Config(), r"rotary type none \(gpt2 has no rope_parameters\); supported are default, linear, llama3, yarn"),
    (LlamaConfig(**small(rope_parameters=rope("dynamic", factor=2.0))), "rotary type dynamic; supported are default"),
    (LlamaConfig(**small(rope_parameters=LONG)), "rotary type longrope; supported are default"),
    (Qwen2VLConfig(text_config=small(rope_parameters=rope("default", mrope_section=[1, 1, 2]))), "rotary type mrope"),
    (LlamaConfig(**small(hidden_act="nope")), r"the config of llama builds no decoder \(.*nope"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS, ids=lambda value: getattr(value, "model_type", ""))
def test_refusals_are_one_line_that_names_field_and_value(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(KvxferError, match=f"^pair.source some/model: .*{message}") as refused:
        read_geometry(config, "pair.source some/model")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_geometry_of_every_family(family: str) -> None:
    model = tiny_model(family)
    geometry = read_geometry(model.config, family)
    assert (geometry.layers, geometry.heads, geometry.kv_heads, geometry.head_dim) == (2, 4, 2, 16)
    assert geometry.rotary.type == family.split("-")[1]
    assert geometry.rotary.theta == ROTARY[geometry.rotary.type]["rope_theta"]
    assert geometry.rotary.dim == {"phi3": 8, "stablelm": 4}.get(family.split("-")[0], 16)
    assert geometry.kv_width == 32
    assert json.loads(json.dumps(geometry.to_dict()))["max_positions"] == 256
    body = model.base_model
    matrices = sum(w.numel() for w in body.parameters() if w.dim() > 1) - body.get_input_embeddings().weight.numel()
    assert geometry.body_parameters == matrices


def test_window_only_where_a_layer_slides() -> None:
    assert read_geometry(tiny_model("windowed-default").config, "x").window == 64
    assert read_geometry(tiny_model("mistral-default").config, "x").window is None
    mixed = tiny_model("qwen3-default", use_sliding_window=True, sliding_window=32, max_window_layers=1)
    geometry = read_geometry(mixed.config, "x")
    assert (geometry.window, geometry.attention) == (32, ("full_attention", "sliding_attention"))


def test_reading_a_large_geometry_holds_no_weights() -> None:
    geometry = read_geometry(LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64), "x")
    assert geometry.body_parameters > 30e9


def test_of_experts_only_the_chosen_count() -> None:
    config = Qwen3MoeConfig(
        **small(vocab_size=64, head_dim=8, intermediate_size=64, moe_intermediate_size=16, num_experts=8),
        num_experts_per_tok=2,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        rope_parameters=rope("default"),
    )
    attention = 32 * 4 * 8 * 2 + 32 * 2 * 8 * 2
    experts = 2 * 3 * 32 * 16
    router = 32 * 8
    assert read_geometry(config, "x").body_parameters == 2 * (attention + experts + router)


def test_nothing_is_left_on_the_default_device() -> None:
    read_geometry(tiny_model("qwen3-default").config, "x")
    assert torch.empty(1).device.type == "cpu"
