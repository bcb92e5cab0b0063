"""What results.json of every kind of evaluation must hold (``items``: ``kvxfer.report.tables``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.kinds import KINDS
from kvxfer.report.tables import require_keys, validate_results

SCHEMA = 1

MAP_SCHEMA: dict[str, str] = {
    "map.sha256": "names the map",
    **{f"map.{key}": "as in results.json of items" for key in ("features", "solver", "penalty", "rank", "k", "lam")},
}
"""What runs that stand side by side are known by."""

KIND_SCHEMA: dict[str, str] = {
    "schema": "1; raised when a key changes its meaning",
    "kind": "the evaluation: a name of kvxfer.evals.kinds, or full; without this key the file is one of items",
    "run_id": "id of the evaluation run",
    "title": "what was evaluated, for a heading",
    "pair": "source and target, revisions, dtype, direction",
    "map": "as in results.json of items",
    **MAP_SCHEMA,
    "verdict": "what it comes to",
    "verdict.kind": "beats, none, worse or mixed, against the source",
    "verdict.sentence": "the verdict with its numbers and p",
    "data": "what was measured; each kind's own",
    "provenance": "ids of the inputs, config, plan, versions, commit",
    "provenance.config.eval": "the evaluation's settings",
}
FULL_SCHEMA: dict[str, str] = {
    "verdict.word": "Worth it, No benefit, Harmful, Mixed or Not compared",
    "verdict.decided_by": "the part whose verdict this is; null where nothing was compared with the source",
    "verdict.against": "measured parts that say less",
    "verdict.in_favour": "measured parts that say more",
    "data.parts": "one object for each of eval.parts, in order",
}
PART_SCHEMA: dict[str, str] = {
    "name": "the option of eval",
    "status": "measured, failed or skipped",
}
MEASURED_SCHEMA: dict[str, str] = {
    "kind": "its evaluation",
    "heading": "what the report calls it",
    "run_id": "its own run, which has every single item's scores",
    "seconds": "that its run took",
    "verdict": "kind, head, sentence",
    "tasks": "[{part, task, n, ceiling, source, mapped (accuracies), retention, retention_ci, source_retention}]",
    "results": "its results.json without the lists of single items (items, samples)",
}
MISSING_SCHEMA = {"reason": "why it was not measured"}
VERDICTS = ("beats", "none", "worse", "mixed")


def validate(results: Mapping[str, Any]) -> None:
    """Raise KvxferError naming the first key that results.json of any kind lacks."""
    if "kind" not in results:
        validate_results(results)
        return
    require_keys(results, KIND_SCHEMA)
    kind, said = results["kind"], results["verdict"]["kind"]
    if results["schema"] != SCHEMA:
        raise KvxferError(
            f"results.json: schema is {results['schema']} and this version reads {SCHEMA}; evaluate again"
        )
    if kind not in (*KINDS, "full"):
        raise KvxferError(f"results.json: kind {kind!r} is none of {', '.join((*KINDS, 'full'))}")
    if said not in VERDICTS:
        raise KvxferError(f"results.json: verdict.kind {said!r} is none of {', '.join(VERDICTS)}")
    if kind == "full":
        _validate_full(results)


def _validate_full(results: Mapping[str, Any]) -> None:
    require_keys(results, FULL_SCHEMA)
    for index, part in enumerate(results["data"]["parts"]):
        place = f"data.parts.{index}"
        require_keys(part, PART_SCHEMA, place)
        if part["status"] not in ("measured", "failed", "skipped"):
            raise KvxferError(f"results.json: {place}.status is {part['status']!r}, not measured, failed or skipped")
        require_keys(part, MEASURED_SCHEMA if part["status"] == "measured" else MISSING_SCHEMA, place)
