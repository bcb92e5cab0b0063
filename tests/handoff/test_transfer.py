"""The handoff step by step: the one code that is evaluated and timed."""

from __future__ import annotations

import pytest
import torch

from kvxfer.evals.conditions import mapped_conditions
from kvxfer.evals.scoring import token_log_likelihoods
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps import apply
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
        def handed(self, cache: KV, head: torch.Tensor, exact: KV | None) -> KV:
            seen.append(super().handed(cache, head, exact))
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
    part = transfer.span(cache, prompt, start, stop)
    for one, other in zip(tensors(part), tensors(whole.span(start, stop)), strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)
    # Nothing of what follows is looked at.
    short = transfer.span(cache.span(0, stop), prompt[:, :stop], start)
    assert all(torch.equal(a, b) for a, b in zip(tensors(short), tensors(part), strict=True))


def test_what_is_written_is_the_map_s_content_rotated(tiny_pair, prompt):
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, "previous"), Plan("sinks", 4, 1))
    cache = transfer.prefill(prompt)
    plain = transfer.mapper.map(tiny_pair.content("source", cache), prompt)
    for found, wanted in (
        (transfer.content(cache, prompt), plain),
        (transfer.span(cache, prompt), tiny_pair.rotated("target", plain)),
    ):
        assert all(
            torch.allclose(a, b, atol=1e-5, rtol=1e-5) for a, b in zip(tensors(found), tensors(wanted), strict=True)
        )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("features", ["same", "previous", "hidden"])
def test_rows_that_are_padded_are_mapped_as_each_alone(tiny_pair, prompt, features, side):
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, features), Plan("sinks", 4, 1))
    lengths, longest = (5, 12, 9), 12
    alone = [transfer.prefill(prompt[row : row + 1, :length]) for row, length in enumerate(lengths)]
    places = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in lengths]
    real = torch.zeros(3, longest, dtype=torch.bool)

    def padded(name: str) -> list[torch.Tensor]:
        made = []
        for layer, like in enumerate(getattr(alone[0], name)):
            # What an engine leaves in its padding may be anything.
            made.append(torch.full((3, like.shape[1], longest, like.shape[3]), torch.nan))
            for row, place in enumerate(places):
                made[-1][row, :, place] = getattr(alone[row], name)[layer][0]
        return made

    for row, place in enumerate(places):
        real[row, place] = True
    hidden = None
    if features == "hidden":
        hidden = torch.full((3, longest, alone[0].hidden.shape[-1]), torch.nan)
        for row, place in enumerate(places):
            hidden[row, place] = alone[row].hidden[0]
    cache = KV(padded("keys"), padded("values"), hidden)
    ids = torch.zeros(3, longest, dtype=torch.int64)
    for start in (0, 2):
        found = transfer.span(cache, ids, start, real=real)
        for row, place in enumerate(places):
            wanted = transfer.span(alone[row], prompt[row : row + 1, : lengths[row]])
            skipped = max(start - place.start, 0)
            for mine, theirs in zip(tensors(found), tensors(wanted), strict=True):
                own = mine[row, :, max(place.start - start, 0) : place.stop - start]
                assert torch.allclose(own, theirs[0, :, skipped:], atol=1e-5, rtol=1e-5)
        assert all(tensor.isfinite().all() for tensor in tensors(found))


@pytest.mark.parametrize("chunk", [7, 1000])
def test_positions_far_into_a_text_are_those_of_the_whole(tiny_pair, prompt, chunk, monkeypatch):
    """Every chunk, of the whole and of a late piece, is turned by its own positions."""
    monkeypatch.setattr(apply, "_TOKENS", {"cpu": chunk})
    transfer = Transfer(tiny_pair, random_mapper(tiny_pair, "previous"), Plan("sinks", 4, 1))
    long = prompt.repeat(1, 3)
    longer = transfer.pair.source.prefill(long)
    whole = tiny_pair.rotated("target", transfer.mapper.map(tiny_pair.content("source", longer), long))
    for start, stop in ((0, 3 * PROMPT), (41, 57)):
        part = transfer.span(longer, long, start, stop)
        for mine, theirs in zip(tensors(part), tensors(whole.span(start, stop)), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5, rtol=1e-4)
