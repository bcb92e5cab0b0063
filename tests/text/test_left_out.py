"""No text is left out without a word: what is not read is counted by reason, and too much of it ends the reading."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from small_corpora import text_spec, tokenizer_of

from kvxfer.errors import KvxferError
from kvxfer.text.corpus import Rows, load_rows
from kvxfer.text.folder import digest, documents, list_files
from kvxfer.text.reading import Reading
from kvxfer.text.spec import CorpusSpec

WORDS = [f"w{number}" for number in range(100)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A hundred documents of one word."""
    (tmp_path / "text").mkdir()
    for word in WORDS:
        (tmp_path / "text" / f"{word}.txt").write_text(f"{word} a b")
    return tmp_path / "text"


def read(folder: Path, **settings: Any) -> Rows:
    spec = text_spec(folder, **{"length": 3, "skip_first": 0, "max_left_out": 0.2, **settings})
    return load_rows(spec, tokenizer_of([*WORDS, "a b"]), "fit", 5)


NINES, DEEP = '{"text": "x", "id": ' + "9" * 5000 + "}", '{"text": "x", "meta": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize(
    ("name", "content", "reason", "said"),
    [
        ("a.txt", b"", "empty", "document "),
        ("a.txt", b" \n", "empty", "document "),
        ("a.md", b"fine \xff", "not UTF-8", "a.md: not UTF-8 text (byte 5: "),
        ("a.txt.gz", gzip.compress(b"x" * 99, mtime=0)[:-9], "unreadable files", "a.txt.gz: cannot be read ("),
        ("a.jsonl", NINES.encode(), "lines that Python does not read as JSON", "a.jsonl, line 1: not JSON that Python"),
        ("a.jsonl", DEEP.encode(), "lines that Python does not read as JSON", "a.jsonl, line 1: not JSON (that Pyth"),
        ("a.jsonl", b'{"text": "\xff"}', "not UTF-8", "a.jsonl, line 1: not UTF-8 text (byte 10"),
        ("a.jsonl", b'\n{"body": "x"}', "lines without the column", "a.jsonl, line 2: no text in column 'text'"),
    ],
)
def test_what_cannot_be_read_is_counted_and_above_a_share_refused(
    name: str, content: bytes, reason: str, said: str, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    assert read(folder).left_out == {reason: 1}
    with pytest.raises(KvxferError) as refusal:
        read(folder, max_left_out=0.005)
    assert said.replace("JSON that", "JSON (that") in str(refusal.value)
    assert f"1 of 101 documents of text are left out (1 {reason}), more than corpus.max_left_out=0.005" in str(
        refusal.value
    )
    assert "\n" not in str(refusal.value)


def test_a_line_that_is_bad_costs_no_other(folder: Path) -> None:
    lines = [json.dumps({"text": f"{word} c"}).encode() for word in WORDS[:20]]
    (folder / "lines.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([*lines[:10], b"\xff", *lines[10:]]))
    reading = Reading()
    found = list(documents(str(folder), "**/*", "text", reading))
    assert len(found) == 120
    assert reading.left_out == {"not UTF-8": 1}


def test_files_and_folders_without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for, since root may read everything. The advice holds: another pattern looks elsewhere."""
    (folder / "closed").mkdir()
    scandir, read_bytes = os.scandir, Path.read_bytes

    def refuse(path: Any) -> None:
        if Path(path).name in ("closed", "w1.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scandir(path))
    monkeypatch.setattr(Path, "read_bytes", lambda self: refuse(self) or read_bytes(self))
    assert read(folder).left_out == {"unreadable files": 1, "unreadable folders": 1}
    with pytest.raises(KvxferError, match=r"closed: permission denied; .* or leave it out with corpus\.glob; 2 of 101"):
        read(folder, max_left_out=0.0)
    assert read(folder, glob="w[2-9]*.txt", max_left_out=0.0).left_out == {}


def test_linked_folders_are_read_once_and_loops_end(tmp_path: Path) -> None:
    root, shared = tmp_path / "root", tmp_path / "shared"
    for place in (root / "own", shared / "deep"):
        place.mkdir(parents=True)
    (root / "own" / "a.txt").write_text("a")
    (shared / "b.txt").write_text("b")
    (shared / "deep" / "c.txt").write_text("c")
    (shared / "deep" / "up").symlink_to(shared)
    (root / "0first").symlink_to(root / "own")
    (root / "linked").symlink_to(shared)
    (root / "linked too").symlink_to(shared)
    (root / "own" / "back").symlink_to(root)
    (root / "d.txt").symlink_to(shared / "b.txt")
    (root / "gone.txt").symlink_to(shared / "none.txt")
    (root / ".hidden.txt").write_text("h")
    (root / "e.pdf").write_text("e")
    os.mkfifo(root / "pipe.txt")
    reading = Reading()
    names = [name for name, _ in list_files(str(root), "**/*", reading)]
    assert names == ["d.txt", "gone.txt", "linked/b.txt", "linked/deep/c.txt", "own/a.txt"]
    assert reading.left_out == {
        "links to folders read already": 4,
        "hidden files and folders": 1,
        "files of other kinds": 2,
    }
    # The same once more, a link in the place of its folder: the same text has the same digest.
    assert digest(str(root / "linked"), "**/*") == digest(str(shared), "**/*")


@pytest.mark.parametrize(
    "glob", ["**/*", "*", "*.txt", "a/*", "a/**/*.md", "**/b/*", "**/[0-9]?.txt", "./a/b/*", "*/*"]
)
def test_patterns_are_those_of_pathlib(glob: str, tmp_path: Path) -> None:
    for name in ("1.txt", "10.txt", "a/1.md", "a/2.txt", "a/b/3.md", "a/b/20.txt", "b/4.txt", "b/c/b/5.txt", "c/6.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.glob(glob) if file.is_file())
    assert [name for name, _ in list_files(str(tmp_path), glob)] == expected


@pytest.mark.parametrize("glob", ["", "/a/*", "../*", "a**/*"])
def test_patterns_that_are_none(glob: str, folder: Path) -> None:
    with pytest.raises(KvxferError, match=re.escape(f"corpus.glob={glob!r}: ")):
        list_files(str(folder), glob)


def test_a_share_is_a_share() -> None:
    with pytest.raises(KvxferError, match=r"corpus\.max_left_out=1.5: must be a share between 0 and 1"):
        CorpusSpec("mine", "toy", 16, max_left_out=1.5)


def test_what_is_there_twice_is_told_but_no_loss(folder: Path) -> None:
    for word in WORDS[:90]:
        (folder / f"copy of {word}.txt").write_text(f"{word}   a b")
    assert read(folder, max_left_out=0.0).left_out == {"there twice": 90}
