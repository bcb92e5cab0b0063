"""The objective is 0 on the true content, its gradients are right, and each way of asking counts what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from training_pairs import activations, disturbed, pair_of, true_content

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.activations import Activations
from kvxfer.fitting.trained.objective import Objective, _share
from kvxfer.fitting.trained.specs import Trained
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

EXACT, SPLIT, TOKENS = 3, 14, 24
TERMS: dict[str, dict[str, Any]] = {
    "prefix": {"queries": "prefix"},
    "continuation": {"queries": "continuation"},
    "both": {"queries": "both"},
    "carried": {"queries": "continuation", "carried": True},
    "kl": {"attention": 0.0, "kl": 1.0},
    "mse": {"attention": 0.0, "mse": 1.0},
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of("qwen3-default")


@pytest.fixture(scope="module")
def batch(pair: Pair) -> Activations:
    return activations(pair, tokens=TOKENS)


def objective(pair: Pair, term: str, **options: Any) -> Objective:
    return Objective(pair, Trained(term, **{**TERMS[term], **options}), EXACT)


def loss(pair: Pair, term: str, batch: Activations, mapped: KV, **options: Any) -> Tensor:
    aim = objective(pair, term, **options)
    return aim.total(aim.losses(batch, mapped, SPLIT))


def cost(*given: Any) -> float:
    return float(loss(*given).detach())


def leaves(content: KV) -> list[Tensor]:
    return [*content.keys, *content.values]


def changed(batch: Activations, change: Callable[[Tensor], Tensor], layer: int = 0, kind: str = "keys") -> KV:
    """The true content but for one layer's keys or values."""
    content = KV(list(batch.own.keys), list(batch.own.values))
    tensors = getattr(content, kind)
    tensors[layer] = change(tensors[layer].clone())
    return content


def noise_from(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x[:, :, start:stop] += torch.randn(x[:, :, start:stop].shape, generator=torch.Generator().manual_seed(0))
        return x

    return change


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen3-default", "qwen2-llama3", "llama-yarn", "phi3-default", "windowed-default"])
def test_true_content_costs_nothing(family: str, attention: str) -> None:
    pair = pair_of(family, attention=attention)
    batch = activations(pair, tokens=TOKENS)
    for term in TERMS:
        content = true_content(batch)
        assert cost(pair, term, batch, content) == pytest.approx(0, abs=1e-6), term
        assert cost(pair, term, batch, disturbed(batch)) > 1e-3, term


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("family", ["qwen3-default", "llama-yarn"])
def test_gradients_are_those_of_central_differences(family: str, term: str) -> None:
    pair = pair_of(family)
    batch = activations(pair, tokens=TOKENS)
    content = disturbed(batch)
    gradients = torch.autograd.grad(loss(pair, term, batch, content), leaves(content), allow_unused=True)
    step, rng = 1e-2, torch.Generator().manual_seed(1)
    for place, (leaf, gradient) in enumerate(zip(leaves(content), gradients, strict=True)):
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        # A way that the loss changes along: float32 leaves too little of a random one.
        way = gradient / gradient.norm().clamp_min(1e-9) + 0.02 * torch.randn(leaf.shape, generator=rng)
        sides = []
        for sign in (1, -1):
            moved = [x.detach() + (sign * step * way if n == place else 0) for n, x in enumerate(leaves(content))]
            sides.append(cost(pair, term, batch, KV(moved[: content.layers], moved[content.layers :])))
        assert float((gradient * way).sum()) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=0.02, abs=2e-5)
        assert bool(gradient.abs().sum() > 0)
        # Exact tokens are the target's own: nothing of the map reaches them.
        assert not bool(gradient[:, :, :EXACT].any())
    assert all(parameter.grad is None for parameter in pair.target.lm.parameters())


def test_each_way_of_asking_counts_its_own_tokens(pair: Pair, batch: Activations) -> None:
    later = changed(batch, noise_from(SPLIT, TOKENS))
    for term in ("continuation", "carried", "kl"):
        assert cost(pair, term, batch, later) == pytest.approx(0, abs=1e-6), term
    assert cost(pair, "prefix", batch, later) > 1e-3
    assert cost(pair, "mse", batch, later) > 1e-2
    exact = changed(batch, noise_from(0, EXACT))
    for term in TERMS:
        assert cost(pair, term, batch, exact) == pytest.approx(0, abs=1e-6), term
    content = disturbed(batch)
    single = [cost(pair, term, batch, content) for term in ("prefix", "continuation")]
    assert cost(pair, "both", batch, content) == pytest.approx(sum(single) / 2, rel=1e-5)


