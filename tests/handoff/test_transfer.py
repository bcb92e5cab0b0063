"""The handoff step by step: the one code that is evaluated and timed."""

from __future__ import annotations

import pytest
import torch

from kvxfer.evals.conditions import mapped_conditions
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

PROMPT = 20


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.randint(5, 100, (3, PROMPT), generator=torch.Generator().manual_seed(0))


def random_mapper(pair: Pair, features: str) -> Mapper:
    width, draw = pair.target.geometry.kv_width, torch.Generator().manual_seed(1)
    layers = {}
    for layer in range(pair.target.geometry.layers):
        for kind in KINDS:
            blocks = DESIGNS[features].blocks(kind, [0, 1])
            extra = pair.source.geometry.hidden if features == "hidden" else 0
            columns = sum(width for block in blocks if block.is_source) + extra
            weight = torch.randn(1, columns, width, generator=draw) / 16
            layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(width, generator=draw))
    return Mapper(CacheMap(layers, {}), pair=pair)


def tensors(kv: KV) -> list[torch.Tensor]:
    return [*kv.keys, *kv.values]


@pytest.mark.parametrize("features", ["previous", "hidden"])
@pytest.mark.parametrize("plan", [Plan("sinks", 4, 1), Plan("all", 0, 3), Plan("mostly exact", 50, 2)])
def test_what_is_evaluated_is_what_is_timed(tiny_pair, prompt, features, plan):
    mapper = random_mapper(tiny_pair, features)
    prepared = mapped_conditions(Transfer(tiny_pair, mapper, plan), prompt)["mapped"]
    seen: list[KV] = []
    target = tiny_pair.target

    class Watched(Transfer):
        def planned(self, mapped: KV, exact: KV | None) -> KV:
            seen.append(super().planned(mapped, exact))
            return seen[-1]

    transfer = Watched(tiny_pair, mapper, plan)
    token = transfer.first_token(transfer.read(transfer.split(prompt)[0]), prompt)
    assert all(torch.equal(a, b) for a, b in zip(tensors(seen[0]), tensors(prepared.past), strict=True))
    likeliest = torch.tensor([[n] for n in token.tolist()])
    best = token_log_likelihoods(prepared, likeliest)
    everything = target.logits(prepared.tail, prepared.past)[:, -1].log_softmax(-1).max(-1).values
    assert torch.allclose(best[:, 0], everything, atol=1e-5)


def test_every_step_is_told_in_its_order(tiny_pair, prompt):
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, "same"), Plan("sinks", 4, 3))
    steps: list[str] = []
    transfer.first_token(transfer.read(transfer.split(prompt)[0]), prompt, steps.append)
    assert tuple(steps) == STEPS


def test_the_source_may_go_on_after_its_cache_was_handed_over(tiny_pair, prompt):
    """Nothing of the handoff writes into the source's cache."""
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, "same"), Plan("sinks", 4, 1))
    running = transfer.read(transfer.split(prompt)[0])
    before = [tensor.clone() for tensor in tensors(tiny_pair.source.export(running))]
    transfer.first_token(running, prompt)
    after = tensors(tiny_pair.source.export(running))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("features", ["same", "previous", "hidden"])
@pytest.mark.parametrize(("start", "stop"), [(0, 7), (5, 6), (1, 20), (13, 20)])
def test_a_span_is_that_of_the_whole(tiny_pair, prompt, features, start, stop):
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, features), Plan("sinks", 4, 1))
    cache = transfer.prefill(prompt)
    whole = transfer.span(cache, prompt)
    part, content = transfer.span_and_content(cache, prompt, start, stop)
    for one, other in zip(tensors(part), tensors(whole.span(start, stop)), strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)
    assert all(
        torch.equal(a, b)
        for a, b in zip(tensors(part), tensors(tiny_pair.rotated("target", content, start)), strict=True)
    )
    # Nothing of what follows is looked at.
    short = transfer.span(cache.span(0, stop), prompt[:, :stop], start)
    assert all(torch.equal(a, b) for a, b in zip(tensors(short), tensors(part), strict=True))


def test_the_whole_is_what_the_map_gives_bit_for_bit(tiny_pair, prompt):
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, "previous"), Plan("sinks", 4, 1))
    cache = transfer.prefill(prompt)
    wanted = tiny_pair.rotated("target", transfer.mapper.map(tiny_pair.content("source", cache), prompt))
    assert all(torch.equal(a, b) for a, b in zip(tensors(transfer.span(cache, prompt)), tensors(wanted), strict=True))
