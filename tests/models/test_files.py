"""A checkpoint's digest follows its content and nothing else, and what was read once is not read again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.models import digests
from kvxfer.models.files import folder_digest, model_files
from tests.doubles import save, tiny_model, tiny_tokenizer

KEY = "pair.source"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path_factory.mktemp("saved"))


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "here")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were read to be digested."""
    names: list[str] = []
    real = digests._read

    def _read(path: Path, advance: Callable[[int], None]) -> tuple[str, str]:
        names.append(path.name)
        return real(path, advance)

    monkeypatch.setattr(digests, "_read", _read)
    return names


def flip(path: Path, place: int) -> None:
    """Change a byte in place and put the file's time back: to a program that looks at size and time nothing is new."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_copy_elsewhere_has_the_same_digest(checkpoint: Path, tmp_path: Path) -> None:
    before = folder_digest(checkpoint, KEY)
    shutil.copytree(checkpoint, tmp_path / "there")
    for name in ("README.md", ".gitattributes", "trainer_state.json", "training_args.bin", "optimizer.pt"):
        (tmp_path / "there" / name).write_text("not part of it")
    (tmp_path / "there" / "onnx.bin").mkdir()
    (tmp_path / "linked").symlink_to("there")
    assert folder_digest(tmp_path / "there", KEY) == folder_digest(tmp_path / "linked", KEY) == before


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
def test_any_change_in_place_changes_it_though_size_and_time_are_as_before(checkpoint: Path, name: str) -> None:
    found = {folder_digest(checkpoint, KEY)}
    for place in (0, 1000, -20, -1):
        flip(checkpoint / name, min(place, (checkpoint / name).stat().st_size - 1))
        found.add(folder_digest(checkpoint, KEY))
    assert len(found) == 5


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "additional_chat_templates/tools.jinja", "chat_template.json"),
        *("adapter_config.json", "adapter_model.safetensors", "special_tokens_map.json", "added_tokens.json"),
        *("sentencepiece.bpe.model", "tokenizer.model.v3", "qwen.tiktoken", "quantize_config.json", "merges.txt"),
        *("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    ],
)
def test_every_kind_of_file_that_loading_may_read_counts(checkpoint: Path, name: str) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    found = {folder_digest(checkpoint, KEY)}
    for content in ("{}", "[]"):
        (checkpoint / name).write_text(content)
        found.add(folder_digest(checkpoint, KEY))
    assert len(found) == 3


def test_shards_count_wherever_an_index_says_that_they_lie(checkpoint: Path, tmp_path: Path) -> None:
    places = {"a": "parts/one.shard", "b": "../elsewhere.shard", "c": "model.safetensors"}
    (checkpoint / "parts").mkdir()
    for name in ("here/parts/one.shard", "elsewhere.shard"):
        (tmp_path / name).write_bytes(bytes(100))
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found = {folder_digest(checkpoint, KEY)}
    for name in ("here/parts/one.shard", "elsewhere.shard"):
        flip(tmp_path / name, 50)
        found.add(folder_digest(checkpoint, KEY))
    assert len(found) == 3


def test_an_index_without_its_files_or_that_is_no_index_is_for_loading_to_refuse(checkpoint: Path) -> None:
    found = set()
    for content in ('{"weight_map": {"a": "nowhere.bin"}}', '{"weight_map": 3}', "[1]", "{"):
        (checkpoint / "pytorch_model.bin.index.json").write_text(content)
        found.add(folder_digest(checkpoint, KEY))
    assert len(found) == 4


def test_a_folder_is_read_once_and_then_not_again(checkpoint: Path, tmp_path: Path, read: list[str]) -> None:
    files = sorted(path.name for path in checkpoint.iterdir())
    first = folder_digest(checkpoint, KEY)
    assert sorted(read) == files
    (tmp_path / "linked").symlink_to("here")
    assert folder_digest(checkpoint, KEY) == folder_digest(tmp_path / "linked", KEY) == first
    assert sorted(read) == files
    flip(checkpoint / "model.safetensors", 500)
    assert folder_digest(checkpoint, KEY) != first
    assert sorted(read) == sorted([*files, "model.safetensors"])


def test_verify_reads_all_again_and_tells_what_changed_unseen(
    checkpoint: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(digests, "_read_again", set())
    monkeypatch.setattr("kvxfer.models.digests.log.propagate", True)
    first = folder_digest(checkpoint, KEY)
    weights = checkpoint / "model.safetensors"
    key = digests._key(weights.stat())
    digests._keep(key, "0" * 64)  # what the file held when another process read it
    assert folder_digest(checkpoint, KEY) != first
    digests._read_again.clear()
    read.clear()
    assert folder_digest(checkpoint, KEY, verify=True) == first
    assert sorted(read) == sorted(model_files(checkpoint, KEY))
    assert [record.getMessage() for record in caplog.records] == [
        f"{weights} is not what was read before, though its size and times are: it counts as another"
    ]
    read.clear()
    assert folder_digest(checkpoint, KEY, verify=True) == first
    assert read == []


@pytest.mark.parametrize("content", ["", "0" * 64, "0" * 64 + " 0123456789abcdef", "\xff"])
def test_a_damaged_entry_of_the_cache_is_not_taken(content: str, checkpoint: Path) -> None:
    first = folder_digest(checkpoint, KEY)
    entry = digests._entry(digests._key((checkpoint / "model.safetensors").stat()))
    entry.write_text(content, encoding="latin-1")
    assert folder_digest(checkpoint, KEY) == first
    assert entry.read_text().startswith(digests.digests([checkpoint / "model.safetensors"]).popitem()[1])


def test_a_cache_that_cannot_be_written_costs_only_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder_digest(checkpoint, KEY)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(digests, "cache_home", lambda: tmp_path / "file")
    assert folder_digest(checkpoint, KEY) == first


def test_a_file_that_is_written_to_while_it_is_read_is_not_remembered(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = checkpoint / "model.safetensors"
    found = []
    wait = digests._wait_past

    def written_meanwhile(changed: int) -> None:
        wait(changed)
        flip(weights, 500)

    with monkeypatch.context() as patch:
        patch.setattr(digests, "_wait_past", written_meanwhile)
        found.append(digests.digests([weights])[weights])
    assert digests._recall(digests._key(weights.stat())) is None
    flip(weights, 500)
    assert digests.digests([weights])[weights] != found[0]


def test_much_to_read_is_shown(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []

    class Bar:
        def __init__(self, title: str, total: int, unit: str) -> None:
            shown.append([title, total, unit, 0])

        def __enter__(self) -> Callable[[int], None]:
            return lambda count: shown[-1].__setitem__(3, shown[-1][3] + count)

        def __exit__(self, *_: object) -> None:
            pass

    (checkpoint / "model.safetensors").write_bytes(bytes(5 * 2**20 + 7))
    monkeypatch.setattr("kvxfer.progress.progress", Bar)
    monkeypatch.setattr(digests, "BAR_BYTES", 2**20)
    folder_digest(checkpoint, KEY)
    folder_digest(checkpoint, KEY)
    assert shown == [["read weights, once", 5, "MB", 5]]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_link_to_nothing_is_told_where_the_model_needs_it(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    (checkpoint / name).symlink_to("../../blobs/none")
    with pytest.raises(KvxferError, match=rf"^pair.source.model: \S+{name} leads to ../../blobs/none, which is not"):
        folder_digest(checkpoint, KEY)


def test_a_link_to_nothing_that_nobody_reads_is_ignored(checkpoint: Path) -> None:
    before = folder_digest(checkpoint, KEY)
    for name in ("README.md", "eval_results.json", "notes.txt"):
        (checkpoint / name).symlink_to("../../blobs/none")
    assert folder_digest(checkpoint, KEY) == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told(checkpoint: Path, name: str) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"
    (checkpoint / name).write_text(text)
    with pytest.raises(KvxferError, match=rf"^pair.source.model: \S+{name} is a pointer of Git LFS .* git lfs pull"):
        folder_digest(checkpoint, KEY)


def test_a_file_that_cannot_be_read_is_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(checkpoint / "model.safetensors"))

    monkeypatch.setattr(digests, "_read", refused)
    with pytest.raises(KvxferError, match=r"^pair.source.model: \S+model.safetensors: permission denied; give another"):
        folder_digest(checkpoint, KEY)
