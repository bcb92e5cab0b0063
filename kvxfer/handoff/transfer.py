"""The handoff of a cache, step by step: what is evaluated is what is timed, and what a conversation is handed.

The source has read a prompt; the target is to go on. Nothing else makes a cache of a map: the evaluated conditions,
conversations, diagnostics and ``eval=latency`` all call ``Transfer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.maps.apply import Mapper
from kvxfer.maps.plan import Plan
from kvxfer.models.hf.model import Running
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

STEPS = ("export", "strip", "map", "restore", "exact", "inject", "held_back", "first_decode")
"""In their order; ``exact`` is the target's own prefill of the plan's first tokens, ``held_back`` that of the held-back
tokens but the last, and ``first_decode`` reads the last one and ends with the target's first token."""

Ids = Int[Tensor, "batch tokens"]
After = Callable[[str], None]


def _nothing(step: str) -> None:
    """Nobody watches the steps."""


@dataclass(frozen=True)
class Transfer:
    """From a pair's source to its target through a map, under a plan.

    ``after`` of its methods is called with a step's name as soon as the step has been asked for (on a GPU it may still
    be running).
    """

    pair: Pair
    mapper: Mapper
    plan: Plan

    def split(self, prompt: Int[Tensor, "batch prompt"]) -> tuple[Int[Tensor, "batch head"], Int[Tensor, "batch tail"]]:
        """What is handed over of a prompt, and the tokens that the target is held back to read itself."""
        stop = self.plan.mapped_span(prompt.shape[1])[1]
        return prompt[:, :stop], prompt[:, stop:]

    def read(self, head: Ids) -> Running:
        """The source once it has read tokens, with what the map reads beside its cache. Not a part of a handoff."""
        return self.pair.source.begin(head, hidden=self.mapper.needs_hidden)

    def prefill(self, head: Ids) -> KV:
        """The source's cache of tokens, with what the map reads beside it."""
        return self.pair.source.export(self.read(head))

    def span_and_content(
        self, cache: KV, ids: Ids, start: int = 0, stop: int | None = None, after: After = _nothing
    ) -> tuple[KV, KV]:
        """The target's cache of tokens ``start`` to ``stop``, as if the whole had been mapped at once.

        Args:
            cache: the source's, rotated, of all tokens from position 0 to ``stop`` (None: its end) or further.
            ids: the tokens of ``cache``.

        Returns:
            The cache, rotated and in the target's dtype, and the mapped content (float32) that it was made of.
        """
        stop = cache.tokens if stop is None else stop
        first = max(start - self.mapper.lookback, 0)
        content = self.pair.content("source", cache.span(first, stop), first)
        after("strip")
        mapped = self.mapper.map(content, ids[:, first:stop]).span(start - first, stop - first)
        after("map")
        restored = self.pair.rotated("target", mapped, start)
        after("restore")
        return restored, mapped

    def span(self, cache: KV, ids: Ids, start: int = 0, stop: int | None = None, after: After = _nothing) -> KV:
        """The cache of ``span_and_content`` alone."""
        return self.span_and_content(cache, ids, start, stop, after)[0]

    def exact(self, head: Ids) -> KV | None:
        """The target's own cache of the plan's first tokens; None if it has none."""
        first = min(self.plan.exact_first, head.shape[1])
        return self.pair.target.prefill(head[:, :first]) if first else None

    def planned(self, mapped: KV, exact: KV | None) -> KV:
        """The first tokens exact, the rest mapped."""
        return mapped if exact is None else mapped.starting_with(exact)

    @torch.inference_mode()
    def first_token(
        self, source: Running, prompt: Int[Tensor, "batch prompt"], after: After = _nothing
    ) -> Int[Tensor, " batch"]:
        """The target's first token after a prompt whose head the source has read: the whole handoff."""
        head, tail = self.split(prompt)
        exported = self.pair.source.export(source)
        after("export")
        mapped = self.span(exported, head, after=after)
        exact = self.exact(head)
        after("exact")
        target = self.pair.target.inject(self.planned(mapped, exact))
        after("inject")
        if tail.shape[1] > 1:
            self.pair.target.extend(target, tail[:, :-1])
        after("held_back")
        token = self.pair.target.next_token(target, tail[:, -1:])
        after("first_decode")
        return token
