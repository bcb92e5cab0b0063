"""``train.py`` where the solver is trained: a network on a closed form's map, with both models in memory."""

from __future__ import annotations

import logging
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from jaxtyping import Int
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.clocks import Stopwatch
from kvxfer.experiment.identity import identity
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.pins import refuse_changed
from kvxfer.experiment.runs import Run, finished, run_id, work_directory
from kvxfer.experiment.settings import Training, TrainSettings
from kvxfer.experiment.stages.describing import log_map
from kvxfer.experiment.stages.fit import HEATMAP, fit_map, fitted_id, map_run, named_map
from kvxfer.files import RECORD, read_json, write_json
from kvxfer.fitting.trained.networks import trained_outputs
from kvxfer.fitting.trained.resuming import BEST, CHECKPOINTS
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, SELECTION, TRAINING_RECORD, CacheMap
from kvxfer.maps.blocks import KINDS
from kvxfer.maps.columns import read_source
from kvxfer.maps.products import fastest_dtype
from kvxfer.models.hf.load import resolve_device
from kvxfer.models.pair import Pair, load_pair
from kvxfer.report.fit_figures import r2_heatmap, training_figure
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import TRAINING

log = logging.getLogger("kvxfer")

CHECKPOINT, FIGURE = "best.ckpt", "training.png"
_TIMED_ROWS, _ROUNDS = 8, 9
_CALIBRATED = ("pair", "longest_context", "calibration", "calibrated_on", "kept_tokens", "weights")
_FROM_BASE = (*_CALIBRATED, "chosen", "candidates", "norms")
"""What holds of a trained map because it holds of its base."""
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


Record = Mapping[str, Any]


class Base(NamedTuple):
    """The map that is trained on."""

    directory: Path
    map: CacheMap


def trained_id(settings: TrainSettings) -> str | None:
    """The id of the trained map that these settings ask for; None while its base is missing, which is a part of it."""
    base = _known_base(settings)
    return None if base is None else run_id("train", *_question(settings, _checked(settings, base)))


def train_network(settings: TrainSettings) -> Path:
    """Train (or find) the map and return its run's directory, which is the artifact.

    A process that Lightning or torchrun started beside the first one takes part in the training and ends there.
    """
    training = _training(settings)
    base = _checked(settings, _known_base(settings) or _fit_base(settings))
    question = _question(settings, base)
    settings = replace(settings, solver_config=training.config_on(base.map.manifest))
    if (rank := _rank(training)) > 0:
        _take_part(settings, base, run_id("train", *question), rank)
    return map_run(settings, question, lambda run, out: _train(settings, run, base, out), not settings.force, _scaffold)


def _scaffold(work: Path) -> list[Path]:
    """All checkpoints but the best, also half-written and damaged ones."""
    return [file for file in work.rglob("*.ckpt*") if file.name != CHECKPOINT]


def _training(settings: TrainSettings) -> Training:
    assert settings.training is not None
    return settings.training


def _known_base(settings: TrainSettings) -> Path | None:
    """Where the base lies, if it is there."""
    if (named := _training(settings).spec.base_map) is not None:
        return named_map(settings.outputs, named, "solver.base_map")
    path = settings.outputs / "train" / fitted_id(settings.base())
    return path if finished(path) else None


def _fit_base(settings: TrainSettings) -> Path:
    base = settings.base()
    if not settings.build_missing:
        raise KvxferError(
            f"no base map {fitted_id(base)} in {settings.outputs / 'train'}: run train.py with these settings and "
            f"solver={base.solver.name}, or set build_missing=true"
        )
    log.info("the base map %s is missing and is fitted first", fitted_id(base))
    return fit_map(base.as_input())


def _checked(settings: TrainSettings, directory: Path) -> Base:
    """The base, which must be linear and have the layers that are to be trained."""
    base = CacheMap.load(directory)
    try:
        trained_outputs(base, _training(settings).spec)
    except KvxferError as error:
        raise KvxferError(f"the base {directory}: {error}") from error
    return Base(directory, base)


def _question(settings: TrainSettings, base: Base) -> tuple[dict[str, Any], dict[str, str]]:
    """The config of a trained map's run, with the text that it is trained on and the pair, and its inputs."""
    manifest = base.map.manifest
    corpus = identity(settings.corpus, ["rows.evaluation"])
    inputs = {"train": base.map.hash}
    if (calibration := manifest.get("calibration")) is not None:
        inputs["calibrate"] = calibration
    config = {**_training(settings).config_on(manifest), "corpus": corpus}
    # A base that is named may be another pair's, which is refused when the models are there.
    return {**config, "pair": settings.pair_identity}, inputs


def _rank(training: Training) -> int:
    """This process's place among those that train together: 0 for the one that keeps the run."""
    if training.trainer.devices == 1:
        return 0
    return int(next((os.environ[name] for name in _RANKS if name in os.environ), 0))


