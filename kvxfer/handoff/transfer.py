"""The handoff of a cache, step by step: what is evaluated is what is timed, and what a conversation is handed.

The source has read a prompt; the target is to go on. Nothing else makes a cache of a map: the evaluated conditions,
conversations, diagnostics and ``eval=latency`` all call ``Transfer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvxfer.maps.apply import Mapper, unwatched
from kvxfer.maps.plan import Plan
from kvxfer.maps.views import Angles, Views
from kvxfer.models import rope
from kvxfer.models.hf.model import Running
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.pair import Pair, Side

STEPS = ("export", "exact", "map", "inject", "held_back", "first_decode")
"""In their order; ``exact`` is the target's own prefill of the plan's first tokens, ``map`` the way from the source's
cache to the target's (strip, map, restore and write in one pass), ``held_back`` the prefill of the held-back tokens but
the last, and ``first_decode`` reads the last one and ends with the target's first token."""

Ids = Int[Tensor, "batch tokens"]
After = Callable[[str], None]
Turn = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def _nothing(step: str) -> None:
    """Nobody watches the steps."""


@dataclass(frozen=True)
class Transfer:
    """From a pair's source to its target through a map, under a plan.

    ``watch`` is called before every chunk of tokens that is mapped; what it raises ends the handoff.
    """

    pair: Pair
    mapper: Mapper
    plan: Plan
    watch: Callable[[], None] = unwatched

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

    def span(
        self,
        cache: KV,
        ids: Ids,
        start: int = 0,
        stop: int | None = None,
        real: Bool[Tensor, "batch tokens"] | None = None,
    ) -> KV:
        """The target's cache of tokens ``start`` to ``stop``, as if the whole had been mapped at once.

        Args:
            cache: the source's, rotated, of all tokens from the rows' start to ``stop`` (None: its end) or further.
            ids: the tokens of ``cache``.
            real: which of them are a row's own, where rows of several lengths are padded, left or right, and counted
                from its first own token on; nothing is read of the others, and what is written for them means nothing.

        Returns:
            The cache, rotated and in the target's dtype.
        """
        into = self._new(cache, (cache.tokens if stop is None else stop) - start)
        self.write(cache, ids, into, start, real)
        return into

    @torch.inference_mode()
    def write(
        self, cache: KV, ids: Ids, into: KV, start: int = 0, real: Bool[Tensor, "batch tokens"] | None = None
    ) -> None:
        """``span`` straight into a cache (or a part of one, ``KV.span``) that takes the tokens from ``start`` on."""
        self._pass(cache, ids, into, start, real, rotated=True)

    @torch.inference_mode()
    def content(self, cache: KV, ids: Ids) -> KV:
        """What the map gives of the source's rotated cache, before it is rotated: content, float32."""
        into = self._new(cache, cache.tokens, torch.float32)
        self._pass(cache, ids, into, 0, None, rotated=False)
        return into

    def _new(self, cache: KV, tokens: int, dtype: torch.dtype | None = None) -> KV:
        """Memory for so many of the target's tokens."""
        target = self.pair.target
        shape = (cache.batch, target.geometry.kv_heads, tokens, target.geometry.head_dim)

        def layers() -> LayerTensors:
            made = range(target.geometry.layers)
            return [torch.empty(shape, dtype=dtype or target.dtype, device=target.device) for _ in made]

        return KV(layers(), layers())

    def _pass(
        self, cache: KV, ids: Ids, into: KV, start: int, real: Bool[Tensor, "batch tokens"] | None, rotated: bool
    ) -> None:
        stop = start + into.tokens
        first = max(start - self.mapper.lookback, 0)
        places = None
        if real is not None:
            places, real = (real.cumsum(1) - 1).clamp_min(0), real[:, first:stop]
        source = Views.of(cache.span(first, stop), self._angles("source", rope.stripping, first, places))
        back = self._angles("target", rope.restoring, start, places) if rotated else None
        self.mapper.run(
            source, Views.of(into, back), self.mapper.known(ids[:, first:stop]), start - first, real, self.watch
        )

    def _angles(self, which: Side, turn: Turn, start: int, places: Int[Tensor, "batch tokens"] | None) -> Angles:
        """What turns a model's keys, of tokens counted from ``start`` on; ``places`` are positions, if rows differ."""
        model, device = self.pair.side(which), self.pair.target.device
        scaling = model.geometry.rotary.scaling

        def of(rows: slice, tokens: slice) -> tuple[Tensor, Tensor]:
            low, high = start + tokens.start, start + tokens.stop
            here: slice | Tensor = slice(None)
            if places is not None:
                positions = places[rows, low:high].to(model.device)
                low, high = int(positions.min()), int(positions.max()) + 1
                here = positions - low
            cos, sin = (x.to(device)[here] for x in model.cos_sin(high - low, low))
            if places is None:
                cos, sin = cos[None], sin[None]
            return turn(cos[:, :, None], sin[:, :, None], scaling)

        return of

    def exact(self, head: Ids) -> KV | None:
        """The target's own cache of the plan's first tokens; None if it has none."""
        first = min(self.plan.exact_first, head.shape[1])
        return self.pair.target.prefill(head[:, :first]) if first else None

    @torch.inference_mode()
    def handed(self, cache: KV, head: Ids, exact: KV | None) -> KV:
        """What the target is handed of a prompt's head: the first tokens exact, the rest mapped; each is written once.

        Args:
            cache: the source's, rotated, with what the map reads beside it.
            exact: as the method of this name gives it.
        """
        first = 0 if exact is None else exact.tokens
        into = self._new(cache, head.shape[1])
        if exact is not None:
            own = into.span(0, first)
            for place, tensor in zip((*own.keys, *own.values), (*exact.keys, *exact.values), strict=True):
                place.copy_(tensor)
        if first < head.shape[1]:
            self.write(cache, head, into.span(first, head.shape[1]), first)
        return into

    @torch.inference_mode()
    def first_token(
        self, source: Running, prompt: Int[Tensor, "batch prompt"], after: After = _nothing
    ) -> Int[Tensor, " batch"]:
        """The target's first token after a prompt whose head the source has read: the whole handoff.

        ``after`` is called with a step's name as soon as the step has been asked for (a GPU may still be running it).
        """
        head, tail = self.split(prompt)
        exported = self.pair.source.export(source)
        after("export")
        exact = self.exact(head)
        after("exact")
        handed = self.handed(exported, head, exact)
        after("map")
        target = self.pair.target.inject(handed)
        after("inject")
        if tail.shape[1] > 1:
            self.pair.target.extend(target, tail[:, :-1])
        after("held_back")
        token = self.pair.target.next_token(target, tail[:, -1:])
        after("first_decode")
        return token
