"""A conversation that several models take turns in: each keeps what it computed itself, and is handed only what is new.

A token's hops say how many maps lie between it and the text. A mapped token has one more than it had with its sender. A
token that a model reads itself attends to all tokens before it, so it has as many as the most of these; 0 where nothing
before it was mapped. An error of a map can travel either way, so both count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.handoff.transfer import Transfer
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV


@dataclass(frozen=True)
class Held:
    """What one model has of a conversation: its cache (rotated; None before the first token) and where it came from.

    Attributes:
        own: whether the model computed a token itself; the others were mapped.
        hops: how many maps lie between a token and the text.
    """

    kv: KV | None
    own: Bool[Tensor, " tokens"]
    hops: Int64[Tensor, " tokens"]

    @staticmethod
    def nothing() -> Held:
        """Before the first token."""
        return Held(None, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))

    @property
    def tokens(self) -> int:
        return len(self.own)

    @property
    def depth(self) -> int:
        """The most hops of any token; 0 for none."""
        return int(self.hops.max()) if self.tokens else 0

    def extended(self, kv: KV, own: bool, hops: Int64[Tensor, " new"]) -> Held:
        """With ``kv`` in place of the cache, which has so many more tokens at its end."""
        return Held(kv, torch.cat([self.own, torch.full((len(hops),), own)]), torch.cat([self.hops, hops]))


class Conversation:
    """Text that grows, and what each model has of it.

    Args:
        models: by any name.
        transfers: the ways of handing over there are, by names of sender and receiver. A receiver always reads the
            exact tokens of its plan itself.
        max_hops: a token that would have more is not mapped: the receiver reads it itself. None for no limit.

    Raises:
        KvxferError: ``max_hops`` is negative, or a transfer is of other models than the two that it is named for.
    """

    def __init__(
        self,
        models: Mapping[str, LoadedModel],
        transfers: Mapping[tuple[str, str], Transfer],
        max_hops: int | None = None,
    ) -> None:
        if max_hops is not None and max_hops < 0:
            raise KvxferError(f"max_hops={max_hops} must be 0 or more, or null for no limit")
        for (sender, receiver), transfer in transfers.items():
            pair = transfer.pair
            if pair.source is not models.get(sender) or pair.target is not models.get(receiver):
                raise KvxferError(f"the map of {pair.name} is not one from {sender} to {receiver}")
        self.models, self.transfers, self.max_hops = dict(models), dict(transfers), max_hops
        self.ids: Int64[Tensor, "batch tokens"] = torch.zeros(0, 0, dtype=torch.int64)
        self._held = {name: Held.nothing() for name in models}
        self._exports_hidden = {sender for (sender, _), transfer in transfers.items() if transfer.mapper.needs_hidden}

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]

    def held(self, name: str) -> Held:
        return self._held[name]

    def hold(self, name: str, held: Held) -> None:
        """Put something in the place of what a model has: what it computed elsewhere, or had before."""
        self._held[name] = held

    def append(self, ids: Int[Tensor, "batch new"]) -> None:
        """More text, which no model has read yet."""
        for transfer in self.transfers.values():
            transfer.pair.check_length(self.tokens + ids.shape[1], "conversation")
        self.ids = torch.cat([self.ids, ids], dim=1) if self.tokens else ids.to(torch.int64)

    def read(self, name: str, stop: int | None = None) -> None:
        """The model computes all that it lacks itself, up to token ``stop`` (the end of the text)."""
        held, stop = self._held[name], self.tokens if stop is None else stop
        if held.tokens >= stop:
            return
        model, new = self.models[name], self.ids[:, held.tokens : stop]
        kv = model.prefill(new, held.kv, hidden=name in self._exports_hidden)
        self._held[name] = held.extended(kv, True, torch.full((new.shape[1],), held.depth))

    def receive(self, name: str, sender: str, stop: int | None = None) -> None:
        """Hand a model all that it lacks and the sender has, up to token ``stop`` (the end of the text).

        What it has already stays as it is, bit for bit. Raises KvxferError if there is no map for this direction.
        """
        if (sender, name) not in self.transfers:
            raise KvxferError(f"there is no map from {sender} to {name}")
        given = self._held[sender]
        stop = min(given.tokens, self.tokens if stop is None else stop)
        self.read(name, min(self.transfers[sender, name].plan.exact_first, stop))
        while (start := self._held[name].tokens) < stop:
            hops = given.hops[start:stop] + 1
            allowed = hops <= (int(hops.max()) if self.max_hops is None else self.max_hops)
            changes = torch.nonzero(allowed != allowed[0])
            count = int(changes[0]) if len(changes) else len(allowed)
            if bool(allowed[0]):
                self._map(name, sender, start, start + count)
            else:
                self.read(name, start + count)

    def _map(self, name: str, sender: str, start: int, stop: int) -> None:
        transfer, given, held = self.transfers[sender, name], self._held[sender], self._held[name]
        if transfer.mapper.needs_hidden and not bool(given.own[start:stop].all()):
            raise KvxferError(
                f"the map from {sender} to {name} reads source_hidden, and {sender} was itself handed some of these "
                "tokens, so it has no hidden states of them: set max_hops=1, or use a map without them"
            )
        assert given.kv is not None
        new = transfer.span(given.kv, self.ids, start, stop)
        if name in self._exports_hidden:
            # Never read: what was mapped here is not mapped on by a map that reads hidden states.
            batch, hidden = self.ids.shape[0], self.models[name].geometry.hidden
            new = replace(new, hidden=new.keys[0].new_zeros(batch, stop - start, hidden))
        kv = new if held.kv is None else KV.join([held.kv, new])
        self._held[name] = held.extended(kv, False, given.hops[start:stop] + 1)
