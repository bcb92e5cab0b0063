"""What a map is worth on rows: the numbers that stand in a trained map's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvxfer.fitting.trained.activations import Activations, ActivationStore
from kvxfer.fitting.trained.data import Schedule, batches
from kvxfer.fitting.trained.measures import Measures
from kvxfer.fitting.trained.objective import Objective
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.content_errors import MappedErrors
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair

Look = Callable[[Activations], KV]
"""What gives the content of all of a batch's tokens."""


def mapped_by(pair: Pair, cache_map: CacheMap) -> Look:
    """What a map gives, run as it is served."""
    mapper = Mapper(cache_map, pair.target.device, pair=pair)
    return lambda batch: mapper.map(batch.source, batch.ids)


@torch.inference_mode()
def report(objective: Objective, store: ActivationStore, look: Look, schedule: Schedule) -> dict[str, Any]:
    """A look at all rows of a store, as a training validates, with the R² of every output as a fit records it.

    Returns:
        ``kl`` (nats per token), ``cosine`` and ``attention_score`` (means over target layers), ``layers`` (both for
        each ``layer``) and ``r2`` (for each ``layer`` and ``kind``).
    """
    found, errors = [], None
    for rows in batches(len(store), schedule.batch_size):
        batch = store.batch(rows)
        mapped = look(batch)
        errors = errors or MappedErrors(mapped.layers)
        errors.add(batch.own, mapped, schedule.exact, schedule.length)
        found.append(objective.measures(batch, mapped, schedule.half))
    measures = Measures.over(found)
    cosine, score = measures.cosine.tolist(), measures.attention_score.tolist()
    layers = [
        {"layer": n, "cosine": c, "attention_score": s} for n, (c, s) in enumerate(zip(cosine, score, strict=True))
    ]
    outputs = sorted(errors.by_output.items()) if errors else []
    return {
        "kl": measures.kl,
        "cosine": sum(cosine) / len(cosine),
        "attention_score": sum(score) / len(score),
        "layers": layers,
        "r2": [{"layer": layer, "kind": kind, "r2": each.r2()} for (layer, kind), each in outputs],
    }
