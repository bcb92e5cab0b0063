"""``evaluate.py``: what a map is worth, and the report that says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvxfer.evals.conditions import Controls, Prepared, mapped_conditions
from kvxfer.evals.fit_check import FEWEST_TOKENS, check_fit
from kvxfer.evals.full import FullSpec
from kvxfer.evals.items import Batch, EvalSpec
from kvxfer.evals.records import Records, evaluate_items
from kvxfer.evals.statistics import summarise
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.runs import Run, environment, open_run
from kvxfer.experiment.settings import EvaluateSettings
from kvxfer.experiment.stages.baseline import Asked, Baselines, ask, find_baselines
from kvxfer.experiment.stages.describing import describe_map, evaluated_corpus, evaluation_loggers
from kvxfer.experiment.stages.finding import find_map
from kvxfer.experiment.stages.fit import SELECTION
from kvxfer.experiment.stages.full import full
from kvxfer.experiment.stages.measure import measure
from kvxfer.experiment.stages.random_map import refuse_random
from kvxfer.files import read_json
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.maps.random_weights import random_twin
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.pair import Load, Pair, load_pair
from kvxfer.progress import progress
from kvxfer.report.pages import RESULTS, written
from kvxfer.report.tables import number, percent
from kvxfer.report.verdict import cautions
from kvxfer.report.writing import terminal_table, write_results
from kvxfer.text.corpus import load_rows

log = logging.getLogger("kvxfer")

CHECKED_TOKENS = 2048
"""Of the prompts, so many tokens tell R² to far less than what the check of the fit tolerates."""


def evaluate(settings: EvaluateSettings, show: bool = True, load: Load = load_pair) -> list[Path]:
    """Evaluate a map (or find that it was) and return the paths of report.md, report.html and results.json.

    Args:
        show: print the table; otherwise one line is logged.
        load: what loads a pair that is needed.
    """
    refuse_random(settings)
    directory = find_map(settings)
    spec = settings.eval
    if isinstance(spec, FullSpec):
        # All parts ask the same pair; it is let go with the last of them.
        return full(settings, spec, directory, partial(evaluate, show=False, load=lru_cache(1)(load)), show)
    if not isinstance(spec, EvalSpec):
        return measure(settings, spec, directory, show, load)
    cache_map = CacheMap.load(directory)
    config = {
        "plan": vars(settings.plan),
        "eval": spec.identity(),
        "corpus": evaluated_corpus(settings.corpus),
        "pair": settings.pair_identity,
    }
    with open_run(settings.outputs, "evaluate", config, {"train": cache_map.hash}, settings.force) as run:
        if run.done:
            log.info("evaluation %s is there already", run.id)
        else:
            shown = {"train": directory.name, "map": cache_map.hash}
            with evaluation_loggers(settings, run, cache_map, shown) as out:
                results = _evaluate(settings, run, cache_map, directory, load)
                write_results(results, run.work)
                _log(out, results, run.work)
            run.commit()
            cache_map.add_evidence(directory, run.id, _evidence(results))
    results = read_json(run.path / RESULTS)
    if show:
        Console().print(terminal_table(results))
    else:
        log.info("%s: %s", results["title"], _line(results["conditions"]["mapped"]))
        for warning in cautions(results):
            log.warning("%s: %s", results["title"], warning)
    return written(run.path)


def _line(row: dict[str, Any]) -> str:
    """A mapped cache in one line, for a sweep or a comparison that ends with a table of its own."""
    right = "" if row["accuracy"] is None else f"{percent(row['accuracy'])} right, "
    return f"{right}{number(row['nats'])} nats per token, gap recovered {percent(row['gap_recovered_nats'])} in nats"


def _evaluate(settings: EvaluateSettings, run: Run, cache_map: CacheMap, directory: Path, load: Load) -> dict[str, Any]:
    pair = load(settings.pair)
    cache_map.require(pair.describe())
    asked = ask(settings, pair)
    baselines = find_baselines(settings, pair, asked)
    mapper = Mapper(cache_map, pair.target.device, pair=pair)
    random = None
    if settings.items.conditions == "all":
        random = Mapper(random_twin(cache_map, pair.target.geometry.kv_heads), pair.target.device, pair=pair)

    def score(plan: Plan, known: Records) -> Records:
        transfer = Transfer(pair, mapper, plan)

        def conditions(batch: Batch) -> dict[str, Prepared]:
            controls = None if random is None else Controls(batch.donors, replace(transfer, mapper=random))
            return mapped_conditions(transfer, batch.prompt, controls)

        return evaluate_items(asked.batches, conditions, asked.stop, advance, baselines=known)

    with progress(f"evaluate {pair.name}", asked.items * (1 if baselines.second is None else 2), "items") as advance:
        records = score(settings.plan, baselines.records)
        tables = {}
        if baselines.second is not None:
            second = score(asked.question(settings.plan), baselines.second)
            tables["story_only"] = summarise(list(second.values()))
    check = _check_fit(settings, pair, mapper, cache_map, directory, asked)
    return _results(settings, run, cache_map, directory, pair, asked.prompt, records, baselines, tables, check)


def _check_fit(
    settings: EvaluateSettings, pair: Pair, mapper: Mapper, cache_map: CacheMap, directory: Path, asked: Asked
) -> dict[str, Any] | None:
    """Whether the map does on some of the evaluation's text, each row about another document, what its fit reported.

    None where the fit recorded nothing, and where all rows together are too short to tell.
    """
    length, plan = asked.prompt, settings.plan
    first, stop = plan.mapped_span(length)
    count = max(1, CHECKED_TOKENS // length)
    if settings.corpus.kind == "toy":
        # Stories alone, which its questions follow, are another text than the rows that a map is fitted on.
        ids = load_rows(settings.corpus, pair.tokenizer, "evaluation", count, length).tokens
    else:
        prompts = {item.document: item.prompt for batch in asked.batches for item in batch.items}
        ids = torch.tensor([prompt for prompt in prompts.values() if len(prompt) == length][:count])
    if len(ids) * (stop - first) < FEWEST_TOKENS:
        return None
    return check_fit(pair, mapper, cache_map, directory, plan, ids)


def _results(
    settings: EvaluateSettings,
    run: Run,
    cache_map: CacheMap,
    directory: Path,
    pair: Pair,
    prompt: int,
    records: Records,
    baselines: Baselines,
    tables: dict[str, Any],
    check: dict[str, Any] | None,
) -> dict[str, Any]:
    m = cache_map.manifest
    ancestry = find_ancestry(pair)
    return {
        "schema": 1,
        "run_id": run.id,
        "title": f"{pair.name}: {m['features']['name']} features, {m['solver']['name']}",
        "pair": {"name": pair.name, **pair.describe()},
        "map": describe_map(cache_map, directory, pair, prompt),
        **summarise(list(records.values())),
        "tables": tables,
        "ancestry": None if ancestry is None else ancestry.to_dict(),
        "gates": baselines.gates,
        "fit_check": check,
        "selection": read_json(directory / SELECTION) if (directory / SELECTION).is_file() else None,
        "items": list(records.values()),
        "provenance": {
            "inputs": {
                "train": directory.name,
                "map": cache_map.hash,
                "calibrate": m["calibration"],
                "baseline": baselines.id,
            },
            "config": run.record["config"],
            "prompt_tokens": prompt,
            "plan": vars(settings.plan),
            "environment": environment(),
            "started": run.record["started"],
        },
    }


def _evidence(results: dict[str, Any]) -> dict[str, Any]:
    """What is kept beside the map: everything but the single items."""
    keys = ["run_id", "title", "conditions", "tests", "by_kind", "tables", "ancestry", "gates", "fit_check", "chance"]
    return {key: results[key] for key in [*keys, "provenance"]}


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
    out.artifact(f"eval-{results['run_id']}", "kv-eval", written(work), {"map": results["map"]["sha256"]})
