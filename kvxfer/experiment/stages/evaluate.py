"""``evaluate.py``: what a map is worth, and the report that says so. One way for every kind of evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.specs import FullSpec
from kvxfer.experiment.identity import identity
from kvxfer.experiment.loggers import RunLogger, open_logger
from kvxfer.experiment.pins import refuse_changed
from kvxfer.experiment.runs import Run, environment, open_run, run_seconds
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.describing import EVIDENCE_FILE, columns, describe_map, keep_evidence, logged_metrics
from kvxfer.experiment.stages.full import full
from kvxfer.experiment.stages.random_map import refuse_random
from kvxfer.experiment.stages.train import find_map, find_reverse
from kvxfer.files import read_json, write_json
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.products import resolve_dtype
from kvxfer.models.hf.load import resolve_device
from kvxfer.models.machine import machine
from kvxfer.models.pair import Load, Pair, load_pair
from kvxfer.report.console import say
from kvxfer.report.document import RESULTS, written
from kvxfer.report.kinds import REPORTS
from kvxfer.report.rendering import plain, terminal, write
from kvxfer.report.schema import SCHEMA

log = logging.getLogger("kvxfer")


@dataclass(frozen=True)
class Scene:
    """What an evaluation is about: the map and where it lies, and where that of the other direction lies, if needed."""

    settings: EvaluateSettings
    spec: Evaluation
    cache_map: CacheMap
    directory: Path
    reverse: Path | None


@dataclass
class SharedRuns:
    """What maps of a pair share, each a run of its own; ``used`` are the ids of those that were asked for, by stage."""

    settings: EvaluateSettings
    used: dict[str, str] = field(default_factory=dict)

    def __call__(
        self, name: str, unread: Collection[str], asked: Mapping[str, Any], find: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """A run of the stage ``name``, made now if it is missing; what fails while it is made leaves none."""
        # What a plan is called decides nothing that maps share.
        plan = identity(self.settings.plan, ["name"])
        config = {**self.settings.question(unread), "plan": plan, **asked}
        with open_run(self.settings.outputs, name, config, {}) as run:
            if run.done:
                log.info("%ss %s are there already", name, run.id)
            else:
                write_json(run.work / f"{name}.json", find())
                run.commit()
        self.used[name] = run.id
        return dict(read_json(run.path / f"{name}.json"))


def evaluate(settings: EvaluateSettings, show: bool = True, load: Load = load_pair) -> list[Path]:
    """Evaluate a map (or find that it was) and return the paths of report.md, report.html and results.json.

    Args:
        show: print what came out; otherwise it is logged in one line.
        load: what loads a pair that is needed.
    """
    refuse_random(settings)
    directory, spec = find_map(settings), settings.eval
    cache_map = CacheMap.load(directory)
    settings.plan.require_seen(cache_map.skip_first)
    if isinstance(spec, FullSpec):
        # All parts ask the same pair; it is let go with the last of them.
        return full(settings, spec, directory, partial(evaluate, show=False, load=lru_cache(1)(load)), show)
    scene = Scene(settings, spec, cache_map, directory, find_reverse(settings, spec))
    config = {**settings.question(), "map_dtype": settings.map_dtype}
    config["domains"] = [settings.read(each) for each in settings.domains]
    if spec.timed:
        config["machine"] = machine(resolve_device(settings.pair.device))
    inputs = {"train": cache_map.hash}
    if scene.reverse is not None:
        reverse = CacheMap.load(scene.reverse)
        settings.plan.require_seen(reverse.skip_first)
        inputs["reverse"] = reverse.hash
    with open_run(settings.outputs, "evaluate", config, inputs, settings.force) as run:
        if run.done:
            log.info("evaluation %s is there already", run.id)
        else:
            shown = {"train": directory.name, "map": cache_map.hash}
            with open_logger(settings.logger, run, columns(settings, cache_map), shown) as out:
                results = measure(scene, run, load)
                write(results, run.work)
                write_json(run.work / EVIDENCE_FILE, plain(_evidence(results)))
                _log(out, results, run.work)
            run.commit()
    keep_evidence(cache_map, directory, run.path)
    results = read_json(run.path / RESULTS)
    report, title = REPORTS[results["kind"]], results["title"]
    if show:
        say(terminal(results))
    else:
        log.info("%s: %s", title, report.line(results["data"]))
        for warning in report.cautions(results["data"]):
            log.warning("%s: %s", title, warning)
    return written(run.path)


def measure(scene: Scene, run: Run, load: Load) -> dict[str, Any]:
    """results.json of an evaluation, measured now."""
    settings, spec, cache_map, directory = scene.settings, scene.spec, scene.cache_map, scene.directory
    pair = load(settings.pinned)
    refuse_changed(settings.pair_identity, pair.describe())
    cache_map.require(pair.describe())
    shared = SharedRuns(settings)
    subject = subject_of(scene, pair, shared)
    data = spec.measure(subject)
    said = data.pop("library_warnings", [])
    # The prefill that the map's cost is compared with.
    prompt = data.get("prompt_tokens", settings.corpus.length)
    m = cache_map.manifest
    inputs = {"train": directory.name, "map": cache_map.hash, "calibrate": m["calibration"], **shared.used}
    if scene.reverse is not None:
        inputs |= {"reverse": scene.reverse.name, "reverse_map": run.record["inputs"]["reverse"]}
    return {
        "schema": SCHEMA,
        "kind": spec.kind,
        "run_id": run.id,
        "title": f"{pair.name}: {m['features']['name']} features, {m['solver']['name']}",
        "pair": {"name": pair.name, **pair.describe()},
        "map": {
            **describe_map(cache_map, directory, pair, settings.plan, prompt),
            "dtype": _name(subject.mapper.dtype),
        },
        "verdict": vars(REPORTS[spec.kind].verdict(data)),
        "data": data,
        "provenance": {
            "inputs": inputs,
            "config": run.record["config"],
            "prompt_tokens": prompt,
            "plan": vars(settings.plan),
            "environment": environment(),
            "warnings": [*pair.remarks, *said],
            "started": run.record["started"],
        },
    }


def subject_of(scene: Scene, pair: Pair, shared: SharedRuns) -> Subject:
    settings = scene.settings
    return Subject(
        pair,
        scene.cache_map,
        _mapper(settings, pair, scene.cache_map),
        scene.directory,
        settings.plan,
        settings.corpus,
        settings.domains,
        None if scene.reverse is None else _reverse(settings, pair, scene.reverse),
        shared,
        _fit_seconds(scene),
    )


def _reverse(settings: EvaluateSettings, pair: Pair, directory: Path) -> Transfer:
    """The other direction, of the models that are loaded already."""
    other, cache_map = pair.reversed(), CacheMap.load(directory)
    cache_map.require(other.describe())
    return Transfer(other, _mapper(settings, other, cache_map), settings.plan)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mapper(settings: EvaluateSettings, pair: Pair, cache_map: CacheMap) -> Mapper:
    """The map as it is served: in the dtype that is asked for, or the fastest that does no harm."""
    device = pair.target.device
    return Mapper(cache_map, device, resolve_dtype(settings.map_dtype, device, pair.source.dtype), pair)


def _fit_seconds(scene: Scene) -> float | None:
    """How long calibration and fit took, by their runs' records; None where one has none."""
    calibration = scene.cache_map.manifest.get("calibration")
    if calibration is None:
        return None
    fit = run_seconds(scene.directory)
    calibrated = run_seconds(scene.settings.outputs / "calibrate" / calibration)
    return None if fit is None or calibrated is None else fit + calibrated


def _evidence(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside the map: the verdict, the numbers, and where they come from."""
    report = REPORTS[results["kind"]]
    about = {key: value for key, value in results.items() if key not in ("data", "map")}
    return {**about, "metrics": report.metrics(results["data"]), **report.evidence(results["data"])}


def _log(out: RunLogger, results: dict[str, Any], work: Path) -> None:
    report = REPORTS[results["kind"]]
    out.metrics(logged_metrics(results))
    for name, table in report.logged_tables(results["data"]).items():
        out.table(name, table.columns, table.rows)
    for figure in sorted(work.rglob("*.png")):
        out.figure(figure.stem, figure)
    out.artifact(f"eval-{results['run_id']}", "kv-eval", written(work), {"map": results["map"]["sha256"]})
