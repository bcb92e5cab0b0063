"""Conversations: mapping piece by piece equals mapping at once, own tokens stay, and hops are counted and bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.handoff.conversation import Conversation
from kvxfer.maps.blocks import DESIGNS, Features
from kvxfer.maps.columns import read_source
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.random_maps import direction

SMALL_DESIGNS = [
    *(DESIGNS[name] for name in ("same", "both", "previous", "embedding", "layer0", "hidden", "rich")),
    Features("relu", kinds="both", random_relu=20),
    Features("products", kinds="both", random_products=20),
    Features("far", previous=3),
]
PREVIOUS = DESIGNS["previous"]


def tokens(count: int, start: int = 0, batch: int = 2) -> Tensor:
    return (torch.arange(start, start + count) * 7 + torch.arange(batch)[:, None] * 11) % 60 + 4


def opened(
    pair: Pair, features: Features = PREVIOUS, exact_first: int = 0, max_hops: int | None = None
) -> Conversation:
    """Small and large, with a map in each direction."""
    transfers = {("small", "large"): direction(pair, features, exact_first)}
    transfers["large", "small"] = direction(pair.reversed(), features, exact_first)
    return Conversation({"small": pair.source, "large": pair.target}, transfers, max_hops)


def ping_pong(talk: Conversation, pieces: tuple[int, ...]) -> None:
    for turn, count in enumerate(pieces):
        own, other = ("large", "small") if turn % 2 else ("small", "large")
        talk.append(tokens(count, talk.tokens))
        talk.receive(own, other)
        talk.read(own)


def close(one: KV, other: KV, tolerance: float) -> bool:
    return all(
        torch.allclose(a, b, atol=tolerance, rtol=tolerance)
        for kind in ("keys", "values")
        for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True)
    )


@pytest.mark.parametrize("features", SMALL_DESIGNS, ids=lambda features: features.name)
def test_piece_by_piece_equals_mapping_the_whole_at_once(tiny_pair: Pair, features: Features) -> None:
    talk = opened(tiny_pair, features)
    for count in (5, 1, 2, 9):
        talk.append(tokens(count, talk.tokens))
        talk.read("small")
        talk.receive("large", "small")
    mapper = talk.transfers["small", "large"].mapper
    content = tiny_pair.content("source", read_source(tiny_pair, talk.ids, mapper.extras))
    whole = tiny_pair.rotated("target", mapper.map(content, talk.ids))
    held = talk.held("large")
    assert held.kv is not None
    assert held.kv.tokens == 17
    assert close(held.kv, whole, 2e-4)
    assert not held.own.any()
    assert held.hops.tolist() == [1] * 17


def test_the_first_tokens_are_always_the_receiver_s_own(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair, exact_first=4)
    talk.append(tokens(10))
    talk.read("small")
    talk.receive("large", "small", 8)
    held = talk.held("large")
    assert held.own.tolist() == [True] * 4 + [False] * 4
    assert held.hops.tolist() == [0] * 4 + [1] * 4
    assert held.kv is not None
    assert torch.equal(held.kv.span(0, 4).keys[2], tiny_pair.target.prefill(tokens(4)).keys[2])


def test_own_tokens_are_kept_bit_for_bit_and_mapped_ones_too(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair)
    ping_pong(talk, (6, 4, 5))
    before = {name: talk.held(name) for name in talk.models}
    ping_pong(talk, (3, 4, 5))
    for name, held in before.items():
        after = talk.held(name)
        assert held.kv is not None
        assert after.kv is not None
        for kind in ("keys", "values"):
            for a, b in zip(getattr(held.kv, kind), getattr(after.kv.span(0, held.tokens), kind), strict=True):
                assert torch.equal(a, b)
        assert torch.equal(after.own[: held.tokens], held.own)


def test_a_token_after_the_receiver_s_own_is_mapped_with_the_sender_s_one_before(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair)
    ping_pong(talk, (6, 4, 5))
    talk.receive("large", "small")
    sender, receiver, up = talk.held("small"), talk.held("large"), talk.transfers["small", "large"]
    assert sender.kv is not None
    assert receiver.kv is not None
    content = tiny_pair.content("source", sender.kv)
    whole = tiny_pair.rotated("target", up.mapper.map(content, talk.ids))
    assert close(receiver.kv.span(10, 15), whole.span(10, 15), 2e-4)


def test_hops_count_the_maps_behind_a_token_also_through_its_context(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair)
    ping_pong(talk, (3, 2, 2, 1))
    small, large = talk.held("small"), talk.held("large")
    assert small.own.tolist() == [True] * 3 + [False] * 2 + [True] * 2
    assert small.hops.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert large.own.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert large.hops.tolist() == [1, 1, 1, 1, 1, 3, 3, 3]
    assert (small.depth, large.depth) == (2, 3)


def test_max_hops_has_the_receiver_read_again(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair, max_hops=2)
    ping_pong(talk, (3, 2, 2, 1))
    large = talk.held("large")
    assert large.own.tolist() == [False] * 3 + [True] * 5
    assert large.hops.tolist() == [1] * 8
    once = opened(tiny_pair, max_hops=1)
    ping_pong(once, (3, 2, 2, 1))
    assert once.held("small").own.all()
    assert once.held("small").hops.tolist() == [0] * 7
    assert once.held("large").own.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True]


def test_no_hops_is_every_model_s_own_prefill(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair, max_hops=0)
    ping_pong(talk, (5, 4, 6))
    for name, model in talk.models.items():
        held = talk.held(name)
        assert held.own.all()
        assert held.kv is not None
        assert close(held.kv, model.prefill(talk.ids[:, : held.tokens]), 1e-5)


def chain(pair: Pair, features: Features, max_hops: int | None = None) -> Conversation:
    """Three models in a row: what the last one gets was mapped twice."""
    transfers = {("first", "second"): direction(pair, features)}
    transfers["second", "third"] = direction(pair.reversed(), features)
    models = {"first": pair.source, "second": pair.target, "third": pair.source}
    talk = Conversation(models, transfers, max_hops)
    talk.append(tokens(6))
    talk.read("first")
    talk.receive("second", "first")
    return talk


def test_what_was_mapped_can_be_mapped_on(tiny_pair: Pair) -> None:
    talk = chain(tiny_pair, PREVIOUS)
    talk.receive("third", "second")
    assert talk.held("third").hops.tolist() == [2] * 6
    bounded = chain(tiny_pair, PREVIOUS, max_hops=1)
    bounded.receive("third", "second")
    assert bounded.held("third").own.all()


def test_hidden_states_of_mapped_tokens_are_refused_by_name(tiny_pair: Pair) -> None:
    with pytest.raises(KvxferError, match=r"from second to third reads source_hidden.*max_hops=1"):
        chain(tiny_pair, DESIGNS["hidden"]).receive("third", "second")
    bounded = chain(tiny_pair, DESIGNS["hidden"], max_hops=1)
    bounded.receive("third", "second")
    assert bounded.held("third").own.all()


def test_hidden_states_are_kept_through_a_conversation(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair, DESIGNS["hidden"])
    ping_pong(talk, (4, 3, 5, 2))
    kv = talk.held("large").kv
    assert kv is not None
    assert kv.hidden is not None
    assert kv.hidden.shape[:2] == (2, 14)


def test_nothing_is_handed_over_without_a_map_of_that_direction(tiny_pair: Pair) -> None:
    up = {("small", "large"): direction(tiny_pair, PREVIOUS)}
    models = {"small": tiny_pair.source, "large": tiny_pair.target}
    with pytest.raises(KvxferError, match="no map from large to small"):
        Conversation(models, up).receive("small", "large")
    with pytest.raises(KvxferError, match="not one from large to small"):
        Conversation(models, {("large", "small"): direction(tiny_pair, PREVIOUS)})
    with pytest.raises(KvxferError, match="max_hops=-1"):
        Conversation(models, up, max_hops=-1)


def test_a_text_longer_than_a_model_s_positions_is_refused(tiny_pair: Pair) -> None:
    talk = opened(tiny_pair)
    with pytest.raises(KvxferError, match="conversation: "):
        talk.append(tokens(tiny_pair.longest_context + 1))
