"""Sessions: models that take turns, each handed only what is new, and what goes wrong changes no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.handoff.conversation import Conversation
from kvxfer.handoff.serving import Answer, Handoff
from kvxfer.handoff.session import Session
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import DESIGNS
from kvxfer.models.pair import Pair
from tests.handoff.serving import ANY, greedy, keep, plan, prompt, record, saved
from tests.random_maps import random_map


def both_ways(pair: Pair, folder: Path, exact: bool = False) -> dict[tuple[str, str], Handoff]:
    """There and back; by random maps, or (of one model with itself) by maps that change nothing."""
    found = {}
    for names, own in ((("small", "large"), pair), (("large", "small"), pair.reversed())):
        home = folder / names[0]
        cache_map = saved(own, home, None if exact else random_map(own, DESIGNS["same"]))
        keep(home, record(cache_map))
        found[names] = Handoff.of(own, home, replace(ANY, norms=1e9), plan=plan())
    return found


def answered(session: Session, name: str, most: int = 5) -> Answer:
    *pieces, last = session.generate(name, most)
    assert isinstance(last, Answer)
    assert "".join(map(str, pieces)) == last.text
    return last


def test_identity_maps_through_ten_turns_are_the_target_alone(tiny_pair: Pair, tmp_path: Path) -> None:
    pair = replace(tiny_pair, source=tiny_pair.target)
    # Two names of one model are two holders of caches.
    session, text = Session(both_ways(pair, tmp_path, exact=True)), torch.zeros(1, 0, dtype=torch.int64)
    for turn in range(10):
        said = prompt(9 + turn)
        session.say(said)
        name, other = ("small", "large") if turn % 2 else ("large", "small")
        session.read(other)
        text = torch.cat([text, said], dim=1)
        answer = answered(session, name)
        assert answer.record.status == "applied"
        assert answer.record.mapped > 0
        assert answer.ids.tolist() == greedy(pair, text, 5)
        text = torch.cat([text, answer.ids[None]], dim=1)
        own = pair.target.prefill(text[:, : session.talk.held(name).tokens])
        held = session.talk.held(name).kv
        assert held is not None
        for a, b in zip((*own.keys, *own.values), (*held.keys, *held.values), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert session.talk.ids.equal(text)


def test_a_handoff_maps_only_what_is_new(tiny_pair: Pair, tmp_path: Path) -> None:
    session = Session(both_ways(tiny_pair, tmp_path))
    session.say(prompt(20))
    session.read("small")
    first = answered(session, "large").record
    assert (first.mapped, first.exact) == (15, 5)
    session.say(prompt(8))
    session.read("small")
    second = answered(session, "large").record
    # The large one has its own answer's first four tokens; the last, and the 8 that were said, are new.
    assert (second.mapped, second.exact) == (8, 1)
    before = session.talk.held("large").kv
    session.say(prompt(3))
    third = answered(session, "large").record
    assert (third.status, third.reason, third.mapped) == ("fallback", "own", 0)
    after = session.talk.held("large").kv
    assert before is not None
    assert after is not None
    assert torch.equal(after.keys[0][:, :, : before.tokens], before.keys[0])


def test_a_handoff_of_too_many_hops_is_read(tiny_pair: Pair, tmp_path: Path) -> None:
    session = Session(both_ways(tiny_pair, tmp_path), max_hops=1)
    session.say(prompt(20))
    session.read("small")
    answered(session, "large")
    session.say(prompt(6))
    session.read("large")
    back = answered(session, "small").record
    assert session.talk.held("small").depth <= 1
    assert back.status == "applied"


def test_fallback_in_a_session_leaves_nothing_of_what_failed(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that ends in the middle: the answer is the target's own, and the next turn is handed over again."""
    session, inner = Session(both_ways(tiny_pair, tmp_path)), Mapper.run

    def broken(self: Mapper, *given: object, **named: object) -> None:
        inner(self, *given, **named)  # it has written by then
        raise RuntimeError("on its way")

    session.say(prompt(20))
    session.read("small")
    with monkeypatch.context() as patch:
        patch.setattr(Mapper, "run", broken)
        answer = answered(session, "large")
    assert (answer.record.status, answer.record.reason) == ("fallback", "error")
    assert answer.ids.tolist() == greedy(tiny_pair, prompt(20), 5)
    session.say(prompt(9))
    session.read("small")
    assert answered(session, "large").record.status == "applied"

    session.say(prompt(4))
    session.read("small")
    monkeypatch.setattr(Conversation, "_map", lambda *given: 1 / 0)
    assert answered(session, "large").record.reason == "error"


def test_what_a_session_cannot_do_is_told(tiny_pair: Pair, tmp_path: Path) -> None:
    handoffs = both_ways(tiny_pair, tmp_path)
    session = Session(handoffs)
    for wrong, said in (
        (lambda: next(session.generate("large")), "nothing was said"),
        (lambda: session.say(""), "no tokens"),
    ):
        with pytest.raises(KvxferError, match=said):
            wrong()
    session.say("the key")
    with pytest.raises(KvxferError, match="'huge' is none of small, large"):
        next(session.generate("huge"))
    with pytest.raises(KvxferError, match="large is two models"):
        Session(handoffs | {("large", "small"): handoffs["small", "large"]})
