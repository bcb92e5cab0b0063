"""``python -m tools.collect outputs results/toy.json``: finished evaluations of a pair as JSON for committing.

Baselines' items are written once, each map with its settings, its cost and its own scores. Runs are sorted and numbers
rounded, so that collecting the same runs again writes the same file.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.files import RECORD, read_json, write_text
from kvxfer.report.schema import SCHEMA as RESULTS_SCHEMA

SCHEMA = 2
DECIMALS = 5
"""Of nats: far below what a test or a table can show."""

USUAL = {"selection_rows": 64, "weight_clip": 10.0}
"""Settings of a calibration that go without saying."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which evaluations: of which pair, which ``eval`` option or evaluation id, which W&B group or sweep directory."""

    pair: str | None = None
    eval: str | None = None
    group: str | None = None


def collect(outputs: Path, wanted: Wanted) -> Json:
    """All finished evaluations of a pair that are wanted, as one plain object.

    Raises:
        KvxferError: none is found, or several pairs are, or a run that an evaluation came from is missing.
    """
    found = list(_evaluations(outputs, wanted))
    if not found:
        raise KvxferError(f"no finished evaluation in {outputs / 'evaluate'} is wanted: check --pair, --eval, --group")
    pairs = sorted({results["pair"]["name"] for _, results in found})
    if len(pairs) > 1:
        raise KvxferError(f"evaluations of {', '.join(pairs)} in {outputs}: choose one with --pair")
    baselines, maps, environments = {}, [], []
    for run, results in found:
        identifier = results["provenance"]["inputs"]["baseline"]
        if identifier not in baselines:
            baselines[identifier] = _baseline(outputs / "baseline" / identifier)
        maps.append(_map(outputs, run, results, baselines[identifier]))
        environments.append({k: v for k, v in results["provenance"]["environment"].items() if k != "commit"})
    pair = found[0][1]["pair"]
    known = {json.dumps(each, sort_keys=True): each for each in environments}
    return {
        "schema": SCHEMA,
        "pair": {key: _named(pair[key]) for key in ("name", "source", "target", "dtype", "direction")},
        "environments": [known[text] for text in sorted(known)],
        "baselines": {key: baselines[key] for key in sorted(baselines)},
        "maps": sorted(maps, key=lambda one: json.dumps([one["settings"], one["runs"]], sort_keys=True)),
    }


def _evaluations(outputs: Path, wanted: Wanted) -> Iterator[tuple[Json, Json]]:
    """Record and results of every finished evaluation of items that is wanted, by id."""
    members = None if wanted.group is None else _members(outputs, wanted.group)
    for record in sorted((outputs / "evaluate").glob(f"[!.]*/{RECORD}")):
        run = read_json(record)
        if run["config"]["eval"].get("kind", "items") != "items":
            continue  # it asks no items
        identifier, option = run["run_id"], run["config"]["eval"]["name"]
        if wanted.eval not in (None, option, identifier) or (members is not None and identifier not in members):
            continue
        results = read_json(record.with_name("results.json"))
        if results.get("kind", "items") != "items" or wanted.pair not in (None, results["pair"]["name"]):
            continue
        if results["schema"] != RESULTS_SCHEMA:
            raise KvxferError(f"{record.parent} is of an earlier version: evaluate it again with force=true")
        yield run, results


def _members(outputs: Path, group: str) -> set[str]:
    """Ids of the evaluations of a sweep: its directory, its id, or its W&B group, which ends in the id."""
    places = [Path(group), outputs / "sweeps" / group, outputs / "sweeps" / group.rpartition("-")[2]]
    table = next((place / "summary.csv" for place in places if (place / "summary.csv").is_file()), None)
    if table is None:
        raise KvxferError(f"--group {group}: no summary.csv of such a sweep in {outputs / 'sweeps'}: name its folder")
    with table.open(encoding="utf-8", newline="") as file:
        return {Path(row["run"]).name for row in csv.DictReader(file) if row["run"]}


def _named(value: Any) -> Any:
    """A side of a pair by what names it; its geometry is no result, and a model that is whole need not say so."""
    if not isinstance(value, Mapping):
        return value
    return {key: item for key, item in value.items() if key != "geometry" and (key, item) != ("drop_layers", [])}


def _baseline(directory: Path) -> Json:
    """A baseline run: what it was asked, and its items as columns."""
    run, scores = read_json(directory / RECORD), read_json(directory / "baseline.json")
    items = scores["items"]
    conditions = {name: _scores(items, name) for name in items[0]["nats"]}
    return {
        "config": {key: run["config"][key] for key in ("corpus", "eval", "plan")},
        "version": run["version"],
        "commit": run["environment"]["commit"],
        "prompt_tokens": scores["prompt_tokens"],
        "gates": [{**gate, "value": float(f"{gate['value']:.3g}")} for gate in scores["gates"]],
        "items": {key: [item[key] for item in items] for key in ("id", "document", "kind", "tokens")},
        "chance": [round(item["chance"], DECIMALS) for item in items] if "chance" in items[0] else None,
        "conditions": conditions,
    }


def _scores(items: Sequence[Json], condition: str) -> Json:
    """One condition's nats, and right answers as a text of 0 and 1 (None without answers to choose from)."""
    answers = items[0].get("correct")
    return {
        "nats": [round(item["nats"][condition], DECIMALS) for item in items],
        "correct": "".join(str(int(item["correct"][condition])) for item in items) if answers else None,
    }


