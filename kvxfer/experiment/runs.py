"""Runs: content-addressed directories that exist only when they are complete.

A run's id is a hash of its stage, the stage's version, its scientific config and the ids of its inputs, so the same
question has the same id and is computed once. Work happens in a hidden directory beside the final one and becomes
visible by one rename. Its record holds the digests of its data: what was damaged since is set aside and made again.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import kvxfer
from kvxfer import __version__
from kvxfer.errors import KvxferError, file_error, files_of
from kvxfer.files import RECORD, file_sha256, read_json, write_json

log = logging.getLogger("kvxfer")

VERSIONS = {
    "calibrate": 5,  # 5: products in float32 where models run in less; files hold finished sums
    "train": 8,  # 8: the manifest says how long keys and values were in calibration
    "baseline": 4,  # 4: rows of one document each; the zeroed cache keeps the exact tokens
    "evaluate": 6,  # 6: as baseline; tests, verdicts and the check of the fit are others
    "compare": 5,  # 5: as evaluate
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
_DATA = (".json", ".safetensors")
_NOT_DATA = (RECORD, "log.json")


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

    def commit(self, before: float = 0.0, scaffold: Sequence[Path] = (), **extra: Any) -> Path:
        """Write the record, then put the directory in its place in one step.

        Args:
            before: seconds of work that killed processes have left.
            scaffold: what only a killed run needs; it goes once the record is there.
        """
        seconds = before + time.monotonic() - self.record.pop("_clock")
        files = {
            path.name: file_sha256(path)
            for path in sorted(self.work.iterdir())
            if _is_data(path) and path not in scaffold
        }
        self.record |= {"finished": _now(), "seconds": round(seconds, 1), "files": files, **extra}
        write_json(self.work / RECORD, self.record)
        for path in scaffold:
            _remove(path)
        if self.path.exists():
            old = self.path.with_name(f".{self.id}.old")
            shutil.rmtree(old, ignore_errors=True)
            self.path.rename(old)
            self.work.rename(self.path)
            shutil.rmtree(old, ignore_errors=True)
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
    run = Run(stage, identifier, home / identifier, work_directory(root, stage, identifier), {}, force)
    with files_of("paths.outputs", Path(root)), _locked(run) as locked:
        # Killed between the record and the rename: the result is complete.
        if locked and (run.work / RECORD).is_file() and not run.path.exists() and damage(run.work) is None:
            run.work.rename(run.path)
        if run.done and (wrong := damage(run.path)):
            _set_aside(run.path, wrong)
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


@contextmanager
def _locked(run: Run) -> Iterator[bool]:
    """The run's lock: two jobs of a sweep may need the same calibration; the second waits, then finds it done.

    A result in a place that can only be read needs none: then this is false.
    """
    home = run.path.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / f".{run.id}.lock").open("w")
    except OSError as error:
        if run.done and damage(run.path) is None:
            yield False
            return
        raise KvxferError(f"cannot write to {home} (paths.outputs): {file_error(error)}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise KvxferError(f"paths.outputs: {file_error(error, Path(lock.name))}") from error
        yield True


def finished(path: Path) -> bool:
    """Whether a complete run lies there whose data are as they were written; who makes it again sets it aside."""
    return (path / RECORD).is_file() and damage(path) is None


def damage(path: Path) -> str | None:
    """What is wrong with the files of a complete run, if anything is.

    Raises:
        KvxferError, OSError: they can't be read, which says nothing about what they hold.
    """
    try:
        record = read_json(path / RECORD)
        for name, digest in record.get("files", {}).items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            about = file.stat()
            if _digest_of(file, about.st_ino, about.st_size, about.st_mtime_ns) != digest:
                return f"{name} is not as it was written"
    except (KvxferError, AttributeError) as error:
        if isinstance(error.__cause__, OSError):
            raise
        return str(error)
    return None


@functools.lru_cache(256)
def _digest_of(file: Path, *changes: int) -> str:
    """The digest of a file that has not changed: the jobs of a sweep read one calibration many times."""
    return file_sha256(file)


def _remove(path: Path) -> None:
    """Remove a file or a folder, or leave what can't be removed: it is in nobody's way."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _is_data(path: Path) -> bool:
    return path.suffix in _DATA and path.name not in _NOT_DATA and path.is_file()


def _set_aside(path: Path, wrong: str) -> None:
    """Move a damaged run out of the way, where a person still finds it."""
    numbers = range(len(list(path.parent.glob(f".{path.name}.damaged*"))), 1_000_000)
    names = (path.with_name(f".{path.name}.damaged{number or ''}") for number in numbers)
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s is damaged (%s): it is set aside as %s and made again", path, wrong, aside.name)


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
