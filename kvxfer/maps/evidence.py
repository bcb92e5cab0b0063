"""What evaluations found of a map: read from beside it, or from folders that somebody names.

A record is what ``evaluate.py`` keeps as ``evidence.json`` and beside the map (results.json without its items). It
names the map by its hash: evidence of another map is evidence of nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.files import read_json
from kvxfer.maps.artifact import EVIDENCE

SCHEMA = 3
"""Of results.json, whose parts a record is."""

METRICS = (
    *("accuracy", "retention", "retention_floor_normalised", "gap_recovered", "gap_recovered_nats"),
    *("context_recovered", "context_recovered_nats"),
)
"""Numbers of the mapped cache that a policy may ask for, as results.json names them; of each more is better."""


@dataclass(frozen=True)
class Evidence:
    """One evaluation of one map.

    Attributes:
        map: the map's hash.
        run: the evaluation's id.
        kind: of evaluation: ``items`` may admit a map, ``latency`` says from which length on it pays.
        task: the option of ``eval``.
        domain: the option of ``corpus``; empty for an evaluation that reads no text.
        plan: ``exact_first`` and ``hold_back`` of the plan that it was measured under.
        items, documents: how many were asked; 0 where a record has no items.
        verdict: the kind of the verdict; ``beats`` says that source and everything that costs no map are beaten.
        metrics: of the mapped cache, with the lower end of the 95 % interval (or the number itself, where it has none).
        machine: what was timed on, of ``latency``.
        break_even: tokens from which on a warm handoff of one prompt pays, of ``latency``; None where it never did.
        date: when the evaluation began, in ISO 8601.
    """

    map: str
    run: str
    kind: str
    task: str
    domain: str
    plan: dict[str, int]
    items: int
    documents: int
    verdict: str
    metrics: dict[str, tuple[float, float]]
    machine: dict[str, Any]
    break_even: float | None
    date: str

    @staticmethod
    def of(record: Mapping[str, Any], where: str) -> Evidence:
        """A record as it was kept; ``where`` it lies, for messages.

        Raises:
            KvxferError: it is of another schema, or is none.
        """
        if record.get("schema") != SCHEMA:
            raise KvxferError(f"{where}: evidence of schema {record.get('schema')} is not {SCHEMA}: evaluate again")
        try:
            provenance, kind = record["provenance"], str(record["kind"])
            config, plan = provenance["config"], provenance["plan"]
            mapped = record.get("conditions", {}).get("mapped", {}) if kind == "items" else {}
            test = record.get("tests", {}).get("mapped_vs_source", {})
            timed = record if kind == "latency" else {}
            return Evidence(
                map=str(record["map"]),
                run=str(record["run_id"]),
                kind=kind,
                task=str(config["eval"].get("name", kind)),
                domain=str(config.get("corpus", {}).get("name", "")),
                plan={key: int(plan[key]) for key in ("exact_first", "hold_back")},
                items=int(test.get("n", 0)),
                documents=int(test.get("documents", 0)),
                verdict=str((record["verdict"] or {}).get("kind", "")),
                metrics={name: _with_lower(mapped, name) for name in METRICS if mapped.get(name) is not None},
                machine={key: timed["machine"][key] for key in ("device", "name")} if timed else {},
                break_even=_break_even(timed["break_even"]) if timed else None,
                date=str(provenance["started"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise KvxferError(f"{where} is no evidence of an evaluation ({error!r}): evaluate again") from error


def read_evidence(directory: Path, map_hash: str, more: Iterable[Path] = ()) -> list[Evidence]:
    """All evidence of a map, the latest first.

    Args:
        directory: the map's; what lies in its ``evidence/`` is read.
        more: folders with records (``*.json``), or runs of ``evaluate.py`` (their ``evidence.json``).

    Raises:
        KvxferError: a folder that was named is missing, or a file is no evidence.
    """
    files = sorted((directory / EVIDENCE).glob("*.json"))
    for folder in more:
        if not folder.is_dir():
            raise KvxferError(f"evidence: {folder} is no folder")
        own = folder / "evidence.json"
        files += [own] if own.is_file() else sorted(folder.glob("*.json"))
    found = {}
    for file in files:
        record = read_json(file)
        # What is said of another map may be of any schema.
        if isinstance(record, dict) and record.get("map") != map_hash:
            continue
        evidence = Evidence.of(record if isinstance(record, dict) else {}, str(file))
        found[evidence.run] = evidence
    return sorted(found.values(), key=lambda each: (each.date, each.run), reverse=True)


def _with_lower(mapped: Mapping[str, Any], name: str) -> tuple[float, float]:
    value, interval = float(mapped[name]), mapped.get(f"{name}_ci")
    return value, value if interval is None else float(interval[0])


def _break_even(found: Iterable[Mapping[str, Any]]) -> float | None:
    """Of one prompt by itself, warm."""
    warm = next((each["warm"] for each in found if each["batch"] == 1), None)
    return None if warm is None else float(warm)