def _take_part(settings: TrainSettings, base: Base, identifier: str, rank: int) -> NoReturn:
    """Train as one of several processes. The run is another's, who holds its lock and writes what comes of it."""
    if settings.force or not (settings.outputs / "train" / identifier / RECORD).is_file():
        if settings.pair.device in ("auto", "cuda") and resolve_device(settings.pair.device).type == "cuda":
            local = int(os.environ.get("LOCAL_RANK", rank))
            settings = replace(settings, pair=replace(settings.pair, device=f"cuda:{local}"))
        work = work_directory(settings.outputs, "train", identifier)
        work.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as nowhere:
            _fitted(settings, _loaded(settings, base), base, work, RunLogger(Path(nowhere), {}))
    raise SystemExit(0)


def _loaded(settings: TrainSettings, base: Base) -> Pair:
    pair = load_pair(settings.pinned)
    refuse_changed(settings.pair_identity, pair.describe())
    try:
        base.map.require(pair.describe())
    except KvxferError as error:
        raise KvxferError(f"the base {base.directory}: {error}") from error
    return pair


def _fitted(settings: TrainSettings, pair: Pair, base: Base, work: Path, out: RunLogger) -> tuple[Any, Any]:
    """The trained map and the rows that it was trained on."""
    # Lightning takes seconds to import, and a map that is there needs none of it.
    from kvxfer.fitting.trained.loop import Fitting, TrainingRows

    training, corpus = _training(settings), settings.corpus
    text, count = TRAINING if training.trainer.rows == "new" else "fit", corpus.rows.of(TRAINING)
    if text == "fit" and count > corpus.rows.fit:
        raise KvxferError(
            f"corpus.rows.training={count}: with trainer.rows=fit they are of the corpus.rows.fit={corpus.rows.fit}; "
            "lower corpus.rows.training"
        )
    rows = TrainingRows(
        load_rows(corpus, pair.tokenizer, text, count),
        *(load_rows(corpus, pair.tokenizer, split) for split in ("validation", "held_out")),
    )
    exact = settings.corpus.skip_first
    return Fitting(pair, base.map, training.spec, training.trainer, rows, exact, work, out).run(), rows


def _train(settings: TrainSettings, run: Run, base: Base, out: RunLogger) -> None:
    pair = _loaded(settings, base)
    trained, rows = _fitted(settings, pair, base, run.work, out)
    log_training(out, run.work, trained)
    record: Mapping[str, Any] = trained.record
    texts = {"rows": len(rows.training), "rows_sha256": rows.training.digest, "corpus": settings.corpus.name}
    manifest = {
        **{key: base.map.manifest[key] for key in _FROM_BASE if key in base.map.manifest},
        # What either has not seen, the map has not.
        "calibrated_on": {
            **base.map.manifest.get("calibrated_on", {}),
            "skip_first": max(base.map.skip_first, settings.corpus.skip_first),
        },
        **settings.solver_config,
        "run_id": run.id,
        "base": {"run": base.directory.name, "sha256": base.map.hash},
        # No seconds: the same question gives the same map, whatever it took.
        "training": {**texts, **{key: record[key] for key in ("steps", "best_step", "lr", "stopped")}},
    }
    parts = [*trained.layers.values(), *trained.trunks]
    kinds = {block.kind for part in parts for block in part.blocks}
    random = base.map.random.only(kinds) if base.map.random else None
    saved = CacheMap(trained.layers, manifest, random, trained.trunks).save(run.work)
    layers = diagnostics(saved, record)
    write_json(run.work / DIAGNOSTICS, {"layers": layers, "curves": {}})
    # Beside the artifact, whose hash knows no seconds.
    timed = time_to_map(pair, base.map, saved, rows.held_out.tokens[:_TIMED_ROWS])
    write_json(run.work / TRAINING_RECORD, {**record, "map_seconds": timed})
    if (base.directory / SELECTION).is_file():
        shutil.copyfile(base.directory / SELECTION, run.work / SELECTION)
        r2_heatmap(read_json(run.work / SELECTION), run.work / HEATMAP)
        out.figure(Path(HEATMAP).stem, run.work / HEATMAP)
    log_trained(out, run.work, saved, layers, timed["ratio"])


if TYPE_CHECKING:
    from kvxfer.fitting.trained.loop import TrainedMap

log = logging.getLogger("kvxfer")


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
    """Seconds in which a map and its base map some rows at once, in the dtype in which they are served.

    Both do in every round, after one that does not count.

    Returns:
        ``tokens`` that are mapped, ``base`` and ``trained`` (median seconds), and ``ratio``, the median of the rounds'.
    """
    device = pair.target.device
    watch, ids = Stopwatch(device), ids.to(device)
    mappers = [Mapper(each, device, fastest_dtype(device, pair.source.dtype), pair) for each in (base, trained)]
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
