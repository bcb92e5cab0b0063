"""No call of the file system that fails ends a command in a traceback, or costs a result: the same command goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
STAGES = ("calibrate", "train", "evaluate", "trained", "sweep")

pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"),
    reason="faults are injected by a C library: needs Linux and cc",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that is preloaded."""
    built = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", str(built), str(HERE / "faults.c"), "-ldl"], check=True)
    return built


def faults(library: Path, home: Path, folders: tuple[Path, Path], which: str, *stages: str) -> list[dict[str, object]]:
    """What became of every fault."""
    place = os.pathsep.join((str(HERE.parent), str(HERE)))
    done = subprocess.run(
        [sys.executable, str(HERE / "fault_driver.py"), str(home), *map(str, folders), which, *stages],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": place},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"stage"')]


def test_every_place_that_calls_the_file_system_may_fail_once(
    library: Path, tmp_path: Path, tiny_folders: tuple[Path, Path]
) -> None:
    """One line of ours, or none where nothing is lost; then the same command, and the result of an undisturbed one."""
    found = faults(library, tmp_path, tiny_folders, "once", *STAGES)
    assert {fault["stage"] for fault in found} == set(STAGES)
    assert {str(fault["call"]).split()[0] for fault in found} >= {"open", "create", "write", "rename", "mkdir", "flock"}
    assert sum(fault["code"] == 1 for fault in found) >= 20
    assert [fault for fault in found if fault["wrong"]] == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stage", STAGES)
def test_every_call_may_fail(stage: str, library: Path, tmp_path: Path, tiny_folders: tuple[Path, Path]) -> None:
    found = faults(library, tmp_path, tiny_folders, "every", stage)
    assert found
    assert [fault for fault in found if fault["wrong"]] == []
