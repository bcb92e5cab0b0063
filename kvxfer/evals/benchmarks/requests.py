"""What a benchmark harness asks of a language model, answered by a target that goes on from a cache it is handed.

A request is a context and what is to be scored or decoded after it. The context is handed over under one condition
(``Handover``) once for all that is asked after it, however many answers a question has; where nothing is handed over
(ceiling, source) the model reads it anew with each answer, in one plain pass. Contexts of equal length share
a forward pass, so nothing is padded and no token's position depends on its neighbours in a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared, mapped_conditions, unmapped, without_context
from kvxfer.evals.items import equal_lengths
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair

Condition = Literal["ceiling", "identity", "source", "mapped", "no_context", "floor", "raw_copy", "ancestor_copy"]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Handover:
    """How a context reaches the model that goes on from it.

    ``ceiling`` and ``source`` are the target and the source on their own prefill, in one plain forward pass. The others
    hand the target a cache of the context less its held-back tokens: its own (``identity``), the mapped one under the
    plan (``mapped``), or what costs no map (``kvxfer.evals.conditions.unmapped``); ``no_context`` is the target with
    the context's first token and its held-back ones alone. A context no longer than what is held back leaves nothing to
    hand over: the target reads it itself.
    """

    pair: Pair
    plan: Plan
    condition: Condition
    mapper: Mapper | None = None

    def __post_init__(self) -> None:
        if self.condition == "mapped" and self.mapper is None:
            raise KvxferError("condition mapped needs a map; give one with map=<directory or run id>")

    def prepare(self, contexts: Int64[Tensor, "batch context"]) -> Prepared:
        """The model, the cache that it is handed, and what it still reads itself."""
        if self.condition == "source":
            return Prepared(self.pair.source, None, contexts)
        stop = contexts.shape[1] - self.plan.hold_back
        if self.condition == "ceiling" or stop < 1:
            return Prepared(self.pair.target, None, contexts)
        if self.condition == "mapped":
            assert self.mapper is not None
            return mapped_conditions(Transfer(self.pair, self.mapper, self.plan), contexts)["mapped"]
        head, tail = contexts[:, :stop], contexts[:, stop:]
        if self.condition == "no_context":
            return without_context(self.pair, contexts, tail)
        exact = self.pair.target.prefill(head)
        if self.condition == "identity":
            return Prepared(self.pair.target, exact, tail)
        first = exact.span(0, self.plan.mapped_span(contexts.shape[1])[0])
        caches = unmapped(self.pair, exact, self.pair.source.prefill(head), first)
        return Prepared(self.pair.target, caches[self.condition], tail)


def cut(context: Sequence[int], continuation: Sequence[int], longest: int) -> tuple[Tokens, Tokens]:
    """A request cut from the left to what the models can read: ``longest`` tokens and one that is only scored."""
    if not 1 <= len(continuation) <= longest:
        raise KvxferError(
            f"eval.tasks: an answer of {len(continuation)} tokens can't be scored; this pair scores 1 to {longest}"
        )
    whole = (*context, *continuation)[-(longest + 1) :]
    return whole[: -len(continuation)], tuple(continuation)


@torch.inference_mode()
def score_continuations(
    handover: Handover, requests: Sequence[tuple[Tokens, Tokens]], batch_size: int, advance: Callable[[int], None]
) -> list[tuple[float, bool]]:
    """Log-likelihoods of (context, continuation) requests, in their order; each distinct context is prepared once.

    In nats, summed over the continuation, and with whether decoding greedily would have given it.

    Args:
        batch_size: contexts, and continuations, per forward pass.
        advance: told how many requests are done.
    """
    after: dict[Tokens, list[int]] = {}
    for number, (context, _) in enumerate(requests):
        after.setdefault(context, []).append(number)
    found: dict[int, tuple[float, bool]] = {}
    for contexts in equal_lengths(list(after), batch_size):
        prepared = handover.prepare(torch.tensor(contexts))
        # What several continuations have in common but for their last token is read once.
        branches: dict[tuple[int, Tokens], list[int]] = {}
        for row, context in enumerate(contexts):
            for number in after[context]:
                branches.setdefault((row, requests[number][1][:-1]), []).append(number)
        for part in equal_lengths(list(branches), batch_size, key=lambda branch: len(branch[1])):
            logs = _branch_logs(prepared, part)
            for place, branch in enumerate(part):
                for number in branches[branch]:
                    wanted = torch.tensor(requests[number][1], device=logs.device)
                    nats = float(logs[place].gather(-1, wanted[:, None]).sum())
                    found[number] = nats, bool((logs[place].argmax(-1) == wanted).all())
        advance(sum(len(after[context]) for context in contexts))
    return [found[number] for number in range(len(requests))]


def _branch_logs(prepared: Prepared, branches: Sequence[tuple[int, Tokens]]) -> Float[Tensor, "branch tokens vocab"]:
    """Log-probabilities of what follows each context, and each token of its continuation but the last."""
    rows = torch.tensor([row for row, _ in branches])
    past = prepared.past
    if past is not None:
        past = past.rows(rows.to(past.keys[0].device))
    given = torch.tensor([tokens for _, tokens in branches], dtype=torch.int64).reshape(len(branches), -1)
    ids = torch.cat([prepared.tail[rows], given], dim=1)
    return prepared.model.logits(ids, past, keep=given.shape[1] + 1).log_softmax(-1)


@dataclass(frozen=True)
class Decoding:
    """How an answer is written: until a stop string, an end token, or ``most`` tokens.

    ``temperature`` 0 is greedy. Otherwise tokens are drawn from the ``top_k`` likeliest (0: all) that together just
    reach ``top_p``.
    """

    most: int
    until: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@torch.inference_mode()
def write_answers(
    handover: Handover,
    contexts: Sequence[Tokens],
    decoding: Decoding,
    batch_size: int,
    seeds: Sequence[str],
    advance: Callable[[int], None],
) -> list[str]:
    """The text that follows each context, without the stop string that ended it and without special tokens.

    Args:
        seeds: one for each context. What is drawn depends on it and on the probabilities, not on the batch: under every
            condition the same numbers are drawn.
    """
    found: dict[int, str] = {}
    for part in equal_lengths(range(len(contexts)), batch_size, key=lambda number: len(contexts[number])):
        prepared = handover.prepare(torch.tensor([contexts[number] for number in part]))
        dice = [random.Random(seeds[number]) for number in part]
        for number, text in zip(part, _write(prepared, decoding, dice), strict=True):
            found[number] = text
        advance(len(part))
    return [found[number] for number in range(len(contexts))]


def _write(prepared: Prepared, decoding: Decoding, dice: Sequence[random.Random]) -> list[str]:
    model, tokenizer = prepared.model, prepared.model.tokenizer
    rows: list[list[int]] = [[] for _ in dice]
    done = [False] * len(dice)
    # A token is a byte at least, so a stop string lies within so many last tokens.
    window = max((len(term.encode()) for term in decoding.until), default=0) + 2
    steps = model.steps(prepared.tail, prepared.past)
    logits = next(steps)
    for count in range(1, decoding.most + 1):
        chosen = _choose(logits, decoding, dice)
        for row, token in enumerate(chosen.tolist()):
            if done[row]:
                continue
            rows[row].append(token)
            # With special tokens: a task may name one of them as its stop string.
            recent = tokenizer.decode(rows[row][-window:])
            done[row] = token in model.end_tokens or any(term in recent for term in decoding.until)
        if all(done) or count == decoding.most:
            break
        logits = steps.send(chosen)
    return [before_stop(tokenizer.decode(tokens, skip_special_tokens=True), decoding.until) for tokens in rows]


def before_stop(text: str, until: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min((place for place in map(text.find, until) if place >= 0), default=len(text))]


def _choose(
    logits: Float[Tensor, "batch vocab"], decoding: Decoding, dice: Sequence[random.Random]
) -> Int64[Tensor, " batch"]:
    """The next token of every row."""
    if decoding.temperature == 0:
        return logits.argmax(-1)
    scores, order = (logits.double().cpu() / decoding.temperature).sort(dim=-1, descending=True, stable=True)
    if decoding.top_k:
        scores, order = scores[:, : decoding.top_k], order[:, : decoding.top_k]
    probabilities = scores.softmax(-1)
    reached = probabilities.cumsum(-1)
    # Those stay before which less than top_p is reached; the likeliest always does.
    probabilities = probabilities.masked_fill(reached - probabilities >= decoding.top_p, 0.0)
    reached = probabilities.cumsum(-1)
    drawn = torch.tensor([each.random() for each in dice], dtype=torch.float64)[:, None] * reached[:, -1:]
    place = (reached <= drawn).sum(-1, keepdim=True).clamp_max(probabilities.shape[-1] - 1)
    return order.gather(-1, place)[:, 0].to(logits.device)
