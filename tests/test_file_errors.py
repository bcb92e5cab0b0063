"""What the file system says becomes one line: the path, what is wrong, what to do, and the setting if it is known."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvxfer.errors import KvxferError, file_error, files_of


def raised(call: Any, *given: Any) -> BaseException:
    with pytest.raises(Exception) as error:  # noqa: PT011
        call(*given)
    return error.value


def test_real_errors_name_the_path_and_what_to_do(tmp_path: Path) -> None:
    file, gone, loop = tmp_path / "file", tmp_path / "gone", tmp_path / "loop"
    file.touch()
    gone.symlink_to("../blobs/none")
    loop.symlink_to(loop)
    for call, given, said in (
        (Path.read_text, gone, f"{gone}: a link to ../blobs/none, which is not there; mend or remove the link"),
        (Path.read_text, tmp_path, f"{tmp_path}: a folder, where a file belongs"),
        (Path.read_text, loop, f"{loop}: its links lead in a circle"),
        (Path.mkdir, file / "below", f"{file / 'below'}: a part of this path is a file"),
        (Path.touch, tmp_path / ("x" * 300), "too long a name for this disk; give a shorter path"),
        (Path.mkdir, file, f"{file}: it is in the way"),
    ):
        told = file_error(raised(call, given))
        assert told is not None
        assert said in str(told)
        assert "\n" not in str(told)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("the tracker says: No space left on device"),
    ],
)
def test_a_full_disk_is_known_in_whatever_words(error: Exception, tmp_path: Path) -> None:
    told = f"{tmp_path}: no space left on this disk; make room, then give the same command again"
    assert str(file_error(error, tmp_path)).startswith(told)
    with pytest.raises(KvxferError, match=r"^paths\.outputs: .*no space left"), files_of("paths.outputs", tmp_path):
        raise error


@pytest.mark.parametrize("save", [torch.save, save_file], ids=["torch", "safetensors"])
def test_libraries_that_are_no_python(save: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    error = raised(save, {"a": torch.zeros(9)}, str(file / "below"))
    told = file_error(error)
    assert told is not None or "does not exist" in str(error)


def test_a_file_that_torch_cannot_map(tmp_path: Path) -> None:
    told = file_error(raised(torch.UntypedStorage.from_file, str(tmp_path / "none"), False, 8))
    assert str(told) == f"{tmp_path / 'none'}: no such file or folder; give a path that exists"


def test_torch_on_a_full_disk() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        told = file_error(raised(torch.save, {"a": torch.zeros(99)}, full))
    assert told is not None


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), ValueError("a bug"), KeyError(28)])
def test_a_bug_is_no_file_error(error: Exception, tmp_path: Path) -> None:
    assert file_error(error) is None
    with pytest.raises(type(error)), files_of("paths.outputs", tmp_path):
        raise error


def test_a_setting_is_named_for_its_own_place_alone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), files_of("paths.outputs", tmp_path / "outputs"):
        (tmp_path / "model.bin").read_bytes()
    named = pytest.raises(KvxferError, match=r"^pair\.source\.model: .*model\.bin: no such file")
    with named, files_of("pair.source.model", tmp_path):
        (tmp_path / "model.bin").read_bytes()
    with pytest.raises(ConnectionError), files_of("paths.outputs", tmp_path):
        raise ConnectionError(errno.ENOSPC, "no")
    assert str(file_error(ConnectionRefusedError("the hub is out of reach"))) == "the hub is out of reach"
    assert file_error(io.UnsupportedOperation("fileno")) is not None
