"""The caches to compare: what the target is handed under each condition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.columns import read_source
from kvxfer.maps.plan import Plan
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.hf import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

PRUNED = ("ancestor_copy",)
"""One more, for a pair whose source was pruned from its target."""

MAPPED = ("mapped", "mapped_all", "wrong_donor")
"""Conditions that depend on the map; all others are the same for every map of a pair."""

HANDED = ("identity", "mapped", "mapped_all", "floor", "raw_copy", "wrong_donor")
"""All conditions under which the target goes on from a cache that it is handed, in the order of a table."""

PREFIXED = ("ceiling", "source", "floor", "raw_copy", "mapped")
"""Conditions of text that follows a prefix, each from one prefill of each model."""

OWN = ("ceiling", "source", "no_context")
"""Conditions without a handed cache; they do not depend on the plan."""


@dataclass(frozen=True)
class Prepared:
    """A model, the cache it is handed (or None), and the prompt tokens that it still reads itself."""

    model: LoadedModel
    past: KV | None
    tail: Int64[Tensor, "batch tail"]


def own_conditions(pair: Pair, prompt: Int64[Tensor, "batch prompt"], context: int) -> dict[str, Prepared]:
    """Ceiling, source alone, and the target without the context.

    Without context the target still reads the row's first token, which the tokenizer or the corpus puts everywhere, if
    something of the prompt follows the context; otherwise only the last token.
    """
    question = prompt[:, context:] if context < prompt.shape[1] else prompt[:, -1:]
    bare = torch.cat([prompt[:, :1], question], dim=1) if context < prompt.shape[1] else question
    return {
        "ceiling": Prepared(pair.target, None, prompt),
        "source": Prepared(pair.source, None, prompt),
        "no_context": Prepared(pair.target, None, bare),
    }


def given_conditions(pair: Pair, plan: Plan, prompt: Int64[Tensor, "batch prompt"]) -> dict[str, Prepared]:
    """Every condition that hands the target a cache of the prompt less its held-back tokens and needs no map."""
    first, stop = plan.mapped_span(prompt.shape[1])
    head, tail = prompt[:, :stop], prompt[:, stop:]
    exact = pair.target.prefill(head)
    read = pair.source.prefill(head)
    caches = {"identity": exact, "floor": exact.zeros(), "raw_copy": _planned(exact, _copied(pair, read), first)}
    if (ancestry := find_ancestry(pair)) is not None:
        caches["ancestor_copy"] = _planned(exact, ancestry.copy(read), first)
    return {name: Prepared(pair.target, cache, tail) for name, cache in caches.items()}


def mapped_conditions(
    pair: Pair,
    mapper: Mapper,
    plan: Plan,
    prompt: Int64[Tensor, "batch prompt"],
    donors: Int64[Tensor, "batch prompt"],
    wanted: Sequence[str] = MAPPED,
    read: KV | None = None,
) -> dict[str, Prepared]:
    """The conditions that hand the target a mapped cache of the prompt less its held-back tokens.

    Args:
        donors: for each row, the prompt whose mapped cache it gets in the wrong-donor control.
        wanted: which of ``MAPPED``; only these are computed.
        read: what the map reads of the prompt less its held-back tokens, if the source has prefilled it already.
    """
    transfer = Transfer(pair, mapper, plan)
    head, tail = transfer.split(prompt)
    exact = transfer.exact(head)
    mapped = transfer.mapped(head) if read is None else transfer.map_cache(read, head)
    caches = {"mapped": transfer.planned(mapped, exact), "mapped_all": mapped}
    if "wrong_donor" in wanted:
        caches["wrong_donor"] = transfer.planned(transfer.mapped(transfer.split(donors)[0]), exact)
    return {name: Prepared(pair.target, caches[name], tail) for name in MAPPED if name in wanted}


def prefix_conditions(
    pair: Pair, mapper: Mapper, plan: Plan, prompt: Int64[Tensor, "batch prompt"]
) -> dict[str, Prepared]:
    """``PREFIXED``: every condition goes on from a cache of the prompt less its held-back tokens.

    Both models prefill it once, and no vocabulary logits are made of it: long prompts cost their caches.
    """
    first, stop = plan.mapped_span(prompt.shape[1])
    head, tail = prompt[:, :stop], prompt[:, stop:]
    exact, read = pair.target.prefill(head), read_source(pair, head, mapper.extras)
    return {
        "ceiling": Prepared(pair.target, exact, tail),
        "source": Prepared(pair.source, read, tail),
        "floor": Prepared(pair.target, exact.zeros(), tail),
        "raw_copy": Prepared(pair.target, _planned(exact, _copied(pair, read), first), tail),
        **mapped_conditions(pair, mapper, plan, prompt, prompt, ("mapped",), read),
    }


def _copied(pair: Pair, read: KV) -> KV:
    """The source's cache as the target's, layer by relative depth."""
    content = relative_depth(pair.content("source", read), pair.target.geometry.layers)
    return pair.rotated("target", content)


def _planned(exact: KV, cache: KV, first: int) -> KV:
    """The first tokens exact, the rest from the other cache."""
    return KV.join([exact.span(0, first), cache.span(first, cache.tokens)])


def relative_depth(content: KV, layers: int) -> KV:
    """Each target layer takes the source layer at its relative depth, unchanged."""
    last = content.layers - 1
    index = [round(layer * last / max(layers - 1, 1)) for layer in range(layers)]
    return KV([content.keys[i] for i in index], [content.values[i] for i in index])
