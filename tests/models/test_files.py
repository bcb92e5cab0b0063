"""A checkpoint's digest follows its content and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvxfer.models import files
from kvxfer.models.files import folder_digest
from tests.doubles import save, tiny_model, tiny_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path / "here")


def test_a_copy_elsewhere_has_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    before = folder_digest(checkpoint)
    shutil.copytree(checkpoint, tmp_path / "there")
    (tmp_path / "there" / "README.md").write_text("not part of it")
    assert folder_digest(tmp_path / "there") == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_any_change_changes_it(checkpoint: Path, name: str) -> None:
    before = folder_digest(checkpoint)
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))
    assert folder_digest(checkpoint) != before


def test_large_weights_are_sampled_to_their_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(files, "HEAD_BYTES", 100)
    monkeypatch.setattr(files, "SAMPLE_BYTES", 10)
    path = tmp_path / "model.safetensors"
    content = bytearray(5000)
    path.write_bytes(bytes(content))
    digests = {folder_digest(tmp_path)}
    for place in (0, 99, 4990, 4999):
        content[place] ^= 1
        path.write_bytes(bytes(content))
        digests.add(folder_digest(tmp_path))
    path.write_bytes(bytes(content) + b"\0")
    digests.add(folder_digest(tmp_path))
    assert len(digests) == 6
