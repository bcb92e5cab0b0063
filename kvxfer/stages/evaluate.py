"""``evaluate.py``: what a map is worth, and the report that says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvxfer.ancestry import find_ancestry
from kvxfer.apply import Mapper
from kvxfer.errors import KvxferError
from kvxfer.evals.evaluation import Records, evaluate_items, held_back_question
from kvxfer.evals.gates import run_gates
from kvxfer.evals.items import Batch, Item, batches, choice_items, text_items, toy_items
from kvxfer.evals.statistics import summarise
from kvxfer.loggers import RunLogger, open_loggers
from kvxfer.maps import CacheMap
from kvxfer.pairs import Pair, load_pair
from kvxfer.progress import progress
from kvxfer.report import terminal_table, write_results
from kvxfer.runs import RECORD, Run, environment, open_run, read_json
from kvxfer.stages.settings import EvaluateSettings, dials, label
from kvxfer.stages.train import SELECTION, train, train_id

log = logging.getLogger("kvxfer")


def evaluate(settings: EvaluateSettings, show: bool = True) -> list[Path]:
    """Evaluate a map (or find that it was) and return the paths of report.md and results.json."""
    directory = find_map(settings)
    cache_map = CacheMap.load(directory)
    corpus = settings.corpus.identity()
    config = {
        "plan": vars(settings.plan),
        "eval": vars(settings.eval),
        "corpus": {k: v for k, v in corpus.items() if k not in ("rows", "skip_first")}
        | {"rows": corpus["rows"]["evaluation"]},
        "pair": settings.pair_identity,
    }
    with open_run(settings.outputs, "evaluate", config, {"train": cache_map.hash}, settings.force) as run:
        if run.done:
            log.info("evaluation %s is there already", run.id)
        else:
            columns = _columns(settings, cache_map)
            name, tags = label(columns)
            about = {**columns, "config": config, "inputs": {"train": directory.name, "map": cache_map.hash}}
            group = settings.logger.group or settings.pair.label
            with open_loggers(settings.logger, run.work, run.id, "evaluate", name, about, group, tags) as out:
                results = _evaluate(settings, run, cache_map, directory)
                write_results(results, run.work)
                _log(out, results, run.work)
            run.commit()
            cache_map.add_evidence(directory, run.id, _evidence(results))
    if show:
        Console().print(terminal_table(read_json(run.path / "results.json")))
    return [run.path / "report.md", run.path / "results.json"]


def find_map(settings: EvaluateSettings) -> Path:
    """The directory of the map: ``map`` if it is given, else that of the config, fitted now if it is missing."""
    if settings.map is not None:
        for path in (Path(settings.map), settings.outputs / "train" / settings.map):
            if path.is_dir():
                return path
        raise KvxferError(f"map={settings.map} is no directory and no run in {settings.outputs / 'train'}")
    path = settings.outputs / "train" / train_id(settings)
    if (path / RECORD).is_file():
        return path
    if not settings.build_missing:
        raise KvxferError(
            f"no map {path.name} in {path.parent}: run train.py with these settings, or set build_missing=true"
        )
    log.info("map %s is missing and is fitted first", path.name)
    return train(replace(settings, force=False))


def _columns(settings: EvaluateSettings, cache_map: CacheMap) -> dict[str, Any]:
    """Flat columns from the map's own manifest: with ``map=`` it need not be the config's."""
    m = cache_map.manifest
    names = {key: m[key]["name"] for key in ("solver", "penalty", "rank", "features")}
    about = {"plan": settings.plan.name, "corpus": settings.corpus.name, "eval": settings.eval.name}
    return {"pair": settings.pair.label, **names, **dials(m), **about}


def _evaluate(settings: EvaluateSettings, run: Run, cache_map: CacheMap, directory: Path) -> dict[str, Any]:
    pair = load_pair(settings.pair)
    cache_map.require(pair.describe())
    length = settings.eval.length or settings.corpus.length
    pair.check_length(length, "eval.length" if settings.eval.length else "corpus.length")
    toy = settings.corpus.kind == "toy"
    items = _items(settings, pair, length)
    parts = list(batches(items, settings.eval.batch_size))
    gates = run_gates(pair, parts[0])
    mapper = Mapper(cache_map, pair.target.device, pair=pair)
    stop = pair.tokenizer.convert_tokens_to_ids(".") if toy and settings.eval.generate else None
    total = len(items) * (2 if toy else 1)
    with progress(f"evaluate {pair.name}", total, "items") as advance:
        records = evaluate_items(pair, mapper, settings.plan, parts, stop, advance)
        tables = {}
        if toy:
            question = settings.plan.holding_back(held_back_question(parts[0]))
            second = evaluate_items(pair, mapper, question, parts, stop, advance, baselines=records)
            tables["story_only"] = summarise(list(second.values()))
    return _results(settings, run, cache_map, directory, pair, parts, records, gates, tables)


def _items(settings: EvaluateSettings, pair: Pair, length: int) -> list[Item]:
    """What is asked: about the toy's stories, which text follows a prefix, or the text itself."""
    if settings.corpus.kind == "toy":
        return toy_items(settings.eval, pair.tokenizer, length)
    task = choice_items if settings.eval.choices else text_items
    return task(settings.eval, settings.corpus, pair.tokenizer, length)


