"""From what the harness logs of every sample to the scores of a benchmark under all conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.evals.benchmarks.tasks import Tasks
from kvxfer.evals.statistics import holm, is_binary, summarise_scores

Logged = Mapping[str, Any]
"""What the harness returns of one condition."""


@dataclass(frozen=True)
class _Samples:
    """One single task: its samples by id, and the measures that every one has under every condition."""

    records: list[dict[str, Any]]
    measures: list[str]
    filter: str


def gather(tasks: Tasks, logged: Mapping[str, Logged], log_samples: bool) -> dict[str, Any]:
    """Every benchmark with its conditions, tests and samples, and all of them together.

    Args:
        logged: the harness's results by condition.
        log_samples: keep what was answered beside how it scored.
    """
    found = {name: _samples(name, tasks.single[name], logged, log_samples) for name in tasks.single}
    benchmarks = [_benchmark(name, members, tasks, found) for name, members in tasks.members.items()]
    for key in ("mapped_vs_source", "mapped_vs_ceiling"):
        adjusted = holm([each["tests"][key]["accuracy_p"] for each in benchmarks])
        for each, p in zip(benchmarks, adjusted, strict=True):
            each["tests"][key]["accuracy_p_holm"] = p
    pooled = [each for each in benchmarks if each["binary"]] or benchmarks
    records = [record for each in pooled for record in each["samples"]]
    return {
        "benchmarks": benchmarks,
        "pooled": {"benchmarks": [each["name"] for each in pooled], **_summary(records)},
    }


def check_measures(tasks: Tasks, logged: Logged) -> None:
    """Raise KvxferError for a task that has no measure to compare, told from a few samples under one condition."""
    for name, task in tasks.single.items():
        _samples(name, task, {"one": logged}, keep=False)


def _samples(name: str, task: Any, logged: Mapping[str, Logged], keep: bool) -> _Samples:
    """The samples of one single task, under all conditions; the harness's first filter of answers counts."""
    first = next(iter(logged.values()))["samples"][name]
    if not first:
        raise KvxferError(f"eval.tasks: {name} has no samples; raise eval.limit or choose another task")
    chosen = first[0]["filter"]
    by_condition = {
        condition: {each["doc_id"]: each for each in results["samples"][name] if each["filter"] == chosen}
        for condition, results in logged.items()
    }
    records = []
    for sample in (each for each in first if each["filter"] == chosen):
        same = {condition: samples[sample["doc_id"]] for condition, samples in by_condition.items()}
        for condition, other in same.items():
            if other["arguments"] != sample["arguments"]:
                raise KvxferError(f"eval.tasks: {name} asks {condition} something else (sample {sample['doc_id']})")
        records.append(_record(name, task, sample, same, keep))
    return _Samples(records, _measures(name, task, records), chosen)


def _record(
    name: str, task: Any, sample: Mapping[str, Any], same: Mapping[str, Mapping[str, Any]], keep: bool
) -> dict[str, Any]:
    identity = f"{name}/{sample['doc_id']}"
    document = sample["doc"].get("document") if isinstance(sample["doc"], Mapping) else None
    record: dict[str, Any] = {
        "id": identity,
        "document": str(document) if document else identity,
        "sha256": sample["doc_hash"],
        "chance": _chance(task, sample),
        "scores": {
            measure: {condition: _number(other[measure]) for condition, other in same.items()}
            for measure in sample["metrics"]
        },
    }
    if keep:
        record["prompt_sha256"] = sample["prompt_hash"]
        record["expected"] = str(sample["target"])
        record["answers"] = {condition: _plain(other["filtered_resps"]) for condition, other in same.items()}
    return record


def _chance(task: Any, sample: Mapping[str, Any]) -> float:
    """What guessing scores: one of the choices, or nothing where the answer is written."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    # Mutual information asks every choice once more, without the context.
    asked = len(sample["arguments"]) // (2 if "acc_mutual_info" in sample["metrics"] else 1)
    return 1.0 / asked


def _number(value: Any) -> float | None:
    """A finite number, or None for what is only meant to be aggregated over a corpus."""
    if isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value):
        return float(value)
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _measures(name: str, task: Any, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Measures that every sample has as a number under every condition and of which more is better, in task order."""
    better = task.higher_is_better()
    found = [
        measure
        for measure in records[0]["scores"]
        if better.get(measure, True)
        and all(value is not None for record in records for value in record["scores"].get(measure, {"": None}).values())
    ]
    if not found:
        raise KvxferError(
            f"eval.tasks: {name} has no measure per sample of which more is better "
            f"({', '.join(records[0]['scores'])}); choose another task"
        )
    return found


def _benchmark(name: str, members: Sequence[str], tasks: Tasks, found: Mapping[str, _Samples]) -> dict[str, Any]:
    """One name that was asked for; a group's samples count alike, whichever of its tasks they belong to."""
    records = []
    for member in members:
        samples = found[member]
        # The task's first measure is what it is known by.
        records += [{**record, "measure": samples.measures[0]} for record in samples.records]
    single = [tasks.single[member] for member in members]
    return {
        "name": name,
        "measure": _one_of([found[member].measures[0] for member in members]),
        "filter": _one_of([found[member].filter for member in members]),
        "kind": _one_of([task.OUTPUT_TYPE for task in single]),
        "shots": _one_of([task.get_config("num_fewshot") for task in single]),
        "versions": {member: _plain(task.VERSION) for member, task in zip(members, single, strict=True)},
        "n": len(records),
        "available": sum(len(task.eval_docs) for task in single),
        **_summary(records),
        "others": _others(members, found),
        "members": {member: _means(found[member].records, found[member].measures[0]) for member in members},
        "samples": records,
    }


def _one_of(values: Sequence[Any]) -> Any:
    """The value that all have, or all of them, joined."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else ", ".join(map(str, distinct))


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    conditions = list(records[0]["scores"][records[0]["measure"]])
    scores = {
        condition: np.array([record["scores"][record["measure"]][condition] for record in records], dtype=np.float64)
        for condition in conditions
    }
    chance = np.array([record["chance"] for record in records], dtype=np.float64)
    documents = [record["document"] for record in records]
    return {
        "chance": float(chance.mean()),
        "binary": is_binary(scores),
        **summarise_scores(scores, chance, documents),
    }


def _means(records: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    conditions = records[0]["scores"][measure]
    return {name: float(np.mean([record["scores"][measure][name] for record in records])) for name in conditions}


def _others(members: Sequence[str], found: Mapping[str, _Samples]) -> dict[str, dict[str, float]]:
    """Means of the measures beside the first that all single tasks have."""
    shared = [m for m in found[members[0]].measures[1:] if all(m in found[each].measures[1:] for each in members)]
    records = [record for member in members for record in found[member].records]
    return {measure: _means(records, measure) for measure in shared}
