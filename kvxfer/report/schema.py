"""What results.json holds: one form for every kind of evaluation, and what each kind has under ``data``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.report.kinds import REPORTS

SCHEMA = 3
VERDICTS = ("beats", "none", "worse", "mixed", "unable")
COMPOSED = ("full", "designs")
"""Kinds whose data are other evaluations."""

# What every file must hold; docs/results-format.md says what each key means. "*" stands for every key of that object. A
# value may be null where a task has no such quantity, and objects may hold more keys than these.
KEYS = (
    *("schema", "kind", "run_id", "title", "pair", "pair.name", "map", "map.sha256"),
    *(f"map.{key}" for key in ("features", "solver", "penalty", "rank", "k", "lam")),
    *("map.share_of_prefill_flops", "map.handoff_share_of_prefill_flops"),
    *("verdict", "verdict.kind", "verdict.head", "verdict.sentence", "data", "provenance", "provenance.config.eval"),
)
_RATIOS = (
    *("retention", "retention_floor_normalised"),
    *(f"{base}_recovered{unit}" for base in ("gap", "context") for unit in ("", "_nats")),
)
_TEST = (
    *(f"{measure}_{key}" for measure in ("accuracy", "nll") for key in ("p", "difference", "ci", "se")),
    *("nll_sign_p", "nll_above", "n", "documents"),
)
NEEDED = ("mapped_vs_source", "source_vs_ceiling", "source_vs_no_context", "mapped_vs_no_context", "mapped_vs_floor")
ITEMS = (
    *(
        "conditions",
        "tests",
        *(f"tests.{each}" for each in NEEDED),
        "by_kind",
        "tables",
        "tables.*.conditions",
        "tables.*.tests",
    ),
    *("gates", "fit_check", "selection", "chance", "items", "ancestry"),
    *(f"conditions.{name}" for name in ("ceiling", "source", "mapped", "floor", "raw_copy", "no_context")),
    *(f"conditions.*.{key}" for key in ("accuracy", "accuracy_ci", "perplexity", "nats", "nats_ci", "generated", "n")),
    *(f"conditions.*.{key}" for key in _RATIOS),
    *(f"tests.*.{key}" for key in _TEST),
)
GATE = ("name", "value", "tolerance", "passed")
FULL = ("verdict.word", "verdict.decided_by", "verdict.against", "verdict.in_favour", "data.parts")
PART = ("name", "status")
PARTS = {
    "measured": ("kind", "heading", "run_id", "seconds", "verdict", "tasks", "results"),
    "failed": ("reason",),
    "skipped": ("reason",),
}
DESIGNS = ("data.designs", "data.best")


def validate(results: Mapping[str, Any]) -> None:
    """Raise KvxferError naming the first key that results.json lacks, or the value that it cannot have."""
    require_keys(results, KEYS)
    kind, said = results["kind"], results["verdict"]["kind"]
    if results["schema"] != SCHEMA:
        raise KvxferError(
            f"results.json: schema is {results['schema']} and this version reads {SCHEMA}; evaluate again"
        )
    if kind not in (known := (*REPORTS, *COMPOSED)):
        raise KvxferError(f"results.json: kind {kind!r} is none of {', '.join(known)}")
    if said not in VERDICTS:
        raise KvxferError(f"results.json: verdict.kind {said!r} is none of {', '.join(VERDICTS)}")
    if (check := {"items": _items, "full": _full, "designs": _designs}.get(kind)) is not None:
        check(results)


def _items(results: Mapping[str, Any]) -> None:
    require_keys(results["data"], ITEMS, "data")
    for index, gate in enumerate(results["data"]["gates"]):
        require_keys(gate, GATE, f"data.gates.{index}")


def _full(results: Mapping[str, Any]) -> None:
    require_keys(results, FULL)
    for index, part in enumerate(results["data"]["parts"]):
        place = f"data.parts.{index}"
        require_keys(part, PART, place)
        if part["status"] not in PARTS:
            raise KvxferError(f"results.json: {place}.status is {part['status']!r}, not measured, failed or skipped")
        require_keys(part, PARTS[part["status"]], place)


def _designs(results: Mapping[str, Any]) -> None:
    require_keys(results, DESIGNS)
    designs, best = results["data"]["designs"], results["data"]["best"]
    for name, design in designs.items():
        try:
            validate(design)
        except KvxferError as error:
            raise KvxferError(f"design {name}: {error}") from error
    if best not in designs:
        raise KvxferError(f"results.json: best is {best} and the designs are {', '.join(designs)}; name one")


def require_keys(results: Any, keys: Sequence[str], path: str = "") -> None:
    """Raise KvxferError naming the first of some dotted keys that ``results``, which lie at ``path``, lack."""
    for key in keys:
        _require(results, path, key)


def _require(results: Any, path: str, key: str) -> None:
    head, _, rest = key.partition(".")
    if not isinstance(results, Mapping):
        if results is None and path:
            return
        raise KvxferError(f"results.json: {path or 'the file'} must be an object and is {type(results).__name__}")
    for name in results if head == "*" else (head,):
        full = f"{path}.{name}" if path else name
        if name not in results:
            raise KvxferError(f"results.json: key {full} is missing (docs/results-format.md says what it holds)")
        if rest:
            _require(results[name], full, rest)
