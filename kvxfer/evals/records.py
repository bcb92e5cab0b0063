"""All items under all conditions: the records that statistics are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvxfer.evals.conditions import HANDED, OWN, PRUNED, Prepared
from kvxfer.evals.items import Batch, Item
from kvxfer.evals.scoring import score

Records = dict[str, dict[str, Any]]


def empty_records(items: list[Item]) -> Records:
    """One record per item, in order, without scores."""
    records = {}
    for item in items:
        record: dict[str, Any] = {"id": item.id, "document": item.document, "kind": item.kind}
        record |= {"tokens": len(item.answer), "nats": {}}
        if item.candidates:
            record |= {"chance": item.chance, "correct": {}, "generated": {}}
        records[item.id] = record
    return records


def add_scores(records: Records, name: str, prepared: Prepared, batch: Batch, stop: int | None) -> None:
    """Score a batch under one condition into its records."""
    for item, result in zip(batch.items, score(prepared, batch.items, stop), strict=True):
        record = records[item.id]
        record["nats"][name] = result.nats
        if result.correct is not None:
            record["correct"][name] = result.correct
        if result.generated is not None:
            record["generated"][name] = result.generated


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
                add_scores(records, name, prepared[name], batch, stop)
            elif baselines is not None:
                _take_over(records, baselines, batch, name)
        advance(len(batch.items))
    return records


def _take_over(records: Records, baselines: Records, batch: Batch, name: str) -> None:
    for item in batch.items:
        for measure in ("nats", "correct", "generated"):
            if name in baselines[item.id].get(measure, {}):
                records[item.id][measure][name] = baselines[item.id][measure][name]
