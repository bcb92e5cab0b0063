"""A loaded model over an injected cache does what the model itself does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from tests.doubles import FAMILIES, tiny_model, tiny_tokenizer


def loaded(family: str) -> LoadedModel:
    lm = tiny_model(family)
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, family), family, "random")


def rows(batch: int = 3, tokens: int = 30, seed: int = 0) -> Tensor:
    return torch.randint(3, 300, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def copied(kv: KV) -> KV:
    return kv.apply(torch.clone)


def same(left: KV, right: KV) -> bool:
    pairs = zip(left.keys + left.values, right.keys + right.values, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def own_logits(model: LoadedModel, ids: Tensor) -> Tensor:
    """The model called as its library documents, with none of our code in between."""
    return model.lm(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_logits_equals_one_forward(family: str) -> None:
    model, ids = loaded(family), rows()
    wanted = own_logits(model, ids)
    assert torch.allclose(model.logits(ids), wanted, atol=1e-5)
    past = model.prefill(ids[:, :17])
    assert (past.layers, past.batch, past.tokens) == (2, 3, 17)
    before = copied(past)
    got = model.logits(ids[:, 17:], past)
    assert got.dtype == torch.float32
    assert torch.allclose(got, wanted[:, 17:], atol=1e-5)
    assert same(past, before)


@pytest.mark.parametrize("family", ["qwen3-yarn", "windowed-default", "phi3-default"])
def test_prefill_in_two_steps_equals_one(family: str) -> None:
    model, ids = loaded(family), rows()
    first = model.prefill(ids[:, :11])
    before = copied(first)
    both, once = model.prefill(ids[:, 11:], first), model.prefill(ids)
    assert same(first, before)
    for got, wanted in zip(both.keys + both.values, once.keys + once.values, strict=True):
        assert torch.allclose(got, wanted, atol=1e-5)


def test_a_windowed_model_keeps_every_token() -> None:
    model = loaded("windowed-default")
    assert (model.geometry.window, model.geometry.attention) == (64, ("sliding_attention",) * 2)
    ids = rows(tokens=100)
    assert model.prefill(ids).tokens == 100
    assert torch.allclose(
        model.logits(ids[:, 70:], model.prefill(ids[:, :70])), own_logits(model, ids)[:, 70:], atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_the_argmax_of_full_forwards(family: str) -> None:
    model, ids = loaded(family), rows(batch=2, tokens=12)
    wanted = ids
    for _ in range(6):
        wanted = torch.cat((wanted, own_logits(model, wanted)[:, -1:].argmax(dim=-1)), dim=1)
    past = model.prefill(ids[:, :9])
    before = copied(past)
    assert torch.equal(model.generate(ids[:, 9:], past, 6), wanted[:, 12:])
    assert torch.equal(model.generate(ids, None, 6), wanted[:, 12:])
    assert same(past, before)


def test_generate_fills_up_with_stop_and_ends_early() -> None:
    model, ids = loaded("qwen3-default"), rows(batch=2, tokens=12)
    free = model.generate(ids, None, 8)
    stop = int(free[0, 2])
    got = model.generate(ids, None, 8, stop=stop)
    for row, plain in zip(got.tolist(), free.tolist(), strict=True):
        end = plain.index(stop) if stop in plain else len(plain)
        assert row == (plain[: end + 1] + [stop] * 8)[: len(row)]
    alone = model.generate(ids[:1], None, 8, stop=stop)
    assert alone.shape[1] == free[0].tolist().index(stop) + 1
    assert model.generate(ids, None, 0).shape == (2, 0)


def test_noise_is_added_to_the_logits_of_each_step() -> None:
    model, ids = loaded("qwen3-default"), rows(batch=2, tokens=12)
    noise = 3 * torch.randn(2, 4, model.geometry.vocabulary, generator=torch.Generator().manual_seed(0))
    wanted = ids
    for step in range(4):
        chosen = (own_logits(model, wanted)[:, -1] + noise[:, step]).argmax(dim=-1, keepdim=True)
        wanted = torch.cat((wanted, chosen), dim=1)
    got = model.generate(ids[:, 8:], model.prefill(ids[:, :8]), 4, noise=lambda step: noise[:, step])
    assert torch.equal(got, wanted[:, 12:])
    assert not torch.equal(got, model.generate(ids, None, 4))


def test_hidden_states_of_two_prefills_are_those_of_one() -> None:
    model, ids = loaded("llama-default"), rows()
    whole = model.prefill(ids, hidden=True)
    parts = model.prefill(ids[:, 11:], model.prefill(ids[:, :11], hidden=True), hidden=True)
    assert parts.hidden is not None
    assert torch.allclose(parts.hidden, whole.hidden, atol=1e-5)
    with pytest.raises(KvxferError, match="no hidden states"):
        model.prefill(ids[:, 11:], model.prefill(ids[:, :11]), hidden=True)


def test_an_empty_past_is_no_past() -> None:
    model, ids = loaded("llama-default"), rows()
    empty = model.prefill(ids).span(0, 0)
    assert torch.equal(model.logits(ids, empty), model.logits(ids))


def test_past_of_another_dtype_is_taken_over() -> None:
    model, ids = loaded("qwen2-default"), rows()
    past = model.prefill(ids[:, :10])
    doubled = past.apply(lambda x: x.double())
    assert torch.equal(model.logits(ids[:, 10:], doubled), model.logits(ids[:, 10:], past))


def test_the_model_is_frozen_and_in_eval_mode() -> None:
    model = loaded("qwen3-default")
    assert not model.lm.training
    assert not any(parameter.requires_grad for parameter in model.lm.parameters())
    assert model.prefill(rows()).keys[0].is_inference()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_logits_alone_and_step_by_step_are_those_of_one_forward(family: str) -> None:
    model, ids = loaded(family), rows(tokens=20)
    wanted = own_logits(model, ids)
    assert torch.allclose(model.logits(ids, keep=3), wanted[:, -3:], atol=1e-5)
    assert torch.allclose(model.logits(ids[:, 9:], model.prefill(ids[:, :9]), keep=2), wanted[:, -2:], atol=1e-5)
    steps = model.steps(ids[:, 9:15], model.prefill(ids[:, :9]))
    found = [next(steps), *(steps.send(ids[:, place]) for place in range(15, 20))]
    assert torch.allclose(torch.stack(found, dim=1), wanted[:, 14:], atol=1e-5)


def test_end_tokens_are_those_of_the_generation_config_and_the_tokenizer() -> None:
    model = loaded("qwen3-yarn")
    own = model.tokenizer.eos_token_id
    for listed, wanted in ((None, {own}), (7, {7, own}), ([7, 8], {7, 8, own})):
        model.lm.generation_config.eos_token_id = listed
        assert model.end_tokens == wanted
