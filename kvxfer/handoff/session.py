"""A conversation that changes model as it goes: who answers is handed what is new to it, or reads it itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.handoff.admission import Refusal
from kvxfer.handoff.conversation import Conversation
from kvxfer.handoff.decoding import spoken
from kvxfer.handoff.record import APPLIED, FALLBACK, UNSUPPORTED, HandoffRecord
from kvxfer.handoff.serving import Answer, Handoff, Watch
from kvxfer.handoff.transfer import Transfer
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV


class Session:
    """Models that take turns in one conversation. It belongs to one conversation and one thread.

    Args:
        handoffs: the ways of handing over there are, by names of sender and receiver; two handoffs of one pair, there
            and back, share its two models.
        max_hops: a token with more maps between it and the text is read by the receiver itself; None for no limit.

    Raises:
        KvxferError: one name is given to two models.
    """

    def __init__(self, handoffs: Mapping[tuple[str, str], Handoff], max_hops: int | None = None) -> None:
        self.handoffs = dict(handoffs)
        models: dict[str, LoadedModel] = {}
        for (sender, receiver), handoff in self.handoffs.items():
            for name, model in ((sender, handoff.pair.source), (receiver, handoff.pair.target)):
                if models.setdefault(name, model) is not model:
                    raise KvxferError(f"{name} is two models: handoffs there and back share theirs (Handoff.of)")
        self.talk = Conversation(models, {}, max_hops)
        self._tokenizer = next(iter(self.handoffs.values())).pair.tokenizer

    def say(self, text: str | Int[Tensor, "1 new"]) -> None:
        """Add to the text; nobody has read it yet."""
        if isinstance(text, str):
            found = self._tokenizer(text, add_special_tokens=not self.talk.tokens)["input_ids"]
            text = torch.tensor([found], dtype=torch.int64)
        if not text.shape[1]:
            raise KvxferError("say: there are no tokens in it")
        self.talk.append(text)

    @torch.inference_mode()
    def generate(self, name: str, max_new_tokens: int = 64, request: str | None = None) -> Iterator[str | Answer]:
        """A model's greedy answer to all that was said, piece by piece, and then the ``Answer``; it joins the text.

        Raises:
            KvxferError: there is no model of this name, or nothing was said.
        """
        if name not in self.talk.models:
            raise KvxferError(f"generate: {name!r} is none of {', '.join(self.talk.models)}")
        if not self.talk.tokens:
            raise KvxferError("generate: nothing was said yet")
        record = self._catch_up(name, self.talk.tokens - 1, uuid.uuid4().hex if request is None else request)
        model, held = self.talk.models[name], self.talk.held(name)
        running, new = model.inject(held.kv), list[int]()
        rest = self.talk.ids[:, held.tokens :].to(model.device)
        yield from spoken(model, running, rest, max_new_tokens, new)
        if new:
            self.talk.append(torch.tensor([new], dtype=torch.int64))
        own = model.export(running)
        read = own.tokens - held.tokens
        self.talk.hold(name, held.extended(own, True, torch.full((read,), held.depth)))
        yield Answer(self._tokenizer.decode(new), torch.tensor(new, dtype=torch.int64), record)

    @torch.inference_mode()
    def read(self, name: str) -> None:
        """Let a model read all that was said, so that it can be handed on."""
        self.talk.read(name)

    def _catch_up(self, name: str, stop: int, request: str) -> HandoffRecord:
        """Give a model all of the text up to a token, by the handoff that has most of it."""
        before = self.talk.held(name)
        known = {sender: self.talk.held(sender).tokens for sender, receiver in self.handoffs if receiver == name}
        sender = max(known, key=known.__getitem__, default=None)
        if sender is None or known[sender] <= before.tokens:
            self.talk.read(name, stop)
            return _exact(request, Refusal("own", f"nobody else has read what is new to {name}"), stop - before.tokens)
        handoff = self.handoffs[sender, name]
        watch = handoff.watch()

        def work(transfer: Transfer) -> KV | None:
            self.talk.transfers[sender, name] = transfer
            self.talk.receive(name, sender, stop)
            watch.after("map")
            mapped = self._mapped(name, before.tokens)
            if mapped is not None:
                handoff.check(mapped)
            watch.after("check")
            self.talk.read(name, stop)
            watch.after("exact")
            return mapped

        found = handoff.attempt(stop + 1 - before.tokens, watch, work)
        if isinstance(found, Refusal):
            self.talk.hold(name, before)
            watch.restart()
            self.talk.read(name, stop)
            watch.after("prefill")
            record = replace(
                _exact(request, found, stop - before.tokens),
                status=FALLBACK if handoff.admission.unsupported is None else UNSUPPORTED,
                milliseconds=watch.parts,
                map=handoff.hash,
            )
        else:
            record = _applied(handoff, request, (before.tokens, stop), found, watch)
        handoff.accounts.keep(record)
        return record

    def _mapped(self, name: str, start: int) -> KV | None:
        """What was mapped for a model from a token on; None for nothing."""
        held = self.talk.held(name)
        new = ~held.own
        new[:start] = False
        if held.kv is None or not bool(new.any()):
            return None
        return held.kv.apply(lambda x: x[..., new.to(x.device), :])


def _exact(request: str, refusal: Refusal, tokens: int) -> HandoffRecord:
    """Of tokens that the model read itself, and the last one."""
    return HandoffRecord(request, FALLBACK, refusal.reason, refusal.why, 0, tokens + 1, {}, 0, 1.0, None)


def _applied(handoff: Handoff, request: str, span: tuple[int, int], mapped: KV | None, watch: Watch) -> HandoffRecord:
    start, stop = span
    count = 0 if mapped is None else mapped.tokens
    parts = [] if mapped is None else [*mapped.keys, *mapped.values]
    return HandoffRecord(
        request,
        APPLIED,
        None,
        None,
        mapped=count,
        exact=stop + 1 - start - count,
        milliseconds=watch.parts,
        bytes=sum(part.nbytes for part in parts),
        flops_share=handoff.share_of_new(start, stop + 1, count),
        map=handoff.hash,
    )
