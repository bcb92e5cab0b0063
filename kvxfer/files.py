"""Reading and writing whole files: a reader never sees half of one, and a broken one is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError

RECORD = "run.json"
"""What a finished run says of itself, in its directory."""


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, data: Any) -> None:
    """Write valid JSON (no NaN), whole."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON, or say which file is broken."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KvxferError(f"{path} is not readable ({error}): remove its directory or set force=true") from error


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
