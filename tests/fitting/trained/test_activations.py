"""What is read of rows is what the models make of them, whether it was kept or is read again, and no more is kept."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from training_pairs import pair_of, rows_of

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.activations import Activations, ActivationStore
from kvxfer.maps.blocks import Block
from kvxfer.maps.columns import TargetTokens
from kvxfer.models.pair import Pair

EXTRAS = {Block(0, "embedding"), Block(0, "layer0_keys"), Block(0, "source_hidden"), Block(1, "keys", -1)}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of("qwen3-default")


def tensors(found: Any) -> list[Tensor]:
    """All tensors within, in order."""
    if isinstance(found, Tensor):
        return [found]
    if isinstance(found, list):
        return [tensor for each in found for tensor in tensors(each)]
    if found is None:
        return []
    return [tensor for field in fields(found) for tensor in tensors(getattr(found, field.name))]


def same(one: Activations, other: Activations) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def store_of(pair: Pair, gib: float = 1.0, rows: int = 5, **options: Any) -> ActivationStore:
    return ActivationStore(pair, **{"blocks": EXTRAS, "logits": True, **options}, tokens=rows_of(rows), cache_gib=gib)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_is_what_the_models_make_of_its_rows(dtype: torch.dtype) -> None:
    pair = pair_of("llama-yarn", dtype)
    found, ids = store_of(pair).batch([3, 1]), rows_of(5)[[3, 1]]
    source = pair.content("source", pair.source.prefill(ids, hidden=True))
    kv, queries = pair.target.queries(ids)
    own = pair.content("target", kv)
    known = TargetTokens.of(pair, ids, tuple(EXTRAS))
    assert known.layer0 is not None
    assert found.known.layer0 is not None
    wanted = {
        "ids": ids, "source": source, "keys": own.keys, "values": own.values, "queries": queries,
        "attention": pair.target.observe(ids).attention, "logits": pair.target.logits(ids),
        "embeddings": known.embeddings, "layer0": known.layer0.keys,
    }  # fmt: skip
    given = {**vars(found), "embeddings": found.known.embeddings, "layer0": found.known.layer0.keys}
    for name, each in wanted.items():
        for mine, theirs in zip(tensors(given[name]), tensors(each), strict=True):
            assert mine.shape == theirs.shape
            close = {"atol": 2e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.2}
            assert torch.allclose(mine.float(), theirs.float(), **close), name
            assert mine.dtype == (torch.int64 if name == "ids" else dtype if name == "logits" else torch.float32)
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors(found))


def test_kept_or_read_again_in_any_batch_it_is_the_same_bit_for_bit(pair: Pair) -> None:
    kept, never = store_of(pair), store_of(pair, 0.0)
    first, again, read = kept.batch([0, 4, 2]), kept.batch([0, 4, 2]), never.batch([0, 4, 2])
    assert (kept.kept, never.kept, never.used) == (3, 0, 0)
    assert same(first, again)
    assert same(first, read)
    assert same(first, kept.batch([0, 4, 2]))
    alone = tensors(kept.batch([4]))
    assert all(torch.equal(a[1:2], b) for a, b in zip(tensors(first), alone, strict=True))


def test_rows_that_come_first_are_kept_until_the_memory_is_full(pair: Pair) -> None:
    whole = store_of(pair)
    whole.batch([0])
    one = whole.used
    assert one == sum(x.numel() * x.element_size() for x in whole._kept[0].tensors())
    for tensor in whole._kept[0].tensors():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), "more is held than counted"
        assert tensor.device.type == "cpu"
    small = store_of(pair, (2 * one + 1) / 2**30)
    for rows in ([3, 0], [1, 2], [3, 4]):
        small.batch(rows)
    assert sorted(small._kept) == [0, 3]
    assert small.used == 2 * one <= small.limit
    assert len(small) == 5
    before = small.batch([0])
    small.forget()
    assert (small.kept, small.used) == (0, 0)
    assert same(small.batch([0]), before)
    assert small.kept == 1


def test_what_is_read_in_inference_mode_serves_a_step_with_gradients(pair: Pair) -> None:
    store = store_of(pair)
    with torch.inference_mode():
        first = store.batch([0, 1])
    for found in (first, store.batch([0, 1])):
        weight = torch.ones((), requires_grad=True)
        (found.queries[0] * found.keys[0].mean() * weight).sum().backward()
        assert weight.grad is not None
        assert not any(tensor.is_inference() for tensor in tensors(found))


def test_logits_and_extras_are_read_only_where_they_are_asked_for(pair: Pair) -> None:
    found = store_of(pair, blocks={Block(0, "keys")}, logits=False).batch([0])
    assert found.logits is None
    assert found.source.hidden is None
    assert found.known == TargetTokens(None, None)
    assert store_of(pair, logits=False).batch([0]).logits is None


def test_a_row_that_is_not_finite_is_refused() -> None:
    pair = pair_of("qwen3-default")
    with torch.no_grad():
        pair.target.lm.lm_head.weight[:] = torch.inf
    store_of(pair, logits=False).batch([0])
    store = store_of(pair)
    with pytest.raises(KvxferError, match=r"row 2 to train on .* not finite: try pair\.dtype=float32"):
        store.batch([2])
    assert store.kept == 0


def test_rows_longer_than_a_window_are_refused() -> None:
    with pytest.raises(
        KvxferError, match=r"corpus\.length: 80 tokens, but windowed-default has a sliding window of 64"
    ):
        ActivationStore(pair_of("windowed-default"), set(), rows_of(1, 80), 0.0, logits=False)


def test_rotating_content_lets_gradients_through(pair: Pair) -> None:
    kv = pair.target.prefill(rows_of(2)).apply(torch.clone)
    content = pair.content("target", kv).apply(lambda x: x.clone().requires_grad_())
    there = pair.rotated("target", content)
    back = pair.content("target", there)
    loss = sum(x.square().sum() for kv in (there, back) for x in kv.keys)
    # A rotation keeps lengths.
    for gradient, x in zip(torch.autograd.grad(loss, content.keys), content.keys, strict=True):
        assert torch.allclose(gradient, 4 * x, atol=1e-4)