def test_errors_are_carried_on_only_where_it_says_so(pair: Pair, batch: Activations) -> None:
    early = changed(batch, noise_from(EXACT, SPLIT))
    taught = objective(pair, "continuation").losses(batch, early, SPLIT).attention
    carried = objective(pair, "carried").losses(batch, early, SPLIT).attention
    assert taught is not None
    assert carried is not None
    assert float(taught[1].detach()) == pytest.approx(0, abs=1e-6)
    assert float(carried[1].detach()) > 1e-3
    # The first layer's queries have met no error yet.
    assert float(carried[0].detach()) == pytest.approx(float(taught[0].detach()), rel=1e-3)
    content = disturbed(batch)
    for term, reaches in (("continuation", False), ("carried", True)):
        last = objective(pair, term, layers=(1,))
        found = torch.autograd.grad(last.total(last.losses(batch, content, SPLIT)), content.keys, allow_unused=True)
        assert (found[0] is not None and bool(found[0].any())) == reaches
        assert found[1] is not None


def test_only_the_named_layers_count(pair: Pair, batch: Activations) -> None:
    content = disturbed(batch)
    for term in ("prefix", "carried", "mse"):
        whole, one = (objective(pair, term, layers=layers).losses(batch, content, SPLIT) for layers in (None, (1,)))
        if term == "mse":
            assert whole.mse is not None
            assert one.mse is not None
            assert torch.equal(one.mse, whole.mse[2:])
        else:
            assert whole.attention is not None
            assert one.attention is not None
            assert torch.allclose(one.attention, whole.attention[1:])
    with pytest.raises(KvxferError, match=r"solver\.layers=\[0, 2\]: .* has layers 0 to 1"):
        objective(pair, "prefix", layers=(0, 2))


def test_the_total_is_the_weighted_sum_of_the_terms(pair: Pair, batch: Activations) -> None:
    content = disturbed(batch)
    aim = objective(pair, "carried", attention=0.5, kl=2.0, mse=3.0)
    found = aim.losses(batch, content, SPLIT)
    assert found.attention is not None
    assert found.kl is not None
    assert found.mse is not None
    wanted = 0.5 * found.attention.mean() + 2 * found.kl + 3 * found.mse.mean()
    assert torch.allclose(aim.total(found), wanted)
    for term, weight in (("carried", 0.5), ("kl", 2.0), ("mse", 3.0)):
        wanted = wanted - weight * loss(pair, term, batch, content)
    assert float(wanted.detach()) == pytest.approx(0, abs=1e-5)
    only = objective(pair, "kl").losses(batch, content, SPLIT)
    assert only.attention is None
    assert only.mse is None


def test_the_target_runs_once_where_two_terms_follow(
    pair: Pair, batch: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    inner = pair.target.follow
    monkeypatch.setattr(pair.target, "follow", lambda *given: calls.append(1) or inner(*given))
    loss(pair, "carried", batch, disturbed(batch), kl=1.0)
    assert len(calls) == 1
    loss(pair, "both", batch, disturbed(batch), mse=1.0)
    assert len(calls) == 1


def test_a_share_by_hand() -> None:
    true = torch.tensor([[[0.0, 1.0], [2.0, 1.0]]])  # mean (1, 1): deviation 1 + 1
    assert float(_share(true, true + torch.tensor([1.0, 0.0]))) == 1.0
    assert float(_share(true, true.mean((0, 1)).expand_as(true))) == 1.0
    still = torch.ones(1, 2, 2)
    found = still.clone().requires_grad_()
    share = _share(still, found)
    share.backward()
    assert float(share.detach()) == 1.0
    assert found.grad is not None
    assert not bool(found.grad.any())


def test_autocast_changes_nothing(pair: Pair, batch: Activations) -> None:
    content = disturbed(batch)
    for term in TERMS:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(pair, term, batch, content)
        assert found.dtype == torch.float32
        assert torch.equal(found, loss(pair, term, batch, content)), term


def test_gradients_reach_the_map_through_a_bfloat16_target() -> None:
    pair = pair_of("llama-default", torch.bfloat16)
    batch = activations(pair, tokens=TOKENS)
    for term in TERMS:
        content = disturbed(batch)
        loss(pair, term, batch, content).backward()
        for leaf in leaves(content):
            assert leaf.grad is not None
            assert bool(leaf.grad.isfinite().all())
            assert bool(leaf.grad.any())


@pytest.mark.parametrize("split", [EXACT, TOKENS])
def test_a_prefix_of_nothing_or_of_all_is_refused(split: int, pair: Pair, batch: Activations) -> None:
    with pytest.raises(KvxferError, match=rf"a prefix of {split} of corpus\.length=24 tokens, corpus\.skip_first=3"):
        objective(pair, "prefix").losses(batch, disturbed(batch), split)


def test_attention_with_more_than_a_softmax_is_refused() -> None:
    pair = pair_of("qwen3-default")
    pair.target.body.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(KvxferError, match=r"attention has sinks.* set solver=ridge or another closed form"):
        objective(pair, "prefix")
