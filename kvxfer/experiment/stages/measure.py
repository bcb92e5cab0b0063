"""An evaluation of a kind of its own: measured once, told from its JSON, logged like any other."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.console import Console

from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.kinds import KINDS
from kvxfer.evals.latency.clocks import machine
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.runs import Run, environment, open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.describing import describe_map, evaluated_corpus, evaluation_loggers
from kvxfer.experiment.stages.finding import find_reverse
from kvxfer.files import read_json
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.hf import resolve_device
from kvxfer.models.pair import Load, Pair, load_pair
from kvxfer.report.pages import RESULTS, written
from kvxfer.report.rendering import write_report

log = logging.getLogger("kvxfer")

SCHEMA = 1


def measure(
    settings: EvaluateSettings, spec: Evaluation, directory: Path, show: bool = True, load: Load = load_pair
) -> list[Path]:
    """Measure a map (or find that it was) and return the paths of report.md, report.html and results.json.

    Args:
        directory: where the map lies.
        show: print the verdict; otherwise it is logged.
        load: what loads a pair that is needed.
    """
    cache_map = CacheMap.load(directory)
    inputs = {"train": cache_map.hash}
    if (reverse := find_reverse(settings, spec)) is not None:
        inputs["reverse"] = CacheMap.load(reverse).hash
    config = {
        "plan": vars(settings.plan),
        "eval": spec.identity(),
        "corpus": evaluated_corpus(settings.corpus),
        "domains": [evaluated_corpus(each) for each in settings.domains],
        "pair": settings.pair_identity,
    }
    if spec.timed:
        config["machine"] = machine(resolve_device(settings.pair.device))
    with open_run(settings.outputs, "evaluate", config, inputs, settings.force) as run:
        if run.done:
            log.info("evaluation %s is there already", run.id)
        else:
            shown = {"train": directory.name, "map": cache_map.hash}
            with evaluation_loggers(settings, run, cache_map, shown) as out:
                results = _measure(settings, spec, run, cache_map, directory, reverse, load)
                write_report(results, run.work)
                _log(out, results, run.work)
            run.commit()
            evidence = {key: value for key, value in results.items() if key not in ("data", "map")}
            cache_map.add_evidence(directory, run.id, {**evidence, "metrics": spec.metrics(results["data"])})
    results = read_json(run.path / RESULTS)
    if show:
        Console().print(f"{results['title']}\n{results['verdict']['sentence']}", highlight=False)
    else:
        log.info("%s: %s", results["title"], results["verdict"]["sentence"])
    return written(run.path)


def _measure(
    settings: EvaluateSettings,
    spec: Evaluation,
    run: Run,
    cache_map: CacheMap,
    directory: Path,
    reverse: Path | None,
    load: Load,
) -> dict[str, Any]:
    pair = load(settings.pair)
    cache_map.require(pair.describe())
    data = spec.measure(subject_of(settings, pair, cache_map, directory, reverse))
    verdict = spec.verdict(data)
    m = cache_map.manifest
    return {
        "schema": SCHEMA,
        "kind": spec.kind,
        "run_id": run.id,
        "title": f"{pair.name}: {m['features']['name']} features, {m['solver']['name']}",
        "pair": {"name": pair.name, **pair.describe()},
        "map": describe_map(cache_map, directory, pair, settings.corpus.length),
        "verdict": {"kind": verdict.kind, "sentence": verdict.sentence},
        "data": data,
        "provenance": {
            "inputs": {
                "train": directory.name,
                "map": cache_map.hash,
                "calibrate": m["calibration"],
                **(
                    {} if reverse is None else {"reverse": reverse.name, "reverse_map": run.record["inputs"]["reverse"]}
                ),
            },
            "config": run.record["config"],
            "plan": vars(settings.plan),
            "environment": environment(),
            "started": run.record["started"],
        },
    }


def subject_of(
    settings: EvaluateSettings, pair: Pair, cache_map: CacheMap, directory: Path, reverse: Path | None = None
) -> Subject:
    """What an evaluation is given; ``reverse`` is where the map of the other direction lies."""
    return Subject(
        pair,
        cache_map,
        Mapper(cache_map, pair.target.device, pair=pair),
        directory,
        settings.plan,
        settings.corpus,
        settings.domains,
        settings.outputs,
        None if reverse is None else _reverse(settings, pair, reverse),
    )


def _reverse(settings: EvaluateSettings, pair: Pair, directory: Path) -> Transfer:
    """The other direction, of the models that are loaded already."""
    other, cache_map = pair.reversed(), CacheMap.load(directory)
    cache_map.require(other.describe())
    return Transfer(other, Mapper(cache_map, other.target.device, pair=other), settings.plan)


def _log(out: RunLogger, results: dict[str, Any], work: Path) -> None:
    kind = results["kind"]
    out.metrics({f"eval/{kind}/{key}": value for key, value in KINDS[kind].metrics(results["data"]).items()})
    for figure in sorted(work.rglob("*.png")):
        out.figure(figure.stem, figure)
    out.artifact(f"eval-{results['run_id']}", "kv-eval", written(work), {"map": results["map"]["sha256"]})
