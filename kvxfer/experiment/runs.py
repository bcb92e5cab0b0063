"""Runs: content-addressed directories that exist only when they are complete.

A run's id is a hash of its stage, the stage's version, its scientific config and the ids of its inputs, so the same
question has the same id and is computed once. Work happens in a hidden directory beside the final one and becomes
visible by one rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import kvxfer
from kvxfer import __version__
from kvxfer.errors import KvxferError
from kvxfer.files import RECORD, read_json, write_json

VERSIONS = {
    "calibrate": 3,  # 3: what decides an id is said by the settings' fields
    "train": 4,  # 4: as calibrate
    "baseline": 2,  # 2: as calibrate
    "evaluate": 3,  # 3: one form of results for every kind; the condition random_map
    "compare": 2,  # 2: as evaluate
}
"""Raised whenever a stage's numbers may change, with a word on why: older runs are then not taken for new ones."""

_PACKAGES = (
    "torch",
    "transformers",
    "hydra-core",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "datasets",
    "wandb",
    "lightning",
)


def run_id(stage: str, config: dict[str, Any], inputs: dict[str, str]) -> str:
    """Twelve hex digits that name the question.

    Args:
        stage: one of VERSIONS.
        config: the scientific config: no device, paths or logger.
        inputs: the ids of the runs that this one reads, by role.
    """
    question = {"stage": stage, "version": VERSIONS[stage], "config": config, "inputs": inputs}
    text = json.dumps(question, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def work_directory(root: Path, stage: str, identifier: str) -> Path:
    """Where a run's files are written until it is complete."""
    return Path(root) / stage / f".{identifier}.partial"


@dataclass
class Run:
    """One run: ``work`` is where its files are written until ``commit`` moves them to ``path``.

    With ``again`` a result that is there is not taken, and stays until then.
    """

    stage: str
    id: str
    path: Path
    work: Path
    record: dict[str, Any]
    again: bool = False

    @property
    def done(self) -> bool:
        """Whether a complete result is there that will do."""
        return not self.again and (self.path / RECORD).is_file()

    def commit(self, before: float = 0.0, **extra: Any) -> Path:
        """Write the record, then put the directory in its place in one step.

        Args:
            before: seconds of work that killed processes have left.
        """
        seconds = before + time.monotonic() - self.record.pop("_clock")
        self.record |= {"finished": _now(), "seconds": round(seconds, 1), **extra}
        write_json(self.work / RECORD, self.record)
        if self.path.exists():
            old = self.path.with_name(f".{self.id}.old")
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
            self.work.rename(self.path)
            shutil.rmtree(old)
        else:
            self.work.rename(self.path)
        return self.path


@contextmanager
def open_run(
    root: Path, stage: str, config: dict[str, Any], inputs: dict[str, str], force: bool = False, resumable: bool = False
) -> Iterator[Run]:
    """The run of a question, locked against other processes while it is open.

    Args:
        root: the outputs directory; the run lives in ``root/stage/id``.
        force: compute again even if a result is there (it stays until the new one is complete).
        resumable: keep what a killed run left in the work directory.

    Yields:
        The run. When ``run.done`` is true there is nothing to do.
    """
    identifier = run_id(stage, config, inputs)
    home = Path(root) / stage
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f".{identifier}.lock").open("w")
    except OSError as error:
        raise KvxferError(f"cannot write to {home} (paths.outputs): {error.strerror}") from error
    with lock:
        # Two jobs of a sweep may need the same calibration: the second waits, then finds it done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = Run(stage, identifier, home / identifier, work_directory(root, stage, identifier), {}, force)
        if (run.work / RECORD).is_file() and not run.path.exists():
            # Killed between the record and the rename: the result is complete.
            run.work.rename(run.path)
        if run.done:
            run.record = read_json(run.path / RECORD)
            yield run
            return
        if run.work.exists() and not resumable:
            shutil.rmtree(run.work)
        run.work.mkdir(exist_ok=True)
        (run.work / RECORD).unlink(missing_ok=True)
        run.record = {
            "stage": stage,
            "version": VERSIONS[stage],
            "run_id": identifier,
            "config": config,
            "inputs": inputs,
            "started": _now(),
            "environment": environment(),
            "_clock": time.monotonic(),
        }
        yield run


def run_seconds(directory: Path) -> float | None:
    """Seconds that a finished run took, with those of the runs it was merged from; None where a record is missing."""
    if not (directory / RECORD).is_file():
        return None
    record = read_json(directory / RECORD)
    merged = [run_seconds(directory.with_name(name)) for name in record.get("merged_from", ())]
    known = [seconds for seconds in merged if seconds is not None]
    return float(record["seconds"] + sum(known)) if len(known) == len(merged) else None


def environment() -> dict[str, Any]:
    """What produced a result: interpreter, packages, machine, commit."""
    versions = {"kvxfer": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    machine = {"python": platform.python_version(), "machine": platform.machine(), "packages": versions}
    return {**machine, "commit": _commit()}


def _commit() -> str | None:
    """The commit of this package's own repository, or None: an installed package may lie inside another one."""
    package = Path(kvxfer.__file__).resolve().parent
    # Where the file lies in the repository; a copy that somebody put into one of theirs is not in its index.
    if _git(package, "ls-files", "--full-name", "__init__.py") != f"{package.name}/__init__.py":
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=12")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git answers about the repository that a folder lies in, wherever the user's own variables point."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
