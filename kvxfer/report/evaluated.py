"""Finished evaluations by directory or id, and which of them were asked the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.files import RECORD, read_json
from kvxfer.report.document import RESULTS
from kvxfer.report.kinds import REPORTS
from kvxfer.report.schema import validate

Json = Mapping[str, Any]

_NO_QUESTION = ("name", "conditions", "generate", "batch_size")
"""What an option says beside what it asks."""

_NO_MODEL = ("name", "longest_context")
"""What a pair says beside which two models it is."""


@dataclass(frozen=True)
class Evaluated:
    """One finished evaluation; ``label`` is its letter in the tables."""

    label: str
    results: Json

    @property
    def id(self) -> str:
        return str(self.results["run_id"])

    @property
    def kind(self) -> str:
        return str(self.results["kind"])

    @property
    def option(self) -> str:
        """The option of ``eval``, where it is known."""
        return str(self.results["provenance"]["config"]["eval"].get("name", self.kind))

    @property
    def map_name(self) -> str:
        """The map's settings, in one cell."""
        m = self.results["map"]
        seed = f" (seed {m['trainer_seed']})" if "trainer_seed" in m else ""
        return f"{m['features']}, {m['solver']}{seed}, {m['penalty']}, {m['rank']}, k = {m['k']}, λ = {m['lam']}"

    @property
    def plan(self) -> str:
        """Which tokens the target computed itself."""
        plan = self.results["provenance"].get("plan") or {}
        return f"{plan.get('name', '?')} ({plan.get('exact_first', '?')} first, {plan.get('hold_back', '?')} last)"

    @property
    def question(self) -> str:
        """All that two evaluations must share to be tested against one another, as a text to compare."""
        config, pair = self.results["provenance"]["config"], self.results["pair"]
        asked = {
            "kind": self.kind,
            "pair": {key: value for key, value in pair.items() if key not in _NO_MODEL},
            "eval": {key: value for key, value in config["eval"].items() if key not in _NO_QUESTION},
            "texts": [config.get("corpus"), config.get("domains")],
            "machine": config.get("machine"),
            "items": {
                name: [[item[key] for key in ("id", "document", "tokens")] for item in items]
                for name, items in self.items.items()
            },
        }
        return json.dumps(asked, sort_keys=True)

    @property
    def items(self) -> dict[str, list[Json]]:
        """Every list of items that a mapped cache was scored on; that of questions has an empty name."""
        return REPORTS[self.kind].paired(self.results["data"])


def find(names: Sequence[str], outputs: Path) -> list[Evaluated]:
    """Evaluations by directory or by id below ``outputs``; a full report or a comparison stands for its parts.

    Raises:
        KvxferError: one is not there, is not finished, or is no evaluation.
    """
    found: dict[tuple[str, str], Json] = {}
    for name in names:
        folder = _folder(name, outputs)
        for results in _expanded(folder, read_json(folder / RESULTS)):
            found.setdefault((results["run_id"], results["map"]["sha256"]), results)
    letters = [*ascii_uppercase, *(a + b for a in ascii_uppercase for b in ascii_uppercase)]
    return [Evaluated(letter, results) for letter, results in zip(letters, found.values(), strict=False)]


def _folder(name: str, outputs: Path) -> Path:
    places = [Path(name), outputs / "evaluate" / name, outputs / "compare" / name]
    if Path(name).name == RESULTS:
        places.insert(0, Path(name).parent)
    folder = next((place for place in places if (place / RESULTS).is_file()), None)
    if folder is None:
        there = next((place for place in places if place.is_dir()), None)
        said = f"{there} has no {RESULTS}" if there else f"there is no such directory, and no such id in {outputs}"
        if there and (there / RECORD).is_file():
            said = f"{there} is a run, but no evaluation (it has no {RESULTS})"
        raise KvxferError(f"{name}: {said}; name finished evaluations (directories or ids; ids: --outputs)")
    return folder


def _expanded(folder: Path, results: Json) -> Iterator[Json]:
    """The single evaluations that results.json is about."""
    if not isinstance(results, Mapping):
        raise KvxferError(f"{folder / RESULTS} is no evaluation's: it holds no object")
    try:
        validate(results)
    except KvxferError as error:
        raise KvxferError(f"{folder}: {error}") from error
    if results["kind"] == "designs":
        yield from results["data"]["designs"].values()
    elif results["kind"] != "full":
        yield results
    else:
        for part in results["data"]["parts"]:
            if part["status"] == "measured":
                beside = folder.parent / part["run_id"]
                if not (beside / RESULTS).is_file():
                    raise KvxferError(f"{folder}: its part {part['name']} is not beside it ({beside} is missing)")
                yield from _expanded(beside, read_json(beside / RESULTS))


def finished(outputs: Path) -> list[Json]:
    """The results of every evaluation in a folder of outputs that this version can read, older ones first."""
    files = sorted((outputs / "evaluate").glob(f"*/{RESULTS}"), key=lambda each: each.stat().st_mtime)
    found = []
    for file in files:
        # What another version or a broken disk left must not end a report of other runs.
        with suppress(KvxferError):
            validate(results := read_json(file))
            found.append(results)
    return found


def groups(runs: Sequence[Evaluated]) -> list[list[Evaluated]]:
    """Runs that were asked the same, in the order given."""
    found: dict[str, list[Evaluated]] = {}
    for run in runs:
        found.setdefault(run.question, []).append(run)
    return list(found.values())