def _results(
    settings: EvaluateSettings,
    run: Run,
    cache_map: CacheMap,
    directory: Path,
    pair: Pair,
    parts: list[Batch],
    records: Records,
    gates: list[dict[str, Any]],
    tables: dict[str, Any],
) -> dict[str, Any]:
    m = cache_map.manifest
    prompt = parts[0].prompt.shape[1]
    ancestry = find_ancestry(pair)
    return {
        "schema": 1,
        "run_id": run.id,
        "title": f"{pair.name}: {m['features']['name']} features, {m['solver']['name']}",
        "pair": {"name": pair.name, **pair.describe()},
        "map": {
            "run_id": directory.name,
            "sha256": cache_map.hash,
            **{key: m[key]["name"] for key in ("solver", "penalty", "rank", "features")},
            "lam": m["penalty"]["lam"],
            "k": m["solver"]["k"],
            "parameters": cache_map.parameters,
            "bytes": cache_map.bytes,
            "flops_per_token": cache_map.flops_per_token,
            "share_of_prefill_flops": cache_map.flops_per_token / pair.target.geometry.prefill_flops(prompt),
        },
        **summarise(list(records.values())),
        "tables": tables,
        "ancestry": None if ancestry is None else ancestry.to_dict(),
        "gates": gates,
        "selection": read_json(directory / SELECTION) if (directory / SELECTION).is_file() else None,
        "items": list(records.values()),
        "provenance": {
            "inputs": {"train": directory.name, "map": cache_map.hash, "calibrate": m["calibration"]},
            "config": run.record["config"],
            "prompt_tokens": prompt,
            "plan": vars(settings.plan),
            "environment": environment(),
            "started": run.record["started"],
        },
    }


def _evidence(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside the map: everything but the single items."""
    keys = ("run_id", "title", "conditions", "tests", "by_kind", "tables", "ancestry", "gates", "chance", "provenance")
    return {key: results[key] for key in keys}


def _log(out: RunLogger, results: dict[str, Any], work: Path) -> None:
    flat = {}
    for name, row in results["conditions"].items():
        for key, value in row.items():
            if isinstance(value, int | float):
                flat[f"eval/{name}/{key}"] = value
    for name, row in results["tests"].items():
        flat |= {f"eval/{name}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
    out.metrics(flat)
    columns = ["condition", "accuracy", "perplexity", "nats", "retention_floor_normalised", "gap_recovered"]
    rows = [[name, *(row[c] for c in columns[1:])] for name, row in results["conditions"].items()]
    out.table("conditions", columns, rows)
    for figure in sorted(work.rglob("*.png")):
        out.figure(figure.stem, figure)
    files = [work / "results.json", work / "report.md"]
    out.artifact(f"eval-{results['run_id']}", "kv-eval", files, {"map": results["map"]["sha256"]})
