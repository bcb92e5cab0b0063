"""The caches to compare: what the target is handed under each condition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.plan import Plan
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

PRUNED = ("ancestor_copy",)
"""One more, for a pair whose source was pruned from its target."""

MAPPED = ("mapped", "mapped_all", "wrong_donor", "random_map")
"""Conditions that depend on the map; all others are the same for every map of a pair."""

HANDED = ("identity", "mapped", "mapped_all", "floor", "raw_copy", "wrong_donor", "random_map")
"""All conditions under which the target goes on from a cache that it is handed, in the order of a table."""

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
    if context < prompt.shape[1]:
        bare = without_context(pair, prompt, prompt[:, context:])
    else:
        bare = Prepared(pair.target, None, prompt[:, -1:])
    return {
        "ceiling": Prepared(pair.target, None, prompt),
        "source": Prepared(pair.source, None, prompt),
        "no_context": bare,
    }


def without_context(pair: Pair, prompt: Int64[Tensor, "batch prompt"], rest: Int64[Tensor, "batch rest"]) -> Prepared:
    """The target with what it reads itself anyway, after the row's first token."""
    return Prepared(pair.target, None, torch.cat([prompt[:, :1], rest], dim=1))


def unmapped(pair: Pair, exact: KV, read: KV, own: KV) -> dict[str, KV]:
    """Caches that a target could go on from without any map: zeros, the source's as it is, its ancestors'.

    Each begins with the tokens that the plan has the target compute, as a mapped cache does.

    Args:
        exact: the target's own, rotated.
        read: the source's, rotated, of the same tokens.
        own: the target's own first tokens.
    """
    found = {"floor": exact.zeros().starting_with(own), "raw_copy": _copied(pair, read).starting_with(own)}
    if (ancestry := find_ancestry(pair)) is not None:
        found["ancestor_copy"] = ancestry.copy(read).starting_with(own)
    return found


def given_conditions(pair: Pair, plan: Plan, prompt: Int64[Tensor, "batch prompt"]) -> dict[str, Prepared]:
    """Every condition that hands the target a cache of the prompt less its held-back tokens and needs no map."""
    first, stop = plan.mapped_span(prompt.shape[1])
    head, tail = prompt[:, :stop], prompt[:, stop:]
    exact = pair.target.prefill(head)
    read = pair.source.prefill(head)
    caches = {"identity": exact, **unmapped(pair, exact, read, exact.span(0, first))}
    return {name: Prepared(pair.target, cache, tail) for name, cache in caches.items()}


@dataclass(frozen=True)
class Controls:
    """What the controls of a mapped cache are made of.

    Attributes:
        donors: for each row, the prompt whose mapped cache it gets in the wrong-donor control.
        random: the handover through a random map of the map's size.
    """

    donors: Int64[Tensor, "batch prompt"]
    random: Transfer


def mapped_conditions(
    transfer: Transfer, prompt: Int64[Tensor, "batch prompt"], controls: Controls | None = None, read: KV | None = None
) -> dict[str, Prepared]:
    """``mapped``, and with controls all of ``MAPPED``: a mapped cache of the prompt less its held-back tokens.

    Args:
        read: what the map reads of the prompt less its held-back tokens, if the source has prefilled it already.
    """
    head, tail = transfer.split(prompt)
    exact, read = transfer.exact(head), transfer.prefill(head) if read is None else read
    caches = {"mapped": transfer.handed(read, head, exact)}
    if controls is not None:
        donors = transfer.split(controls.donors)[0]
        caches["mapped_all"] = transfer.span(read, head)
        caches["wrong_donor"] = transfer.handed(transfer.prefill(donors), donors, exact)
        caches["random_map"] = controls.random.handed(read, head, exact)
    return {name: Prepared(transfer.pair.target, cache, tail) for name, cache in caches.items()}


def prefix_conditions(transfer: Transfer, prompt: Int64[Tensor, "batch prompt"]) -> dict[str, Prepared]:
    """Every condition goes on from a cache of the prompt less its held-back tokens, also where a model has its own.

    Both models prefill it once, and no vocabulary logits are made of it: long prompts cost their caches.
    """
    pair, (head, tail) = transfer.pair, transfer.split(prompt)
    exact, read = pair.target.prefill(head), transfer.prefill(head)
    own = exact.span(0, transfer.plan.mapped_span(prompt.shape[1])[0])
    return {
        "ceiling": Prepared(pair.target, exact, tail),
        "source": Prepared(pair.source, read, tail),
        "no_context": without_context(pair, prompt, tail),
        **{name: Prepared(pair.target, cache, tail) for name, cache in unmapped(pair, exact, read, own).items()},
        **mapped_conditions(transfer, prompt, read=read),
    }


def _copied(pair: Pair, read: KV) -> KV:
    """The source's cache as the target's, layer by relative depth."""
    content = relative_depth(pair.content("source", read), pair.target.geometry.layers)
    return pair.rotated("target", content)


def relative_depth(content: KV, layers: int) -> KV:
    """Each target layer takes the source layer at its relative depth, unchanged."""
    last = content.layers - 1
    index = [round(layer * last / max(layers - 1, 1)) for layer in range(layers)]
    return KV([content.keys[i] for i in index], [content.values[i] for i in index])
