"""Content space: strip and restore undo each other, and strip gives what the model had before its rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.models import rope
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from tests.doubles import FAMILIES, tiny_model, tiny_tokenizer


def loaded(family: str) -> LoadedModel:
    lm = tiny_model(family)
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def true_content_keys(model: LoadedModel, ids: Tensor) -> list[Tensor]:
    """Each layer's keys as they are just before the model rotates them, caught with hooks."""
    caught: list[Tensor] = []
    geometry = model.geometry

    def catch(module: Any, inputs: Any, output: Tensor) -> None:
        if output.dim() == 3:
            output = output[..., : output.shape[-1] - geometry.kv_width] if fused else output
            output = output[..., -geometry.kv_width :].unflatten(-1, (geometry.kv_heads, geometry.head_dim))
        caught.append(output.transpose(1, 2))

    handles, fused = [], False
    for layer in model.body.layers:
        attention = layer.self_attn
        fused = hasattr(attention, "qkv_proj")
        name = "k_norm" if hasattr(attention, "k_norm") else "qkv_proj" if fused else "k_proj"
        handles.append(getattr(attention, name).register_forward_hook(catch))
    model.prefill(ids)
    for handle in handles:
        handle.remove()
    return caught


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_of_a_real_cache(family: str) -> None:
    model = loaded(family)
    kv = model.prefill(torch.randint(3, 300, (2, 40)))
    cos, sin = model.cos_sin(40)
    scaling = model.geometry.rotary.scaling
    for keys in kv.keys:
        there_and_back = rope.restore(rope.strip(keys, cos, sin, scaling), cos, sin, scaling)
        assert relative(there_and_back, keys) < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_stripped_keys_are_the_keys_before_the_rotary_embedding(family: str) -> None:
    model = loaded(family)
    ids = torch.randint(3, 300, (2, 40))
    kv = model.prefill(ids)
    cos, sin = model.cos_sin(40)
    for keys, wanted in zip(kv.keys, true_content_keys(model, ids), strict=True):
        assert relative(rope.strip(keys, cos, sin, model.geometry.rotary.scaling), wanted) < 1e-6


def test_yarn_scales_and_partial_rotary_leaves_columns_alone() -> None:
    assert loaded("llama-yarn").geometry.rotary.scaling == pytest.approx(1.1386294)
    phi3 = loaded("phi3-default")
    assert (phi3.geometry.rotary.dim, phi3.geometry.head_dim) == (8, 16)
    keys = torch.randn(1, 2, 5, 16)
    cos, sin = phi3.cos_sin(5, start=3)
    stripped = rope.strip(keys, cos, sin)
    assert torch.equal(stripped[..., 8:], keys[..., 8:])
    assert not torch.allclose(stripped[..., :8], keys[..., :8])


def test_scaling_touches_only_the_columns_that_turn() -> None:
    keys, (cos, sin) = torch.randn(1, 2, 5, 16), (torch.ones(5, 8), torch.zeros(5, 8))
    restored = rope.restore(keys, cos, sin, scaling=2.0)
    assert torch.equal(restored[..., :8], 2 * keys[..., :8])
    assert torch.equal(restored[..., 8:], keys[..., 8:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keys_are_turned_in_float32(dtype: torch.dtype) -> None:
    model = loaded("qwen3-default")
    cos, sin = model.cos_sin(6)
    keys = torch.randn(1, 2, 6, 16).to(dtype)
    assert rope.strip(keys, cos, sin).dtype == torch.float32
    assert relative(rope.restore(rope.strip(keys, cos, sin), cos, sin), keys.float()) < 1e-6


def test_positions_count_from_start() -> None:
    model = loaded("qwen3-llama3")
    cos, sin = model.cos_sin(20)
    later_cos, later_sin = model.cos_sin(12, start=8)
    assert torch.equal(cos[8:], later_cos)
    assert torch.equal(sin[8:], later_sin)
