"""Scores of items under conditions: likelihoods of given tokens, free answers; and the records that keep them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvxfer.evals.conditions import HANDED, OWN, PRUNED, Prepared
from kvxfer.evals.items import Batch, Item


@dataclass(frozen=True)
class Score:
    """One item under one condition: nats of the right answer (summed), and whether it was chosen and generated."""

    nats: float
    correct: bool | None
    generated: bool | None


@torch.inference_mode()
def token_log_likelihoods(
    prepared: Prepared, continuation: Int64[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    """Log-probability of every token of a continuation of the prompt."""
    ids = torch.cat([prepared.tail, continuation[:, :-1]], dim=1)
    logits = prepared.model.logits(ids, prepared.past)[:, -continuation.shape[1] :]
    chosen = continuation.to(logits.device)[..., None]
    return torch.log_softmax(logits, dim=-1).gather(-1, chosen)[..., 0].cpu()


def score(prepared: Prepared, items: list[Item], stop: int | None) -> list[Score]:
    """Score items of one batch.

    Args:
        stop: the token that ends a free answer; None leaves free answers out.
    """
    if not items[0].candidates:
        nats = -token_log_likelihoods(prepared, torch.tensor([item.answer for item in items])).double().sum(1)
        return [Score(float(value), None, None) for value in nats]
    sums = candidate_log_likelihoods(prepared, items)
    right = torch.tensor([item.right for item in items])
    nats = -sums[torch.arange(len(items)), right]
    if len(items[0].answer) > len(items[0].candidates[items[0].right]):
        nats = -token_log_likelihoods(prepared, torch.tensor([item.answer for item in items])).double().sum(1)
    chosen = sums.argmax(1)
    written: list[bool | None] = [None] * len(items)
    if stop is not None:
        tokens = prepared.model.generate(prepared.tail, prepared.past, len(items[0].answer) + 1, stop).tolist()
        written = [tuple(row) == (*item.answer, stop) for row, item in zip(tokens, items, strict=True)]
    return [Score(float(n), bool(c), w) for n, c, w in zip(nats.double(), chosen == right, written, strict=True)]


def candidate_log_likelihoods(prepared: Prepared, items: list[Item]) -> Float[Tensor, "batch candidates"]:
    """Summed log-probability of every candidate answer; items with fewer candidates are filled with -inf."""
    most = max(len(item.candidates) for item in items)
    padded = torch.tensor([[item.candidates[min(n, len(item.candidates) - 1)] for n in range(most)] for item in items])
    if padded.shape[-1] == 1:
        # One token each: the same forward pass gives them all.
        logits = prepared.model.logits(prepared.tail, prepared.past)[:, -1]
        index = padded[..., 0].to(logits.device)
        sums = torch.log_softmax(logits, dim=-1).gather(1, index).cpu()
    else:
        columns = [token_log_likelihoods(prepared, padded[:, n]).sum(1) for n in range(most)]
        sums = torch.stack(columns, dim=1)
    counts = torch.tensor([len(item.candidates) for item in items])
    return sums.masked_fill(torch.arange(most) >= counts[:, None], -torch.inf)


Records = dict[str, dict[str, Any]]


def empty_records(items: list[Item]) -> Records:
    """One record per item, in order, without scores."""
    records = {}
    for item in items:
        record: dict[str, Any] = {"id": item.id, "document": item.document, "kind": item.kind}
        record |= {"tokens": len(item.answer), "nats": {}}
        if item.candidates:
            record |= {"chance": 1 / len(item.candidates), "correct": {}, "generated": {}}
        records[item.id] = record
    return records


def add_scores(records: Records, name: str, prepared: Prepared, items: list[Item], stop: int | None) -> None:
    """Score items of one batch under one condition into their records."""
    for item, result in zip(items, score(prepared, items, stop), strict=True):
        for measure, value in vars(result).items():
            if value is not None:
                records[item.id][measure][name] = value


@torch.inference_mode()
def evaluate_items(
    batches: list[Batch],
    conditions: Callable[[Batch], dict[str, Prepared]],
    stop: int | None,
    advance: Callable[[int], None],
    baselines: Records | None = None,
) -> Records:
    """Score every batch under every condition.

    Args:
        conditions: what the target is handed for a batch, by condition.
        stop: the token that ends a free answer, or None for no free answers.
        baselines: records of the same items; those of their conditions that are not prepared are taken over.
    """
    records = empty_records([item for batch in batches for item in batch.items])
    for batch in batches:
        prepared = conditions(batch)
        for name in (*OWN, *HANDED, *PRUNED):
            if name in prepared:
                add_scores(records, name, prepared[name], batch.items, stop)
            elif baselines is not None:
                for item in batch.items:
                    for measure, scores in baselines[item.id].items():
                        if isinstance(scores, dict) and name in scores:
                            records[item.id][measure][name] = scores[name]
        advance(len(batch.items))
    return records
