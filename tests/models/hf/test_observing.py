"""What a model gives of itself to be trained on, and its forward over a cache that gradients go through."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from tests.doubles import tiny_model, tiny_tokenizer

FAMILIES = ["qwen3-default", "qwen2-llama3", "llama-yarn", "windowed-default", "phi3-default"]


def loaded(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> LoadedModel:
    lm = tiny_model(family, attn_implementation=attention).to(dtype)
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")


def rows(batch: int = 2, tokens: int = 20) -> Tensor:
    return torch.randint(3, 300, (batch, tokens), generator=torch.Generator().manual_seed(0))


def plain(kv: KV) -> KV:
    """A copy that autograd may see."""
    return kv.apply(torch.clone)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_observed_is_the_models_own(family: str, attention: str) -> None:
    model, ids = loaded(family, attention), rows()
    found = model.observe(ids)
    with torch.no_grad():
        own = model.lm(input_ids=ids, use_cache=False, output_hidden_states=True)
    assert found.logits is not None
    assert torch.allclose(found.logits, own.logits, atol=1e-5)
    kv, queries = model.queries(ids)
    for mine, theirs in ((found.kv.keys, kv.keys), (found.kv.values, kv.values), (found.queries, queries)):
        assert len(mine) == model.geometry.layers
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    for layer, (query, keys, values, output) in enumerate(
        zip(queries, kv.keys, kv.values, found.attention, strict=True)
    ):
        heads = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=True, scale=model.softmax_scales()[layer]
        )
        assert torch.allclose(model.project(layer, heads.transpose(1, 2).flatten(2)), output, atol=1e-5)
    assert model.observe(ids, logits=False).logits is None
    assert not any(layer.self_attn.o_proj._forward_hooks for layer in model.body.layers)


def test_the_bias_of_an_output_projection_counts() -> None:
    lm = tiny_model("llama-default", attention_bias=True)
    model = LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, "biased"), "biased", "random")
    projection = model.body.layers[1].self_attn.o_proj
    heads = torch.randn(2, 3, 64)
    assert bool(projection.bias.any())
    assert torch.allclose(model.project(1, heads), projection(heads), atol=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_following_the_models_own_cache_goes_on_as_it_would(family: str, attention: str) -> None:
    model, ids = loaded(family, attention), rows()
    seen = model.observe(ids)
    past = plain(seen.kv.span(0, 13))
    before = plain(past)
    found = model.follow(ids[:, 13:], past)
    assert seen.logits is not None
    assert found.logits.dtype == torch.float32
    assert torch.allclose(found.logits, seen.logits[:, 13:], atol=1e-5)
    for mine, theirs in zip(found.attention, seen.attention, strict=True):
        assert torch.allclose(mine, theirs[:, 13:], atol=1e-5)
    pairs = zip(past.keys + past.values, before.keys + before.values, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "the past was changed"
    assert not found.logits.requires_grad


@pytest.mark.parametrize(("family", "attention"), [(f, a) for f in FAMILIES for a in ("sdpa", "eager")])
def test_gradients_reach_keys_and_values_of_every_layer(family: str, attention: str) -> None:
    """Against central differences in float64, along one random direction of each tensor."""
    model, ids = loaded(family, attention, torch.float64), rows(tokens=12)
    past = plain(model.prefill(ids[:, :8])).apply(lambda x: x.requires_grad_())
    rng = torch.Generator().manual_seed(1)

    def loss(kv: KV) -> Tensor:
        found = model.follow(ids[:, 8:], kv)
        return found.logits.double().square().mean() + sum(x.square().mean() for x in found.attention)

    leaves = [*past.keys, *past.values]
    gradients = torch.autograd.grad(loss(past), leaves)
    step = 1e-2  # norms and logits are float32 within
    for place, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        way = torch.randn(leaf.shape, generator=rng, dtype=torch.float64)
        sides = []
        for sign in (1, -1):
            moved = [x.detach() + (sign * step * way if n == place else 0) for n, x in enumerate(leaves)]
            with torch.no_grad():
                sides.append(loss(KV(moved[: past.layers], moved[past.layers :])))
        wanted = float(sides[0] - sides[1]) / (2 * step)
        assert float((gradient * way).sum()) == pytest.approx(wanted, rel=1e-3, abs=1e-4)
    assert all(bool(gradient.abs().sum() > 0) for gradient in gradients)
    assert all(parameter.grad is None for parameter in model.lm.parameters())


def test_gradients_of_a_float32_past_reach_a_bfloat16_model() -> None:
    model, ids = loaded("qwen3-default", dtype=torch.bfloat16), rows()
    past = plain(model.prefill(ids[:, :13])).apply(lambda x: x.float().requires_grad_())
    model.follow(ids[:, 13:], past).logits.square().mean().backward()
    for leaf in (*past.keys, *past.values):
        assert leaf.grad is not None
        assert leaf.grad.dtype == torch.float32
        assert bool(leaf.grad.abs().sum() > 0)


def test_a_model_without_an_output_projection_is_refused() -> None:
    model = loaded("qwen3-default")
    del model.body.layers[1].self_attn.o_proj
    with pytest.raises(KvxferError, match="layer 1 has no o_proj to weigh values by; set solver=ridge"):
        model.observe(rows())
