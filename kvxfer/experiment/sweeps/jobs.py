"""The jobs of a sweep: what each was asked, and what came of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvxfer.fitting.trained.specs import TrainerSpec
from kvxfer.report.swept import Value, write

# What may differ between two sweeps that ask the same questions.
_NOT_ASKED = (
    *(("logger",), ("paths",), ("force",), ("verify",), ("build_missing",), ("pair", "device")),
    *(("trainer", item.name) for item in fields(TrainerSpec) if item.metadata.get("id") is False),
)


@dataclass(frozen=True)
class Job:
    """One point of a grid.

    Attributes:
        number: its place in the sweep, from 0.
        values: its value of every swept key.
        config: the whole composed config.
    """

    number: int
    values: Mapping[str, Value]
    config: Any

    @property
    def label(self) -> str:
        """What tells this job from the others."""
        return " ".join(f"{key}={write(value)}" for key, value in self.values.items()) or "the only one"


@dataclass(frozen=True)
class Outcome:
    """What became of a job: the directory of its run, or the error that ended it. Plain text, as workers send it."""

    run: str | None = None
    error: str | None = None


def sweep_id(stage: str, configs: Sequence[Mapping[str, Any]]) -> str:
    """Eight hex digits that name a grid: the stage and what its jobs ask, in any order, however it was written."""
    asked = sorted(json.dumps(_asked(config), sort_keys=True, separators=(",", ":")) for config in configs)
    return hashlib.sha256("\n".join([stage, *asked]).encode()).hexdigest()[:8]


def _asked(config: Mapping[str, Any]) -> dict[str, Any]:
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for group, *rest in _NOT_ASKED:
        if rest:
            result.get(group, {}).pop(rest[0], None)
        else:
            result.pop(group, None)
    return result


def job_file(home: Path, number: int) -> Path:
    """Where the checked config of a job lies, for whichever process runs it."""
    return home / "jobs" / f"{number}.yaml"
