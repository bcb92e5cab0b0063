"""Queries are what attention sees, and asking for them leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.hf.observing import captured_queries
from tests.doubles import tiny_model, tiny_tokenizer


def loaded(family: str, attention: str = "sdpa") -> LoadedModel:
    lm = tiny_model(family, attn_implementation=attention)
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3-default", "qwen2-llama3", "llama-yarn", "windowed-default", "phi3-default"])
def test_queries_and_cache_give_the_attention_output(family: str, attention: str) -> None:
    model = loaded(family, attention)
    ids = torch.randint(3, 300, (2, 24))
    plain = model.prefill(ids)
    inputs: list[torch.Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: inputs.append(args[0]))
        for layer in model.body.layers
    ]
    kv, queries = model.queries(ids)
    for handle in handles:
        handle.remove()
    assert len(queries) == model.geometry.layers
    for layer, query in enumerate(queries):
        assert query.shape == (2, model.geometry.heads, 24, model.geometry.head_dim)
        assert torch.allclose(kv.keys[layer], plain.keys[layer], atol=1e-5)
        mixed = scaled_dot_product_attention(
            query, kv.keys[layer], kv.values[layer], is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        assert torch.allclose(mixed.flatten(2), inputs[layer], atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_implementation_is_put_back(attention: str) -> None:
    model = loaded("qwen3-default", attention)
    ids = torch.randint(3, 300, (1, 8))
    before = model.logits(ids)
    model.queries(ids)
    assert model.lm.config._attn_implementation == attention
    assert torch.equal(model.logits(ids), before)


def test_it_is_put_back_after_an_exception() -> None:
    model = loaded("qwen3-default")

    def fail_inside() -> None:
        with captured_queries(model.body):
            assert model.lm.config._attn_implementation != "sdpa"
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail_inside()
    assert model.lm.config._attn_implementation == "sdpa"


def test_a_forward_that_fails_half_way_restores_too() -> None:
    model = loaded("llama-default")

    def fail(module: object, args: object) -> None:
        raise RuntimeError("layer 1 fails")

    handle = model.body.layers[1].register_forward_pre_hook(fail)
    ids = torch.randint(3, 300, (1, 8))
    with pytest.raises(RuntimeError, match="layer 1 fails"):
        model.queries(ids)
    handle.remove()
    assert model.body.config._attn_implementation == "sdpa"
    assert len(model.queries(ids)[1]) == 2
