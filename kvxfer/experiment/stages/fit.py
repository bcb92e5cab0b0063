"""``train.py`` where the solver is a closed form: a map from moments; models are in memory only to judge."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, files_of
from kvxfer.experiment.loggers import RunLogger, open_logger
from kvxfer.experiment.pins import refuse_changed
from kvxfer.experiment.runs import Run, finished, open_run, run_id
from kvxfer.experiment.settings import TrainSettings
from kvxfer.experiment.stages.calibrate import REPORT, calibrate, calibration_id, load_splits
from kvxfer.experiment.stages.describing import log_map
from kvxfer.files import RECORD, read_json, write_json
from kvxfer.fitting.closed import Fit, Splits
from kvxfer.fitting.divergence import ROWS, Divergence
from kvxfer.maps.artifact import DIAGNOSTICS, SELECTION, CacheMap
from kvxfer.maps.blocks import KINDS, Block
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.models.pair import load_pair
from kvxfer.moments.random_file import RANDOM_FILE, load_random
from kvxfer.progress import progress
from kvxfer.report.fit_figures import curves_figure, r2_heatmap
from kvxfer.text.corpus import load_rows

log = logging.getLogger("kvxfer")

HEATMAP, CURVES = "r2.png", "curves.png"
_RARE_TOKENS = 5


def fit_map(settings: TrainSettings) -> Path:
    """Fit (or find) the map and return its run's directory, which is the artifact."""
    if settings.force or not finished(settings.outputs / "train" / fitted_id(settings)):
        # Not within the run, whose seconds are the fit's alone.
        find_calibration(settings)
    question = settings.solver_config, {"calibrate": calibration_id(settings)}
    return map_run(settings, question, lambda run, out: _fit(settings, run, find_calibration(settings), out))


def map_run(
    settings: TrainSettings,
    question: tuple[dict[str, Any], dict[str, str]],
    make: Callable[[Run, RunLogger], None],
    resumable: bool = False,
    scaffold: Callable[[Path], list[Path]] = lambda work: [],
) -> Path:
    """The directory of a map's run, made now if it is not there; ``question`` is its config and its inputs.

    Args:
        scaffold: what of the run's directory only a killed run needs.
    """
    with open_run(settings.outputs, "train", *question, settings.force, resumable) as run:
        if run.done:
            log.info("map %s is there already: %s", run.id, run.path)
            return run.path
        with open_logger(settings.logger, run, settings.columns()) as out:
            make(run, out)
        return run.commit(scaffold=scaffold(run.work))


def fitted_id(settings: TrainSettings) -> str:
    """The id of the closed form's map that these settings ask for."""
    return run_id("train", settings.solver_config, {"calibrate": calibration_id(settings)})


def named_map(outputs: Path, name: str, key: str) -> Path:
    """The directory of a map that a setting names: by its folder, or by the id of a train run."""
    for path in (Path(name).expanduser(), outputs / "train" / name):
        with files_of(key, path):
            if path.is_dir():
                return path
    raise KvxferError(f"{key}={name} is no directory and no run in {outputs / 'train'}")


def find_calibration(settings: TrainSettings) -> Path:
    """The calibration's directory, made now if it is missing and ``build_missing`` allows it."""
    path = settings.outputs / "calibrate" / calibration_id(settings)
    if finished(path):
        return path
    if not settings.build_missing:
        raise KvxferError(
            f"no calibration {path.name} in {path.parent}: run calibrate.py with the same pair and corpus and "
            f"{settings.calibration.overrides}, or set build_missing=true"
        )
    log.info("calibration %s is missing and is made first", path.name)
    return calibrate(settings.as_input())


def _fit(settings: TrainSettings, run: Run, moments: Path, out: RunLogger) -> None:
    splits = load_splits(moments, settings.solver.centred)
    random = load_random(splits.fit.layout, moments / RANDOM_FILE)
    if settings.solver.needs_models:
        splits = replace(splits, divergence=_divergence(settings, splits.fit.layout.blocks, random))
    calibration, calibrated_on = read_json(moments / REPORT), read_json(moments / RECORD)["config"]["corpus"]
    with progress("fit", settings.solver.steps(splits.fit), "fits") as advance:
        fit = settings.solver.fit(splits, lambda: advance(1))
    _warn(fit, splits)
    manifest = {
        "pair": calibration["pair"],
        **settings.solver_config,
        "longest_context": calibration["longest_context"],
        "run_id": run.id,
        "calibration": moments.name,
        "calibrated_on": {key: calibrated_on[key] for key in ("name", "length", "skip_first")},
        "kept_tokens": calibration["kept_tokens"]["fit"],
        "norms": splits.fit.norms(sorted(fit.layers)),
        "chosen": _chosen(fit),
    }
    if fit.candidates:
        manifest["candidates"] = fit.candidates
    if settings.solver.needs_weights:
        manifest["weights"] = settings.calibration.weighing
    kinds = {block.kind for layer in fit.layers.values() for block in layer.blocks}
    fitted = CacheMap(fit.layers, manifest, random.only(kinds) if random else None).save(run.work)
    selection = fit.selection.to_dict()
    write_json(run.work / DIAGNOSTICS, {"layers": fit.diagnostics, "curves": fit.curves})
    write_json(run.work / SELECTION, selection)
    r2_heatmap(selection, run.work / HEATMAP)
    curves_figure(fit.curves, run.work / CURVES)
    _log(out, run.work, fit, fitted)


