"""Checkpoints: which one a training goes on from, and that it is one of the same question."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.files import unfinished
from kvxfer.fitting.trained.specs import Trained, TrainerSpec

log = logging.getLogger("kvxfer")

CHECKPOINTS, BEST, LAST = "checkpoints", "best.ckpt", "last.ckpt"
QUESTION, RATE, DIGEST = "kvxfer_question", "kvxfer_lr", "kvxfer_sha256"
"""What our checkpoints hold beside Lightning's own: the digest of what was asked, the peak learning rate, and that of
all that they hold."""


class PlainFiles(TorchCheckpointIO):
    """Checkpoints are written to disk at once, not to memory first, and are there whole or not at all."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Torch forgets what the disk says, Python's own file does not.
        with unfinished(file).open("wb") as stream:
            torch.save({**checkpoint, DIGEST: digest(checkpoint)}, stream)
        unfinished(file).replace(file)


def digest(checkpoint: Any) -> str:
    """SHA-256 of all values in a checkpoint; torch checks none of what it reads."""
    found = hashlib.sha256()
    _add(checkpoint, found.update)
    return found.hexdigest()


def _add(value: Any, update: Callable[[Any], None]) -> None:
    if isinstance(value, Mapping):
        value = [each for item in value.items() for each in item if item[0] != DIGEST]
    if isinstance(value, Tensor):
        update(f"{value.dtype} {tuple(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, list | tuple):
        update(f"{len(value)} of".encode())
        for each in value:
            _add(each, update)
    else:
        update(f"{value!r};".encode())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's file and what it holds: plain types and tensors."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["global_step"])


def question(spec: Trained, trainer: TrainerSpec, base: str, rows: list[str], exact: int) -> str:
    """The digest of all that decides the weights.

    Args:
        base: the base map's hash.
        rows: digests of the training and validation rows.
    """
    asked = {
        "solver": [type(spec).__name__, {**_deciding(spec), "name": None}],
        "trainer": _deciding(trainer),
        "base": base,
        "rows": rows,
        "exact": exact,
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _deciding(spec: Trained | TrainerSpec) -> dict[str, Any]:
    return {item.name: getattr(spec, item.name) for item in fields(spec) if item.metadata.get("id", True)}


def read_checkpoint(path: Path, asked: str, source: str, whole: bool = True) -> Checkpoint:
    """A checkpoint of a question.

    Args:
        source: what names the file, for the error.
        whole: whether weights alone will not do.

    Raises:
        KvxferError: there is none, it can't be read, it is another question's, or weights alone.
    """
    if not path.is_file():
        raise KvxferError(f"{source}: there is no checkpoint {path}")
    try:
        # Mapped: tensors that nobody asks for are not read.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = state[QUESTION]
        if DIGEST in state and state[DIGEST] != digest(state):
            raise ValueError("it is not as it was written")
    except Exception as error:  # torch tells a damaged file in many ways, which depend on where it is damaged
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KvxferError(f"{source}: {path} is no checkpoint of a trained map ({reason})") from error
    if found != asked:
        raise KvxferError(
            f"{source}: {path} is of another training (other solver or trainer settings, another base map or other "
            "rows): give the settings it was made with, or leave it out"
        )
    if whole and "callbacks" not in state:
        raise KvxferError(f"{source}: {path} holds weights alone, which nothing goes on from: give {LAST} beside it")
    return Checkpoint(path, state)


def find_checkpoint(given: str | None, folder: Path, asked: str, first: bool) -> Checkpoint | None:
    """The checkpoint to go on from: what a killed run left in its folder, else the given one, taken over into it.

    Args:
        given: ``trainer.ckpt_path``.
        folder: the run's own checkpoints.
        first: whether this process may write.
    """
    own = folder / LAST
    if not own.is_file() and given is not None:
        path = Path(given).expanduser()
        found = read_checkpoint(path, asked, "trainer.ckpt_path")
        best = path.with_name(BEST)
        read_checkpoint(best, asked, f"trainer.ckpt_path: the best so far must lie beside {path.name}", whole=False)
        if not first:
            return found
        folder.mkdir(parents=True, exist_ok=True)
        for file, name in ((best, BEST), (path, LAST)):
            # Whole or not at all, and the one that a restart looks for comes last.
            shutil.copyfile(file, unfinished(folder / name))
            unfinished(folder / name).replace(folder / name)
    if not own.is_file():
        return None
    try:
        found = read_checkpoint(own, asked, "the run's own last checkpoint")
        read_checkpoint(folder / BEST, asked, "the run's own best checkpoint", whole=False)
    except KvxferError as error:
        if first:
            log.warning("%s: its checkpoints are set aside, and training begins anew", error)
            for name in (LAST, BEST):
                if (folder / name).exists():
                    (folder / name).replace(folder / f"{name}.damaged")
        return None
    if first:
        log.info("training goes on at step %d, from %s", found.step, own)
    return found
