"""A pass that was killed goes on from its last checkpoint and ends with the bits of one that was not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.experiment.stages.calibrate import REPORT, calibrate
from kvxfer.models.pair import Pair
from kvxfer.models.spec import PairSpec
from kvxfer.moments import checkpoints, moments
from kvxfer.moments.calibration import accumulate, layout_for
from kvxfer.moments.checkpoints import PassState, weighted_file
from kvxfer.moments.query_metric import METRICS
from kvxfer.moments.spec import CALIBRATION_SPLITS, WEIGHTED_SPLITS, CalibrationSpec
from kvxfer.text.corpus import Rows, load_rows
from tests.calibrations import SPLIT_FILES, make_settings, remember_prefills


def calibrate_until(spec: PairSpec, outputs: Path, saves: int, told: Path) -> None:
    """Calibrate, write down where it stands after so many checkpoints, and die."""
    save, saved = PassState.save, []

    def kill(self: PassState) -> None:
        save(self)
        saved.append(self.split)
        if len(saved) == saves:
            told.write_text(f"{self.split} {self.next_row}")
            os.kill(os.getpid(), signal.SIGKILL)

    PassState.save = kill  # type: ignore[method-assign]
    calibrate(make_settings(spec, outputs))


def run_until_killed(spec: PairSpec, outputs: Path, saves: int) -> str:
    """Calibrate in a process that kills itself after so many checkpoints; return where it stood."""
    told = outputs.with_name(f"told {saves}")
    # A copy of this process, which has imported everything; its threads (there are none that matter) are not copied.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=calibrate_until, args=(spec, outputs, saves, told))
        child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    return told.read_text()


def test_kill_9_twice_and_the_moments_are_the_same_bits(
    tiny_spec: PairSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    expected = calibrate(make_settings(tiny_spec, whole))
    assert run_until_killed(tiny_spec, killed, 2) == "fit 8"
    # What is left of fit (a batch), its end, and a batch of validation.
    assert run_until_killed(tiny_spec, killed, 3) == "validation 4"
    assert [path.name for path in (killed / "calibrate").iterdir() if not path.name.startswith(".")] == []
    calls = remember_prefills(monkeypatch)
    found = calibrate(make_settings(tiny_spec, killed))
    assert [rows for rows in calls if rows != 1] == [3, 3]  # a row of one is the proof of the pair's rotary
    assert found.name == expected.name
    for name in [*SPLIT_FILES, METRICS, REPORT]:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert not list(found.glob("checkpoint*"))
    assert not (killed / "calibrate" / f".{found.name}.partial").exists()


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


class Disk:
    """Counts what checkpoints write and remove; at one of these moments everything ends, a file half written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.last = 0, -1
        monkeypatch.setattr(checkpoints, "save_file", self._wrap(checkpoints.save_file, self._half_file))
        monkeypatch.setattr(moments, "save_file", self._wrap(moments.save_file, self._half_file))
        monkeypatch.setattr(checkpoints, "write_sealed", self._wrap(checkpoints.write_sealed))
        rmtree = self._wrap(shutil.rmtree)
        monkeypatch.setattr(checkpoints, "shutil", SimpleNamespace(rmtree=rmtree))

    def _wrap(self, work: Callable[..., Any], half: Callable[..., None] | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.last:
                if half is not None:
                    half(*args)
                raise Killed
            return work(*args, **options)

        return counted

    @staticmethod
    def _half_file(tensors: dict[str, torch.Tensor], path: Path, *_: Any) -> None:
        path.write_bytes(b"half a file")


def run_pass(pair: Pair, rows: dict[str, Rows], spec: CalibrationSpec, work: Path) -> PassState:
    """The pass, or the rest of it."""
    weighing = spec.weights != "none"
    state = PassState(work, layout_for(pair, spec), "cpu", pair.target.geometry, weighing)
    accumulate(pair, rows, spec, 4, state, lambda n: None)
    return state


def clear(state: PassState) -> None:
    """Remove what a finished pass needs no more."""
    for path in state.scaffold:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.mark.parametrize("part", ["checkpoint.json", "checkpoint-*/moments.safetensors", "fit.safetensors"])
def test_a_damaged_checkpoint_is_set_aside_and_the_pass_begins_anew(
    part: str, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One byte of anything that the rest of the pass would build on."""
    remember_prefills(monkeypatch)
    corpus = make_settings(tiny_pair.spec, tmp_path).corpus
    rows = {split: load_rows(corpus, tiny_pair.tokenizer, split) for split in CALIBRATION_SPLITS}
    spec = CalibrationSpec(batch_size=4, checkpoint_minutes=0.0, layers=(1,), stride=8)
    whole, work = tmp_path / "whole", tmp_path / "work"
    save, saved = PassState.save, []
    for folder in (whole, work):
        folder.mkdir()
    clear(run_pass(tiny_pair, rows, spec, whole))

    def kill(self: PassState) -> None:
        save(self)
        saved.append(self.split)
        if len(saved) == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PassState, "save", kill)
        with pytest.raises(Killed):
            run_pass(tiny_pair, rows, spec, work)
    assert saved[-1] == "validation"
    (damaged,) = work.glob(part)
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    monkeypatch.setattr(logging.getLogger("kvxfer"), "propagate", True)
    state = run_pass(tiny_pair, rows, spec, work)
    assert "the checkpoint is set aside" in caplog.text
    assert (work / "damaged" / damaged.relative_to(work).parts[0]).exists()
    clear(state)
    assert sorted(path.name for path in work.iterdir()) == sorted(SPLIT_FILES)
    assert all((work / name).read_bytes() == (whole / name).read_bytes() for name in SPLIT_FILES)


def test_killed_between_any_two_writes(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every moment at which the disk changes, some of them after another kill: the sums are the same bits."""
    calls, disk = remember_prefills(monkeypatch), Disk(monkeypatch)
    settings = make_settings(tiny_pair.spec, tmp_path)
    rows = {split: load_rows(settings.corpus, tiny_pair.tokenizer, split) for split in CALIBRATION_SPLITS}
    spec = CalibrationSpec(batch_size=5, checkpoint_minutes=0.0, layers=(1,), stride=8)

    def run(work: Path) -> list[bytes]:
        state = run_pass(tiny_pair, rows, spec, work)
        assert state.tokens_read == sum(r.tokens.numel() for r in rows.values())
        clear(state)
        assert sorted(path.name for path in work.iterdir()) == sorted(SPLIT_FILES)
        sinks = [tensor.numpy().tobytes() for counter in state.sinks.values() for tensor in vars(counter).values()]
        queries = [tensor.numpy().tobytes() for tensor in vars(state.queries).values()]
        return [*((work / name).read_bytes() for name in SPLIT_FILES), *sinks, *queries]

    whole = tmp_path / "whole"
    whole.mkdir()
    expected, moments_of_change = run(whole), disk.count
    assert moments_of_change > 30
    for moment in range(1, moments_of_change + 1):
        work = tmp_path / str(moment)
        work.mkdir()
        for last in (moment, 4) if moment % 3 == 0 else (moment,):
            disk.count, disk.last = 0, last
            try:
                run_pass(tiny_pair, rows, spec, work)
            except Killed:
                continue
        disk.last, before = -1, len(calls)
        assert run(work) == expected, f"killed at change {moment} of {moments_of_change}"
        assert len(calls) - before <= 8


def test_weighted_moments_go_on_after_a_kill(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after every checkpoint in turn, they are the same bits."""
    remember_prefills(monkeypatch)
    settings = make_settings(tiny_pair.spec, tmp_path)
    rows = {split: load_rows(settings.corpus, tiny_pair.tokenizer, split) for split in CALIBRATION_SPLITS}
    spec = CalibrationSpec(batch_size=5, checkpoint_minutes=0.0, layers=(1,), stride=8, weights="attention")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    clear(run_pass(tiny_pair, rows, spec, whole))
    save, kills = PassState.save, 0

    def kill(self: PassState) -> None:
        save(self)
        raise Killed

    monkeypatch.setattr(PassState, "save", kill)
    while True:
        try:
            clear(run_pass(tiny_pair, rows, spec, killed))
            break
        except Killed:
            kills += 1
    assert kills == 7  # two batches of fit, one of each other split, and their ends
    names = [*SPLIT_FILES, *(weighted_file(split, layer) for split in WEIGHTED_SPLITS for layer in range(3))]
    assert sorted(path.name for path in killed.iterdir()) == sorted(names)
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def test_checkpoints_wait_for_their_time(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_prefills(monkeypatch)
    rows: dict[str, Rows] = {}
    corpus = make_settings(tiny_pair.spec, tmp_path).corpus
    for split in CALIBRATION_SPLITS:
        rows[split] = load_rows(corpus, tiny_pair.tokenizer, split)
    for minutes, expected in ((0.0, 3 + 6), (60.0, 3)):
        work = tmp_path / str(minutes)
        work.mkdir()
        spec = CalibrationSpec(batch_size=4, checkpoint_minutes=minutes, layers=(0,), stride=16)
        assert run_pass(tiny_pair, rows, spec, work).number == expected