def _divergence(settings: TrainSettings, blocks: Sequence[Block], random: RandomFeatures | None) -> Divergence:
    """What a map's next-token KL is measured by: both models, and the first validation rows."""
    pair, corpus = load_pair(settings.pinned), settings.corpus
    refuse_changed(settings.pair_identity, pair.describe())
    rows = load_rows(corpus, pair.tokenizer, "validation", min(ROWS, corpus.rows.validation))
    return Divergence(pair, blocks, rows.tokens, corpus.skip_first, random, settings.calibration.batch_size)


def _chosen(fit: Fit) -> dict[str, Any]:
    """Every value of each dial that some layer uses, ascending, and how many layers each of several solvers gives."""
    found: dict[str, Any] = {name: sorted({d[name] for d in fit.diagnostics}) for name in ("lam", "alpha", "rank")}
    if fit.candidates:
        winners = Counter(d["solver"] for d in fit.diagnostics)
        found["solver"] = {name: winners[name] for name in fit.candidates}
    return {"k": sorted({len(layers) for layers in fit.selection.chosen.values()}), **found}


def _warn(fit: Fit, splits: Splits) -> None:
    if raised := _outputs(fit, "raised"):
        log.warning("penalty.lam had to be raised to keep the Gram positive definite: %s", raised)
    if edge := sum(d["at_grid_edge"] for d in fit.diagnostics):
        log.warning(
            "%d of %d chosen λ lie on the edge of the grid: set penalty.lam to a value beyond it to see whether that "
            "is better",
            edge,
            len(fit.diagnostics),
        )
    if worse := _outputs(fit, "worse_than_isotropic"):
        log.warning("penalty.alpha does worse than 0 (ridge) on the validation split: %s", worse)
    few = [
        f"{d['kind']} of layer {d['layer']} ({d['effective_tokens']:.0f})"
        for d in fit.diagnostics
        if d.get("few_tokens")
    ]
    if few:
        log.warning("fewer than %d effective tokens a feature, weights counted: %s", _RARE_TOKENS, ", ".join(few))
    most = max(d["features"] for d in fit.diagnostics)
    if splits.fit.count < _RARE_TOKENS * most:
        log.warning(
            "%d kept tokens for %d features: fewer than %d a feature, so the map may not carry over to other text; "
            "raise corpus.rows.fit, or read less (solver.method=topk with a lower solver.k, other features)",
            splits.fit.count,
            most,
            _RARE_TOKENS,
        )


def _outputs(fit: Fit, what: str) -> str:
    """The outputs of which something is true."""
    return ", ".join(f"{d['kind']} of layer {d['layer']}" for d in fit.diagnostics if d[what])


def _attention(fit: Fit) -> dict[str, float]:
    """The mean attention-output scores of the map, if there was a probe; the log says what decided between solvers."""
    for name, scores in fit.candidates.items():
        if "left_out" in scores:
            log.warning("candidate %s is left out: %s", name, scores["left_out"])
            continue
        won = sum(d["solver"] == name for d in fit.diagnostics)
        log.info(
            "candidate %s gives %d of %d: attention-output score of keys %.3f, values %.3f, both %.3f",
            name,
            won,
            len(fit.diagnostics),
            *(scores[f"attention_{what}"] for what in (*KINDS, "joint")),
        )
    if "attention_score" not in fit.diagnostics[0]:
        return {}
    found = {}
    for kind in KINDS:
        own = [d["attention_score"] for d in fit.diagnostics if d["kind"] == kind]
        found[f"fit/attention_{kind}"] = sum(own) / len(own)
    joint = [d["attention_score_joint"] for d in fit.diagnostics]
    found["fit/attention_joint"] = sum(joint) / len(joint)
    log.info("mean attention-output score: %s", ", ".join(f"{k.rpartition('_')[2]} {v:.3f}" for k, v in found.items()))
    return found


def _log(out: RunLogger, work: Path, fit: Fit, fitted: CacheMap) -> None:
    found: dict[str, Any] = {}
    for kind in KINDS:
        rows = [d for d in fit.diagnostics if d["kind"] == kind]
        for split in ("fit", "validation", "held_out"):
            for measure in ("r2", "metric_r2"):
                if f"{measure}_{split}" in rows[0]:
                    mean = sum(d[f"{measure}_{split}"] for d in rows) / len(rows)
                    found[f"fit/{measure}_{split}_{kind}"] = mean
        log.info("mean held-out R² of %s: %.3f", kind, found[f"fit/r2_held_out_{kind}"])
    log_map(out, work, fitted, fit.diagnostics, found | _attention(fit))
    for name in (HEATMAP, CURVES):
        if (work / name).is_file():
            out.figure(name.removesuffix(".png"), work / name)
