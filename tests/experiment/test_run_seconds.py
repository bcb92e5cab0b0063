"""What a run's record says that it took: its own work, all of it, and nobody else's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.experiment.runs import open_run, run_seconds
from kvxfer.experiment.stages import fit
from kvxfer.experiment.stages.calibrate import calibrate
from kvxfer.files import RECORD, read_json
from kvxfer.models.spec import PairSpec
from kvxfer.moments.checkpoints import PassState
from tests.calibrations import make_settings
from tests.small_runs import run, toy_models

HOUR = 3600.0


@pytest.fixture
def skip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Each call puts the clock forward by an hour."""
    clock, hours = time.monotonic, [0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + HOUR * hours[0])
    return lambda: hours.__setitem__(0, hours[0] + 1)


def test_a_fit_does_not_count_the_calibration_that_it_needed(
    tiny_folders: tuple[Path, Path], tmp_path: Path, skip: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def long(settings: Any) -> Path:
        skip()
        return calibrate(settings)

    monkeypatch.setattr(fit, "calibrate", long)
    path = run("train", tmp_path, *toy_models(tiny_folders))
    seconds = run_seconds(path)
    assert seconds is not None
    assert seconds < HOUR


def test_a_pass_that_goes_on_counts_what_was_done_before(
    tiny_spec: PairSpec, tmp_path: Path, skip: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, save = make_settings(tiny_spec, tmp_path), PassState.save

    def kill(self: PassState) -> None:
        skip()
        save(self)
        raise KeyboardInterrupt

    for _ in range(2):
        monkeypatch.setattr(PassState, "save", kill)
        with pytest.raises(KeyboardInterrupt):
            calibrate(settings)
    monkeypatch.setattr(PassState, "save", save)
    seconds = run_seconds(calibrate(settings))
    assert seconds is not None
    assert 2 * HOUR <= seconds < 3 * HOUR


def finished(root: Path, name: str, **extra: Any) -> tuple[Path, float]:
    with open_run(root, "calibrate", {"name": name}, {}) as run:
        path = run.commit(**extra)
    return path, read_json(path / RECORD)["seconds"]


def test_a_merged_run_counts_its_shares(tmp_path: Path) -> None:
    shares = [finished(tmp_path, name, before=seconds) for name, seconds in (("first", 10.0), ("second", 20.0))]
    merged, own = finished(tmp_path, "both", merged_from=[path.name for path, _ in shares])
    assert run_seconds(merged) == pytest.approx(own + 30.0, abs=1.0)
    (shares[0][0] / RECORD).unlink()
    assert run_seconds(merged) is None
    assert run_seconds(tmp_path / "nowhere") is None
