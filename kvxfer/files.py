"""Reading and writing whole files: a reader never sees half of one, and a broken one is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, file_error

RECORD = "run.json"
"""What a finished run says of itself, in its directory."""


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it."""
    temporary = unfinished(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def unfinished(path: Path) -> Path:
    """Where a file is written before it takes its name; the next attempt writes over it."""
    return path.with_name(f".{path.name}.tmp")


def write_json(path: Path, data: Any) -> None:
    """Write valid JSON (no NaN), whole."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, or say which file is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = file_error(error) or f"{path} holds no JSON ({error})"
        raise KvxferError(f"{said}; or remove {path.parent} and give the command that made it again") from error


def write_sealed(path: Path, data: Any) -> None:
    """Write JSON with its own digest."""
    write_json(path, {"sha256": _digest(data), "data": data})


def read_sealed(path: Path) -> Any:
    """Read what :func:`write_sealed` wrote; raises KvxferError if that is not what the file holds now."""
    sealed = read_json(path)
    if not isinstance(sealed, dict) or sealed.get("sha256") != _digest(sealed.get("data")):
        raise KvxferError(f"{path} is not as it was written")
    return sealed["data"]


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
