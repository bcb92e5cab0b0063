"""What is kept and logged of a map that was trained, beside the artifact itself."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from kvxfer.evals.latency.clocks import Stopwatch
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.stages.describing import log_map
from kvxfer.fitting.trained.resuming import BEST, CHECKPOINTS
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import KINDS
from kvxfer.maps.columns import read_source
from kvxfer.models.pair import Pair
from kvxfer.report.fit_figures import training_figure

if TYPE_CHECKING:
    from kvxfer.fitting.trained.loop import TrainedMap

log = logging.getLogger("kvxfer")

FIGURE = "training.png"

Record = Mapping[str, Any]

_ROUNDS = 9


def diagnostics(trained: CacheMap, record: Record) -> list[dict[str, Any]]:
    """One flat record per target layer and kind, as the fit of a closed form has: measured on the held-out rows.

    ``features`` are the columns that the output reads, ``r2_held_out`` and ``r2_held_out_base`` R² of the map and of
    its base. ``attention_score_held_out`` and ``cosine_held_out`` are about the layer's attention output with both
    kinds mapped.
    """
    own, base = record["held_out"]["trained"], record["held_out"]["base"]
    r2 = {(row["layer"], row["kind"]): row["r2"] for row in own["r2"]}
    before = {(row["layer"], row["kind"]): row["r2"] for row in base["r2"]}
    layers = {row["layer"]: row for row in own["layers"]}
    found = []
    for output in sorted(trained.layers, key=lambda output: (KINDS.index(output[1]), output[0])):
        layer, kind = output
        columns = [trained.layers[output].weight.shape[1]]
        columns += [trunk.inputs for trunk in trained.trunks if output in trunk.readouts]
        found.append(
            {
                "layer": layer,
                "kind": kind,
                "features": max(columns),
                "r2_held_out": r2[output],
                "r2_held_out_base": before[output],
                "attention_score_held_out": layers[layer]["attention_score"],
                "cosine_held_out": layers[layer]["cosine"],
            }
        )
    return found


def log_training(out: RunLogger, work: Path, trained: TrainedMap) -> None:
    """Draw, log and say how a training went; its steps were logged as they were made."""
    record = trained.record
    best = next(look for look in record["history"] if look["step"] == record["best_step"])
    training_figure(record["history"], record["base_val_kl"], work / FIGURE)
    out.figure(Path(FIGURE).stem, work / FIGURE)
    about = {"step": best["step"], "val_kl": best["val_kl"], "question": trained.question}
    out.artifact(f"checkpoint-{trained.question[:12]}", "checkpoint", [work / CHECKPOINTS / BEST], about)
    summary = {f"train/{k}": record[k] for k in ("steps", "best_step", "seconds", "seconds_per_step")}
    summary |= {"train/trained_parameters": record["trained_parameters"], "validation/base_kl": record["base_val_kl"]}
    found = record["held_out"]
    for name, own in found.items():
        summary |= {f"held_out/{name}_{key}": own[key] for key in ("kl", "cosine", "attention_score")}
    out.metrics(summary)
    log.info(
        "held-out rows: KL %.4f nats per token (base %.4f), attention-output cosine %.4f (base %.4f)",
        *(found[name][key] for key in ("kl", "cosine") for name in ("trained", "base")),
    )
    if best["val_kl"] >= record["base_val_kl"]:
        log.warning(
            "the best checkpoint's validation KL, %.4f, is not below the base's, %.4f: the training gains nothing",
            best["val_kl"],
            record["base_val_kl"],
        )


def time_to_map(pair: Pair, base: CacheMap, trained: CacheMap, ids: Int[Tensor, "rows tokens"]) -> dict[str, Any]:
    """Seconds in which a map and its base map some rows at once: both in every round, after one that does not count.

    Returns:
        ``tokens`` that are mapped, ``base`` and ``trained`` (median seconds), and ``ratio``, the median of the rounds'.
    """
    device = pair.target.device
    watch, ids = Stopwatch(device), ids.to(device)
    mappers = [Mapper(each, device, pair=pair) for each in (base, trained)]
    content = pair.content("source", read_source(pair, ids, mappers[0].extras))
    rounds = [[watch.of(lambda: mapper.map(content, ids)) for mapper in mappers] for _ in range(1 + _ROUNDS)][1:]  # noqa: B023
    medians = [statistics.median(each) for each in zip(*rounds, strict=True)]
    ratio = statistics.median(own / before for before, own in rounds)
    return {"tokens": ids.numel(), "base": medians[0], "trained": medians[1], "ratio": ratio}


def log_trained(out: RunLogger, work: Path, trained: CacheMap, layers: Sequence[Record], ratio: float) -> None:
    """Log what a closed form's fit logs too; the training has logged its own numbers.

    Args:
        ratio: of the time to map to its base's.
    """
    summary = {"fit/map_seconds_ratio": ratio}
    log.info("time to map: %.2f times the base's", ratio)
    for kind in KINDS:
        own = [row for row in layers if row["kind"] == kind]
        for suffix in ("", "_base"):
            summary[f"fit/r2_held_out_{kind}{suffix}"] = sum(row[f"r2_held_out{suffix}"] for row in own) / len(own)
        log.info(
            "mean held-out R² of %s: %.3f (base %.3f)",
            kind,
            summary[f"fit/r2_held_out_{kind}"],
            summary[f"fit/r2_held_out_{kind}_base"],
        )
    log_map(out, work, trained, layers, summary)