def _map(outputs: Path, run: Json, results: Json, baseline: Json) -> Json:
    """One map: settings, cost, diagnostics, scores and where all of it came from."""
    items, inputs = results["data"]["items"], results["provenance"]["inputs"]
    if [item["id"] for item in items] != baseline["items"]["id"]:
        raise KvxferError(f"evaluation {run['run_id']} has other items than its baselines: evaluate with force=true")
    train = outputs / "train" / inputs["train"]
    if not (train / RECORD).is_file():
        raise KvxferError(f"the map of evaluation {run['run_id']} is not in {train}: collect where it was fitted")
    manifest, fitted = read_json(train / "manifest.json"), read_json(train / RECORD)
    layers = read_json(train / "diagnostics.json")["layers"]
    calibrated = read_json(outputs / "calibrate" / inputs["calibrate"] / RECORD)
    cost = (
        "parameters",
        "bytes",
        "flops_per_token",
        "bytes_read_per_token",
        "bytes_written_per_token",
        "share_of_prefill_flops",
        "handoff_share_of_prefill_flops",
    )
    return {
        "settings": {key: manifest[key] for key in ("solver", "penalty", "rank", "features")},
        **(_trained(train, manifest, fitted) if "trainer" in manifest else {}),
        "chosen": manifest["chosen"],
        "calibration": {
            "corpus": calibrated["config"]["corpus"],
            "features": calibrated["config"]["calibration"]["features"]["name"],
            "settings": _calibrated(calibrated["config"]["calibration"], manifest),
            "kept_tokens": manifest["kept_tokens"],
        },
        "cost": {key: results["map"][key] for key in cost},
        "columns": max(layer["features"] for layer in layers),
        "r2_held_out": {kind: _mean_r2(layers, kind) for kind in ("keys", "values")},
        "fit_seconds": fitted["seconds"],
        "runs": {
            "evaluate": run["run_id"],
            "train": inputs["train"],
            "calibrate": inputs["calibrate"],
            "baseline": inputs["baseline"],
        },
        "map": results["map"]["sha256"],
        "versions": {"evaluate": run["version"], "train": fitted["version"], "calibrate": calibrated["version"]},
        "commit": results["provenance"]["environment"]["commit"],
        "scores": _scores(items, "mapped"),
    }


def _trained(train: Path, manifest: Json, fitted: Json) -> Json:
    """How a map was trained, what its training came to on the held-out rows, and on which base."""
    record = read_json(train / "training.json")
    numbers = {key: record[key] for key in ("steps", "best_step", "stopped", "seconds", "trained_parameters")}
    rounded = {key: float(f"{record[key]:.4g}") for key in ("lr", "seconds_per_step")}
    held_out = {
        which: {key: round(found[key], DECIMALS) for key in ("kl", "cosine", "attention_score")}
        for which, found in record["held_out"].items()
    }
    if "map_seconds" in record:  # not of the first trained maps
        rounded["map_seconds_ratio"] = float(f"{record['map_seconds']['ratio']:.3g}")
    corpus = fitted["config"]["corpus"]
    return {
        "trainer": manifest["trainer"],
        "training": {**numbers, **rounded, "corpus": corpus, "held_out": held_out},
        "base": manifest["base"],
    }


def _calibrated(settings: Json, manifest: Json) -> Json:
    """What a calibration was told, beyond its text, that changes this map; nothing where that is the default."""
    found = {key: settings[key] for key, usual in (("layers", None), ("stride", 1)) if settings[key] != usual}
    if settings["keep_layers"] is not None:
        rows = settings["selection_rows"]
        found |= {"keep_layers": settings["keep_layers"]}
        found |= {"selection_rows": rows} if rows != USUAL["selection_rows"] else {}
    if "weights" in manifest and manifest["weights"]["clip"] != USUAL["weight_clip"]:
        found["weight_clip"] = manifest["weights"]["clip"]
    return found


def _mean_r2(layers: Sequence[Json], kind: str) -> float:
    values = [layer["r2_held_out"] for layer in layers if layer["kind"] == kind]
    return round(sum(values) / len(values), DECIMALS)


def dumps(value: Any, depth: int = 0) -> str:
    """JSON with one line for each thing that changes by itself: a map's settings, its nats, one of its run ids."""
    if not isinstance(value, dict | list) or not value or depth >= 4 or not _holds_objects(value):
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True)
    inside, outside = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(str(key))}: {dumps(value[key], depth + 1)}" for key in sorted(value)]
        return "{\n" + ",\n".join(inside + part for part in parts) + "\n" + outside + "}"
    return "[\n" + ",\n".join(inside + dumps(item, depth + 1) for item in value) + "\n" + outside + "]"


def _holds_objects(value: dict[str, Any] | list[Any]) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return any(isinstance(item, dict | list) for item in values)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits with 1 and one line on a mistake."""
    parser = argparse.ArgumentParser("python -m tools.collect", description=(__doc__ or "").partition(":")[2].strip())
    parser.add_argument("outputs", type=Path, help="the outputs directory of the runs")
    parser.add_argument("results", type=Path, help="the JSON to write, e.g. results/toy.json")
    parser.add_argument("--pair", help="a pair's name")
    parser.add_argument("--eval", help="an option of eval (e.g. mapped), or the id of an evaluation")
    parser.add_argument("--group", help="a sweep: its directory, id or W&B group")
    given = parser.parse_args(arguments)
    try:
        text = dumps(collect(given.outputs, Wanted(given.pair, given.eval, given.group))) + "\n"
        try:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            write_text(given.results, text)
        except OSError as error:
            raise KvxferError(f"cannot write {given.results}: {error.strerror}") from error
    except KvxferError as error:
        sys.exit(f"error: {error}")
    print(given.results)


if __name__ == "__main__":
    main()
