"""What a local checkpoint is, told by its files: a digest that stays the same wherever the folder lies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

WEIGHTS = (".safetensors", ".bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
WHOLE_BYTES = 64 * 2**20
HEAD_BYTES = 2**20
SAMPLES = 64
SAMPLE_BYTES = 64 * 2**10


def folder_digest(folder: Path) -> str:
    """SHA-256 over name, size and content of config.json, the tokenizer's files and the weights.

    Of a weight file over 64 MiB the content is its first MiB and 64 evenly spaced samples of 64 KiB.
    """
    named = {"config.json", *TOKENIZER_FILES}
    files = sorted(path for path in folder.iterdir() if path.name in named or path.suffix in WEIGHTS)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        _read_content(path, digest.update)
    return digest.hexdigest()


def _read_content(path: Path, update: Callable[[bytes], None]) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix not in WEIGHTS or size <= WHOLE_BYTES:
            while chunk := file.read(HEAD_BYTES):
                update(chunk)
            return
        update(file.read(HEAD_BYTES))
        for index in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            update(file.read(SAMPLE_BYTES))
