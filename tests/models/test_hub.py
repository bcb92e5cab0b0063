"""Models of the hub: a name stands for one commit, which is asked for offline too, and all loads are of that commit."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.models import hub
from kvxfer.models.files import folder_digest
from kvxfer.models.hf.load import load_config, load_model, load_tokenizer
from kvxfer.models.hub import commit
from kvxfer.models.spec import ModelSpec
from tests.doubles import save, tiny_model, tiny_tokenizer
from tests.hub_cache import commit_of

NAME = "team/small"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("revision", ["main", "v2", "2222222", "2" * 12, "2" * 40])
def test_a_branch_a_tag_and_a_shortened_commit_stand_for_a_commit(
    revision: str, hub_cache: Callable[..., Path], checkpoint: Path
) -> None:
    hub_cache(NAME, checkpoint, 1, "old")
    hub_cache(NAME, checkpoint, 2, "main", "v2")
    assert commit(NAME, revision, "pair.source") == commit_of(2)


@pytest.mark.parametrize("revision", ["main", "v3", "3333333", "222222"])
def test_a_name_that_nobody_knows_is_one_line(revision: str, hub_cache: Callable[..., Path], checkpoint: Path) -> None:
    """No name is guessed, though there is one snapshot: the file that says which one ``main`` is may be gone."""
    hub_cache(NAME, checkpoint, 2)
    said = rf"^pair.source.model: config of 'team/small' can't be read .*HF_HUB_OFFLINE is set.*revision '{revision}'"
    with pytest.raises(KvxferError, match=said) as refused:
        commit(NAME, revision, "pair.source")
    assert "\n" not in str(refused.value)


def test_two_commits_that_begin_alike_are_told_apart_or_refused(
    hub_cache: Callable[..., Path], checkpoint: Path
) -> None:
    snapshot = hub_cache(NAME, checkpoint, 2)
    shutil.copytree(snapshot, snapshot.with_name("2" * 39 + "3"), symlinks=True)
    with pytest.raises(KvxferError, match="revision '2222222'"):
        commit(NAME, "2" * 7, "pair.source")


def test_every_load_of_a_process_is_of_the_commit_that_was_asked_for_first(
    hub_cache: Callable[..., Path], checkpoint: Path, tmp_path: Path
) -> None:
    other = save(tiny_model("llama-default"), tiny_tokenizer(), tmp_path / "other")
    later = hub_cache(NAME, other, 2)
    hub_cache(NAME, checkpoint, 1, "main")
    spec = ModelSpec(NAME)
    assert load_config(spec, "pair.source").model_type == "qwen3"
    (later.parents[1] / "refs" / "main").write_text(commit_of(2))
    found = load_model(spec, "float32", "cpu", "sdpa")
    assert (found.revision, found.geometry.architecture) == (commit_of(1), "qwen3")
    assert load_tokenizer(spec, "pair.source").get_vocab() == tiny_tokenizer().get_vocab()
    hub._asked.cache_clear()
    assert load_config(spec, "pair.source").model_type == "llama"


def test_end_tokens_are_those_of_the_commit(hub_cache: Callable[..., Path], checkpoint: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(checkpoint, moved)
    config = json.loads((moved / "generation_config.json").read_text())
    (moved / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [2, 7, 9]}))
    hub_cache(NAME, checkpoint, 1, "old")
    hub_cache(NAME, moved, 2, "main")
    ends = [load_model(ModelSpec(NAME, name), "float32", "cpu", "sdpa").end_tokens for name in ("old", "main")]
    assert 7 not in ends[0]
    assert 7 in ends[1]


def test_a_snapshot_taken_as_a_folder_is_known_by_what_its_links_lead_to(
    hub_cache: Callable[..., Path], checkpoint: Path
) -> None:
    snapshot = hub_cache(NAME, checkpoint, 1, "main")
    assert folder_digest(snapshot, "pair.source") == folder_digest(checkpoint, "pair.source")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_verify_finds_a_file_of_the_cache_that_is_not_what_was_downloaded(
    name: str, hub_cache: Callable[..., Path], checkpoint: Path
) -> None:
    snapshot = hub_cache(NAME, checkpoint, 1, "main")
    # Git's name for a small file, as the hub gives it.
    small = snapshot / "config.json"
    content = small.read_bytes()
    blob = small.resolve().with_name(hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest())
    small.resolve().rename(blob)
    small.unlink()
    small.symlink_to(f"../../blobs/{blob.name}")
    hub.verify(NAME, commit_of(1), "pair.source")
    with (snapshot / name).resolve().open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"!")
    with pytest.raises(KvxferError, match=rf"^pair.source.model: \S+{name} is not what was downloaded; delete it and"):
        hub.verify(NAME, commit_of(1), "pair.source")
