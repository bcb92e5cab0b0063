"""Reads what W&B wrote offline (``run-<id>.wandb``), so that tests can look at it without a server.

The format is W&B's own and private: a 7-byte header, then LevelDB log records (blocks of 32 KiB, records of CRC-32,
length and type) that hold protocol buffers. The canary is in test_loggers.py.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _RECORD = 7, 32 * 1024, 7
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """One run as W&B recorded it."""

    id: str = ""
    name: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict)
    exit_code: int | None = None

    def points(self, name: str) -> list[Any]:
        """All values of one metric, in order."""
        return [row[name] for row in self.history if name in row]


def read_runs(directory: Path, patience: float = 20) -> list[OfflineRun]:
    """Every offline run below a directory, in order of their directories' names.

    W&B's own process may still be writing when ``finish`` has returned: all exits are waited for, ``patience`` seconds.
    """
    end = time.monotonic() + patience
    while True:
        runs = [read_run(file) for file in sorted(directory.rglob("run-*.wandb"))]
        if all(run.exit_code is not None for run in runs) or time.monotonic() > end:
            return runs
        time.sleep(0.05)


def read_run(file: Path) -> OfflineRun:
    """One ``.wandb`` file."""
    from wandb.proto.wandb_internal_pb2 import Record

    run = OfflineRun()
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        _READERS.get(record.WhichOneof("record_type"), _ignore)(run, record)
    return run


def _records(data: bytes) -> Iterator[bytes]:
    if data and data[:4] != b":W&B":
        raise ValueError("not a .wandb file")
    position, parts = _HEADER, b""
    while position + _RECORD <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        start = position + _RECORD
        position = start + length
        if position > len(data):
            return
        parts = data[start:position] if kind in (_FULL, _FIRST) else parts + data[start:position]
        if kind in (_FULL, _LAST):
            yield parts


def _key(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _ignore(run: OfflineRun, record: Any) -> None:
    """Records that no test asks about."""


def _start(run: OfflineRun, record: Any) -> None:
    told = record.run
    run.id, run.name, run.project = told.run_id, told.display_name, told.project
    run.group, run.job_type, run.tags = told.run_group, told.job_type, tuple(told.tags)
    _config(run, told)


def _config(run: OfflineRun, told: Any) -> None:
    run.config |= {_key(item): json.loads(item.value_json) for item in told.config.update}


def _history(run: OfflineRun, record: Any) -> None:
    run.history.append({_key(item): json.loads(item.value_json) for item in record.history.item})


def _metric(run: OfflineRun, record: Any) -> None:
    if record.metric.step_metric:
        run.axes[record.metric.name] = record.metric.step_metric


def _request(run: OfflineRun, record: Any) -> None:
    if record.request.WhichOneof("request_type") == "log_artifact":
        _artifact(run, record.request.log_artifact)


def _artifact(run: OfflineRun, told: Any) -> None:
    told = getattr(told, "artifact", told)
    run.artifacts[told.name] = {
        "type": told.type,
        "aliases": list(told.aliases),
        "metadata": json.loads(told.metadata or "{}"),
        "files": {entry.path: entry.size for entry in told.manifest.contents},
        "copies": [Path(entry.local_path) for entry in told.manifest.contents],
    }


def _exit(run: OfflineRun, record: Any) -> None:
    run.exit_code = record.exit.exit_code


_READERS = {
    "run": _start,
    "config": lambda run, record: _config(run, type("Told", (), {"config": record.config})),
    "history": _history,
    "metric": _metric,
    "artifact": _artifact,
    "request": _request,
    "exit": _exit,
}
