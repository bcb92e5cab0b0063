"""``calibrate.py``: the moments of a pair over a corpus, once."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.experiment.loggers import RunLogger, open_logger
from kvxfer.experiment.pins import refuse_changed
from kvxfer.experiment.runs import Run, finished, open_run, run_id
from kvxfer.experiment.settings import CalibrateSettings
from kvxfer.experiment.stages.dry_row import refuse_unfit, try_row
from kvxfer.experiment.stages.random_map import refuse_random
from kvxfer.files import read_json, read_sealed, write_json, write_sealed
from kvxfer.fitting.closed import Splits
from kvxfer.fitting.keeping import SPOOL, Kept, choose_kept
from kvxfer.maps.blocks import RANDOM
from kvxfer.models.pair import Pair, load_pair
from kvxfer.moments.calibration import accumulate, layout_for, products_dtype
from kvxfer.moments.checkpoints import PassState, weighted_file
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.probe import PROBE, Probe, merge_probes
from kvxfer.moments.probe_pass import save_probe
from kvxfer.moments.query_metric import METRICS, Metrics, merge_metrics, save_metrics
from kvxfer.moments.random_file import RANDOM_FILE, load_random, merge_random
from kvxfer.moments.schedule import PassPlan, size
from kvxfer.moments.spec import CALIBRATION_SPLITS, SELECTION_SPLITS, WEIGHTED_SPLITS
from kvxfer.progress import progress
from kvxfer.text.corpus import Rows, load_rows

log = logging.getLogger("kvxfer")

REPORT, KEPT = "calibration.json", "kept_layers.json"


def calibrate(settings: CalibrateSettings) -> Path:
    """Make (or find) the moments and return their run's directory.

    A share of the rows (``corpus.num_shards``) is a run of its own; the last share to finish merges them all.
    """
    refuse_random(settings)
    path = _calibrate_share(settings)
    if settings.corpus.num_shards == 1:
        return path
    return _merge_shares(settings) or path


def calibration_id(settings: CalibrateSettings, shard: bool = False) -> str:
    """The id of the calibration that these settings ask for."""
    return run_id("calibrate", settings.calibration_config(shard), {})


def load_splits(directory: Path, centred: bool = True) -> Splits:
    """The moments of a finished calibration, and its metrics, probe and weighted moments if it kept any.

    Args:
        centred: of the metrics (``Metrics.load``).
    """
    fit, validation, held_out = (Moments.load(directory / f"{split}.safetensors") for split in CALIBRATION_SPLITS)
    metrics = Metrics.load(directory / METRICS, centred) if (directory / METRICS).is_file() else None
    random = load_random(fit.layout, directory / RANDOM_FILE)
    probe = Probe.load(directory / PROBE, random) if (directory / PROBE).is_file() else None
    weighted = None
    if (directory / weighted_file(WEIGHTED_SPLITS[0], 0)).is_file():
        # Those of all target layers may not fit in memory together: a solver reads one layer after the other.
        keep = lru_cache(len(WEIGHTED_SPLITS))
        weighted = keep(lambda split, layer: Moments.load(directory / weighted_file(split, layer)))
    return Splits(fit, validation, held_out, metrics, probe, weighted)


def _calibrate_share(settings: CalibrateSettings) -> Path:
    config = settings.calibration_config(shard=True)
    with open_run(settings.outputs, "calibrate", config, {}, settings.force, resumable=True) as run:
        if run.done:
            log.info("calibration %s is there already: %s", run.id, run.path)
            return run.path
        with open_logger(settings.logger, run, settings.columns()) as out:
            state = _run_pass(settings, run, out)
        return run.commit(state.seconds, [*state.scaffold, run.work / KEPT, *run.work.glob(f"{SPOOL}*")])


def _run_pass(settings: CalibrateSettings, run: Run, out: RunLogger) -> PassState:
    corpus, spec = settings.corpus, settings.calibration
    pair = load_pair(settings.pinned)
    refuse_changed(settings.pair_identity, pair.describe())
    pair.check_length(corpus.length, "corpus.length")
    refuse_unfit(settings, pair)
    rows = {split: load_rows(corpus, pair.tokenizer, split) for split in CALIBRATION_SPLITS}
    counts = {split: len(part) for split, part in rows.items()}
    plan = PassPlan(pair, spec, counts, corpus.length, corpus.skip_first)
    for line in plan.lines():
        log.info(line)
    try_row(settings, pair, rows)
    kept = None
    if spec.keep_layers is not None:
        kept = _kept(pair, settings, run.work / KEPT)
        plan = PassPlan(pair, spec, counts, corpus.length, corpus.skip_first, kept.layers)
        _say_kept(pair, settings, plan.layout)
    total = sum(counts.values()) * corpus.length
    weighing, dtype = spec.weights != "none", products_dtype(pair)
    state = PassState(run.work, plan.layout, plan.home, pair.target.geometry, weighing, dtype)
    if state.tokens_read:
        log.info("going on after %s tokens", f"{state.tokens_read:,}")
    if spec.probe_rows:
        # First, because it refuses models whose attention it can't follow.
        probe = rows["validation"].tokens[: spec.probe_rows, : spec.probe_tokens]
        save_probe(pair, probe, plan.layout, corpus.skip_first, run.work / PROBE)
    with progress(f"calibrate {pair.name}", total, "tokens", done=state.tokens_read) as advance:
        accumulate(pair, rows, spec, corpus.skip_first, state, advance)
    if spec.metrics:
        save_metrics(run.work / METRICS, pair, state.queries, corpus.length - 1)
    report = _report(pair, rows, state, settings)
    if kept is not None:
        report["kept"] = asdict(kept)
    _say(report)
    write_json(run.work / REPORT, report)
    _log(out, report)
    return state


def _kept(pair: Pair, settings: CalibrateSettings, path: Path) -> Kept:
    """The outcome of the first pass: what a killed run has left of it, or a new one.

    Every share reads the same rows, the first ones of the whole corpus, so that all keep the same layers.
    """
    if path.exists():
        try:
            return Kept(**read_sealed(path))
        except (KvxferError, TypeError) as error:
            log.warning("%s: the first pass is made again", error)
    corpus, spec = replace(settings.corpus, num_shards=1, shard_index=0), settings.calibration
    counts = {split: min(spec.selection_rows, corpus.rows.of(split)) for split in SELECTION_SPLITS}
    rows = {split: load_rows(corpus, pair.tokenizer, split, count) for split, count in counts.items()}
    layers = len(spec.source_layers(pair.source.geometry.layers))
    with progress(f"choose source layers {pair.name}", layers, "layers") as advance:
        kept = choose_kept(pair, rows, spec, corpus.skip_first, advance, path.parent)
    write_sealed(path, asdict(kept))
    return kept


def _say_kept(pair: Pair, settings: CalibrateSettings, layout: Layout) -> None:
    everything = layout_for(pair, settings.calibration)
    log.info(
        "each target layer keeps %s source layers: %d of %d block pairs, %s of moments a split in place of %s",
        settings.calibration.keep_layers,
        layout.pairs,
        everything.pairs,
        size(layout.bytes),
        size(everything.bytes),
    )


def _report(pair: Pair, rows: dict[str, Rows], state: PassState, settings: CalibrateSettings) -> dict[str, Any]:
    counts = {s: Moments.load(state.work / f"{s}.safetensors").count for s in CALIBRATION_SPLITS}
    return {
        "pair": pair.describe(),
        "longest_context": pair.longest_context,
        "warnings": pair.remarks,
        "rows": {split: len(part) for split, part in rows.items()},
        "rows_sha256": {split: part.digest for split, part in rows.items()},
        "left_out": rows["fit"].left_out,
        "kept_tokens": counts,
        "skip_first": settings.corpus.skip_first,
        "skipped_rows": state.bad_rows,
        "sinks": {which: counter.report(pair.tokenizer) for which, counter in state.sinks.items()},
        **_weights_report(settings, state.work),
    }


def _weights_report(settings: CalibrateSettings, work: Path) -> dict[str, Any]:
    """What tokens were weighed by, and how many the fit split is worth to every target layer."""
    weighing = settings.calibration.weighing
    if weighing is None:
        return {}
    layers = len(list(work.glob("weighted.fit.*.safetensors")))
    effective = [Moments.load(work / weighted_file("fit", layer)).effective for layer in range(layers)]
    return {"weights": {**weighing, "effective_tokens": effective}}


def _say(report: dict[str, Any]) -> None:
    for which, sinks in report["sinks"].items():
        positions = ", ".join(f"{p['position']} ({p['largest_ratio']:.0f}x)" for p in sinks["positions"]) or "none"
        tokens = ", ".join(repr(t["token"]) for t in sinks["tokens"][:8]) or "none"
        log.info("outlier norms in the %s: positions %s; tokens %s", which, positions, tokens)
        late = [p["position"] for p in sinks["positions"] if p["position"] >= report["skip_first"]]
        if late:
            log.warning(
                "position %d of the %s is an outlier and enters the moments: corpus.skip_first=%d would leave it out",
                late[-1],
                which,
                late[-1] + 1,
            )
    if report["skipped_rows"]:
        log.warning("%d rows with non-finite values were skipped", len(report["skipped_rows"]))


def _log(out: RunLogger, report: dict[str, Any]) -> None:
    kept = {f"calibrate/kept_tokens/{split}": count for split, count in report["kept_tokens"].items()}
    out.metrics({**kept, "calibrate/skipped_rows": len(report["skipped_rows"])})
    found = [
        [which, p["position"], round(p["share"], 3), round(p["largest_ratio"], 2)]
        for which, sinks in report["sinks"].items()
        for p in sinks["positions"]
    ]
    out.table("outlier_positions", ["model", "position", "share", "largest_ratio"], found)


def _merge_shares(settings: CalibrateSettings) -> Path | None:
    """Merge all shares into the run of the whole corpus, once all of them are there."""
    shares = [
        replace(settings, corpus=replace(settings.corpus, shard_index=i)) for i in range(settings.corpus.num_shards)
    ]
    folders = [settings.outputs / "calibrate" / calibration_id(share, shard=True) for share in shares]
    missing = [i for i, folder in enumerate(folders) if not finished(folder)]
    if missing:
        log.info("shares %s are missing; the last one to finish merges them", ", ".join(map(str, missing)))
        return None
    config = settings.calibration_config(shard=False)
    with open_run(settings.outputs, "calibrate", config, {}, settings.force) as run:
        if run.done:
            return run.path
        weighted = sorted(file.name for file in folders[0].glob("weighted.*.safetensors"))
        for name in [*(f"{split}.safetensors" for split in CALIBRATION_SPLITS), *weighted]:
            merged = first = Moments.load(folders[0] / name)
            for folder in folders[1:]:
                merged = merged.merge(Moments.load(folder / name))
            merged.finish(run.work / name, first.dtype)
        if any(getattr(settings.calibration.features, kind) for kind in RANDOM):
            merge_random([folder / RANDOM_FILE for folder in folders], run.work / RANDOM_FILE)
        reports = [read_json(folder / REPORT) for folder in folders]
        if settings.calibration.probe_rows:
            count = min(settings.calibration.probe_rows, sum(report["rows"]["validation"] for report in reports))
            merge_probes([folder / PROBE for folder in folders], count, run.work / PROBE)
        if settings.calibration.metrics:
            merge_metrics([folder / METRICS for folder in folders], run.work / METRICS)
        write_json(run.work / REPORT, _merged_report(reports, run.work, settings))
        log.info("merged %d shares", len(folders))
        return run.commit(merged_from=[folder.name for folder in folders])


def _merged_report(reports: list[dict[str, Any]], work: Path, settings: CalibrateSettings) -> dict[str, Any]:
    first = reports[0]
    if any(report["pair"] != first["pair"] for report in reports):
        raise KvxferError("the shares were calibrated with different checkpoints: run them again with force=true")
    total = {split: sum(report["rows"][split] for report in reports) for split in CALIBRATION_SPLITS}
    kept = {split: Moments.load(work / f"{split}.safetensors").count for split in CALIBRATION_SPLITS}
    # A share's row n is row n * shares + index of the corpus.
    skipped = [
        [split, row * len(reports) + index]
        for index, report in enumerate(reports)
        for split, row in report["skipped_rows"]
    ]
    sinks = {f"{which} (share {i})": s for i, report in enumerate(reports) for which, s in report["sinks"].items()}
    merged = {"rows": total, "kept_tokens": kept, "skipped_rows": skipped, "sinks": sinks}
    merged |= _weights_report(settings, work)
    return {**first, **merged, "rows_sha256": [report["rows_sha256"] for report in reports]}
