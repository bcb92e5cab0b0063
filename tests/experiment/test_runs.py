"""Runs: named by their question, computed once, and visible only when they are complete."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from kvxfer import __version__
from kvxfer.errors import KvxferError
from kvxfer.experiment import runs
from kvxfer.experiment.runs import Run, environment, open_run, run_id
from kvxfer.files import RECORD, file_sha256, read_json, write_json

CONFIG: dict[str, Any] = {"solver": {"name": "ridge", "k": 2}, "penalty": {"lam": 0.1}}
INPUTS = {"calibrate": "0123456789ab"}


def make(root: Path, text: str = "result", **options: Any) -> Path:
    """Open the run and, if there is something to do, leave one file in it."""
    with open_run(root, "train", CONFIG, INPUTS, **options) as run:
        if run.done:
            return run.path
        (run.work / "result.txt").write_text(text)
        return run.commit()


def interrupted(root: Path, **options: Any) -> None:
    """Open the run, leave half a file, and fail."""
    with open_run(root, "train", CONFIG, INPUTS, **options) as run:
        assert not run.done
        (run.work / "result.txt").write_text("half")
        raise ZeroDivisionError


def test_the_same_question_has_the_same_id() -> None:
    identifier = run_id("train", CONFIG, INPUTS)
    assert identifier == run_id("train", json.loads(json.dumps(dict(reversed(CONFIG.items())))), dict(INPUTS))
    assert len(identifier) == 12
    assert int(identifier, 16) >= 0


def test_another_question_has_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [
        run_id("train", CONFIG, INPUTS),
        run_id("evaluate", CONFIG, INPUTS),
        run_id("train", {**CONFIG, "penalty": {"lam": 0.2}}, INPUTS),
        run_id("train", {**CONFIG, "more": None}, INPUTS),
        run_id("train", CONFIG, {"calibrate": "ba9876543210"}),
        run_id("train", CONFIG, {}),
    ]
    monkeypatch.setitem(runs.VERSIONS, "train", runs.VERSIONS["train"] + 1)
    ids.append(run_id("train", CONFIG, INPUTS))
    assert len(set(ids)) == len(ids)


def test_the_record_says_what_the_run_is(tmp_path: Path) -> None:
    path = make(tmp_path)
    record = read_json(path / RECORD)
    assert path == tmp_path / "train" / run_id("train", CONFIG, INPUTS)
    assert record["run_id"] == path.name
    assert (record["stage"], record["version"]) == ("train", runs.VERSIONS["train"])
    assert (record["config"], record["inputs"]) == (CONFIG, INPUTS)
    assert record["seconds"] >= 0
    assert record["environment"]["packages"]["torch"]
    assert not any(key.startswith("_") for key in record)


def test_extra_facts_go_into_the_record(tmp_path: Path) -> None:
    with open_run(tmp_path, "train", CONFIG, INPUTS) as run:
        path = run.commit(merged_from=["a", "b"])
    assert read_json(path / RECORD)["merged_from"] == ["a", "b"]


def test_a_done_run_is_found_not_computed(tmp_path: Path) -> None:
    first = make(tmp_path, "first")
    assert make(tmp_path, "second") == first
    assert (first / "result.txt").read_text() == "first"
    with open_run(tmp_path, "train", CONFIG, INPUTS) as run:
        assert run.done
        assert run.record["run_id"] == first.name


def visible(root: Path) -> list[str]:
    """What a reader sees of a stage."""
    return sorted(path.name for path in (root / "train").iterdir() if not path.name.startswith("."))


def test_an_exception_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path)
    assert visible(tmp_path) == []
    path = make(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == ["result.txt", RECORD]


@pytest.mark.parametrize("resumable", [True, False])
def test_only_a_resumable_run_finds_what_the_last_one_left(resumable: bool, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path)
    with open_run(tmp_path, "train", CONFIG, INPUTS, resumable=resumable) as run:
        assert [path.name for path in run.work.iterdir()] == (["result.txt"] if resumable else [])


def test_force_keeps_the_old_result_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = make(tmp_path, "old")
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path, force=True)
    assert (path / "result.txt").read_text() == "old"
    assert make(tmp_path, "unused") == path
    with open_run(tmp_path, "train", CONFIG, INPUTS, force=True) as run:
        (run.work / "result.txt").write_text("new")
        assert (path / "result.txt").read_text() == "old"
        run.commit()
    assert (path / "result.txt").read_text() == "new"
    assert [p.name for p in (tmp_path / "train").iterdir() if p.is_dir()] == [path.name]


def test_force_without_a_result_computes_it(tmp_path: Path) -> None:
    assert (make(tmp_path, "new", force=True) / "result.txt").read_text() == "new"


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize(("force", "renames"), [(False, 0), (True, 0), (True, 1)])
def test_a_kill_between_the_renames_loses_nothing(
    force: bool, renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if force:
        make(tmp_path, "old")
    done: list[Path] = []
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if len(done) == renames:
            raise Killed
        done.append(self)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(Killed):
            make(tmp_path, "new", force=force)
    expected = "old" if force and not renames else "new"
    assert (make(tmp_path, "recomputed") / "result.txt").read_text() == expected


def test_a_second_process_waits_and_finds_the_run_done(tmp_path: Path) -> None:
    """The lock belongs to the open file, so that two threads stand for two processes."""
    inside, found = threading.Event(), []

    def second() -> None:
        inside.wait(10)
        with open_run(tmp_path, "train", CONFIG, INPUTS) as run:
            found.append((run.done, (run.path / "result.txt").read_text() if run.done else None))

    thread = threading.Thread(target=second)
    thread.start()
    with open_run(tmp_path, "train", CONFIG, INPUTS) as run:
        inside.set()
        thread.join(0.3)
        assert thread.is_alive()
        assert not found
        (run.work / "result.txt").write_text("first")
        run.commit()
    thread.join(10)
    assert found == [(True, "first")]


def test_another_question_does_not_wait(tmp_path: Path) -> None:
    with open_run(tmp_path, "train", CONFIG, INPUTS), open_run(tmp_path, "train", {}, {}) as other:
        assert not other.done


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_not_written_or_hashed(value: float, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"value": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"value": value})
    assert read_json(tmp_path / "a.json") == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(ValueError, match="JSON"):
        run_id("train", {"lam": value}, {})


def with_data(root: Path, value: int, **options: Any) -> Path:
    """A run with a file of data."""
    with open_run(root, "train", CONFIG, INPUTS, **options) as run:
        if not run.done:
            write_json(run.work / "data.json", {"value": value})
            run.commit()
        return run.path


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("name", [RECORD, "data.json"])
@pytest.mark.parametrize("damage", ["half", "byte", "gone"])
def test_a_damaged_run_is_set_aside_and_made_again(
    damage: str,
    name: str,
    force: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the same command says; with force=true the new one takes its place."""
    path = with_data(tmp_path, 1)
    file = path / name
    assert runs.finished(path)
    text = file.read_text()
    if damage == "gone":
        file.unlink()
    else:
        file.write_text({"half": text[: len(text) // 2], "byte": text.replace('"value": 1', '"value": 7')}[damage])
    told = damage != "gone" or name != RECORD
    if (damage, name) == ("byte", RECORD):
        file.write_text(text.replace("{", "{{", 1))
    assert not runs.finished(path)
    monkeypatch.setattr(logging.getLogger("kvxfer"), "propagate", True)
    assert with_data(tmp_path, 2, force=force) == path
    assert read_json(path / "data.json") == {"value": 2}
    assert runs.finished(path)
    aside = [each.name for each in path.parent.glob(f".{path.name}.damaged*")]
    assert aside == ([f".{path.name}.damaged"] if told and not force else [])
    assert (f"{path} is damaged (" in caplog.text) == bool(aside)


def test_a_result_in_a_place_that_can_only_be_read_needs_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = make(tmp_path), Path.open

    def refuse(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "w":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return opened(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert make(tmp_path) == path
    with pytest.raises(KvxferError, match=r"paths\.outputs.*this disk can only be read; give another path$"):
        make(tmp_path, force=True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_named(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(runs.fcntl, "flock", flock)
    with pytest.raises(KvxferError, match=r"^paths\.outputs: .*\.lock: has no file locks.*put it on another disk$"):
        make(tmp_path)


def test_what_a_killed_run_needs_goes_only_when_the_record_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commit() -> Path:
        with open_run(tmp_path, "train", CONFIG, INPUTS, resumable=True) as run:
            (run.work / "half.json").touch()
            return run.commit(scaffold=[run.work / "half.json", run.work / "none"])

    with monkeypatch.context() as patch:
        patch.setattr(runs, "write_json", lambda *_: interrupted(tmp_path / "another"))
        with pytest.raises(ZeroDivisionError):
            commit()
    assert list((tmp_path / "train").glob(".*.partial/half.json"))
    path = commit()
    assert sorted(each.name for each in path.iterdir()) == [RECORD]
    assert runs.finished(path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KvxferError, match=r"cannot write to .*paths\.outputs.*a part of this path is a file"):
        make(tmp_path / "file")


def test_a_run_knows_whether_it_is_done(tmp_path: Path) -> None:
    run = Run("train", "abc", tmp_path / "abc", tmp_path / ".abc.partial", {})
    assert not run.done
    run.path.mkdir()
    assert not run.done
    write_json(run.path / RECORD, {})
    assert run.done


def test_file_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def repository(folder: Path, *files: str) -> str:
    """A repository with one commit, which is returned."""
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    who = ["-c", "user.name=me", "-c", "user.email=me@here"]
    for command in (["init", "-q"], ["add", *files], [*who, "commit", "-qm", folder.name]):
        subprocess.run(["git", "-C", str(folder), *command], check=True, capture_output=True)
    answer = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return answer.stdout[:12]


@pytest.mark.parametrize(
    ("place", "tracked", "known"),
    [
        ("kvxfer", True, True),
        ("kvxfer", False, False),  # laid into a repository of somebody's
        (".venv/lib/site-packages/kvxfer", False, False),
        ("vendored/kvxfer", True, False),
    ],
)
def test_the_commit_is_that_of_the_packages_own_repository_or_none(
    place: str, tracked: bool, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"{place}/__init__.py"
    commit = repository(tmp_path / "mine", "file", *([package] if tracked else []))
    (tmp_path / "mine" / package).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "mine" / package).write_text("")
    other = repository(tmp_path / "other", "file", "kvxfer/__init__.py")
    monkeypatch.setattr("kvxfer.__file__", str(tmp_path / "mine" / package))
    # What git tells its hooks about another repository is not about this one.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    found = environment()
    assert other != commit
    assert found["commit"] == (commit if known else None)
    assert found["packages"]["kvxfer"] == __version__


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None
