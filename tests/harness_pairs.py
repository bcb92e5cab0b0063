"""What tests of the harness share: pairs whose map is known, and the harness's own model to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance

from kvxfer.evals.benchmarks.model import HarnessModel
from kvxfer.evals.benchmarks.requests import Condition, Handover
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair

PLAN = Plan("sinks", exact_first=2, hold_back=1)


def with_itself(pair: Pair) -> Pair:
    """The target as its own source: the map that changes nothing is the right one."""
    return replace(pair, source=pair.target)


def scaled_map(pair: Pair, factor: float) -> Mapper:
    """Every target layer takes the source layer of its number, times a factor: 1 changes nothing, 0 leaves nothing."""
    width = pair.target.geometry.kv_width
    weight = factor * torch.eye(width)[None]
    layers = {
        (layer, kind): LinearLayer(DESIGNS["same"].blocks(kind, [layer]), weight, torch.zeros(width))
        for layer in range(pair.target.geometry.layers)
        for kind in KINDS
    }
    return Mapper(CacheMap(layers, {}))


def model_of(pair: Pair, condition: Condition = "mapped", factor: float = 1.0, batch_size: int = 4) -> HarnessModel:
    """The target with itself as its source, under a condition; the map scales by ``factor``."""
    itself = with_itself(pair)
    return HarnessModel(Handover(itself, PLAN, condition, scaled_map(itself, factor)), batch_size)


def own_model(pair: Pair, batch_size: int = 1, max_length: int | None = None) -> Any:
    """The harness's own model for transformers, of the target."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(
        pretrained=pair.target.lm, tokenizer=pair.tokenizer, batch_size=batch_size, max_length=max_length, device="cpu"
    )


def scoring(pairs: Sequence[tuple[str, str]]) -> list[Instance]:
    """Requests to score continuations of contexts."""
    return [Instance("loglikelihood", {}, arguments, number) for number, arguments in enumerate(pairs)]


def writing(contexts: Sequence[str], **options: Any) -> list[Instance]:
    """Requests to write answers."""
    return [Instance("generate_until", {}, (context, dict(options)), n) for n, context in enumerate(contexts)]
