"""The hub's cache on this machine, as its client leaves it: blobs, a snapshot for every commit, names of commits."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.models import hub

Put = Callable[..., Path]


def commit_of(digit: int) -> str:
    """A commit of one digit, forty times."""
    return str(digit) * 40


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """``put(model, folder, digit, *names)``: a commit of a model with a folder's files, which some names stand for.

    A process that asks which commit a name stands for is told the same for good; here every ``put`` is another process.
    """
    home = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(model: str, folder: Path, digit: int, *names: str) -> Path:
        place = home / f"models--{model.replace('/', '--')}"
        snapshot = place / "snapshots" / commit_of(digit)
        for each in (snapshot, place / "blobs", place / "refs"):
            each.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            blob = place / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copyfile(file, blob)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
        for name in names:
            (place / "refs" / name).write_text(commit_of(digit))
        hub._asked.cache_clear()
        return snapshot

    yield put
    hub._asked.cache_clear()
