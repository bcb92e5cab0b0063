"""Maps on disk that are changed after they were written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from kvxfer.files import file_sha256
from kvxfer.maps.artifact import MANIFEST, TENSORS


def rewrite(directory: Path, change: Any) -> None:
    """Change a manifest, and make both files vouch for each other again as a forger would."""
    manifest = json.loads((directory / MANIFEST).read_text())
    changed = change(manifest)
    manifest = manifest if changed is None else changed
    if isinstance(manifest, dict):
        core = {key: value for key, value in manifest.items() if key != "sha256"}
        digest = hashlib.sha256(json.dumps(core, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        save_file(load_file(directory / TENSORS), directory / TENSORS, metadata={"manifest": digest})
        manifest["sha256"] = file_sha256(directory / TENSORS)
    (directory / MANIFEST).write_text(json.dumps(manifest))


def rewrite_tensors(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change tensors, and make both files vouch for each other again."""
    tensors = load_file(directory / TENSORS)
    change(tensors)
    save_file(tensors, directory / TENSORS)
    rewrite(directory, lambda manifest: manifest)
