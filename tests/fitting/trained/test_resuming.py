"""A training that was killed goes on from its last checkpoint and ends with the weights of one that was not."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.callbacks import Kept, Recorder
from kvxfer.fitting.trained.loop import TrainedMap
from kvxfer.fitting.trained.specs import MLP, Residual
from kvxfer.models.pair import Pair
from tests.trainings import Told, fit, same, training_rows

FLEETING = ("seconds", "seconds_per_step")


def facts(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what clocks say."""
    return {key: value for key, value in record.items() if key not in FLEETING}


def kill(self: Recorder, trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killed(BaseException):
    """Stands for a kill: nothing after it runs."""


def stop(self: Recorder, trainer: Any) -> None:
    raise Killed


def ending_at(step: int, end: Callable[[Recorder, Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """End a training while it takes a step."""
    start = Recorder.on_train_batch_start

    def until(self: Recorder, trainer: Any, *others: Any) -> None:
        start(self, trainer, *others)
        if trainer.global_step == step:
            end(self, trainer)

    monkeypatch.setattr(Recorder, "on_train_batch_start", until)


def fit_in_child(pair: Pair, work: Path, **settings: Any) -> int | None:
    """The exit code of a process, a copy of this one, that trains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = multiprocessing.get_context("fork").Process(target=fit, args=(pair, work), kwargs=settings)
        child.start()
    child.join()
    return child.exitcode


def test_kill_9_twice_and_the_weights_are_the_same_bits(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = {"spec": Residual("residual", kl=1.0, hidden=4, queries="both"), "max_steps": 7}
    expected = fit(tiny_pair, whole, **settings)
    for step in (3, 6):
        with monkeypatch.context() as patch:
            ending_at(step, kill, patch)
            assert fit_in_child(tiny_pair, killed, **settings) == -signal.SIGKILL
    found = fit(tiny_pair, killed, **settings)
    assert same(found, expected)
    assert facts(found.record) == facts(expected.record)
    assert [look["step"] for look in found.record["history"]] == [2, 4, 6, 7]
    one, other = (torch.load(p / "checkpoints" / "last.ckpt", weights_only=True) for p in (whole, killed))
    assert one["global_step"] == other["global_step"] == 7
    for mine, theirs in zip(one["state_dict"].values(), other["state_dict"].values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(*(ckpt["optimizer_states"][0]["state"].values() for ckpt in (one, other)), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_stopped_in_bfloat16(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = MLP("mlp", attention=0.0, mse=1.0, hidden=4)
    settings = {"spec": mlp, "precision": "bf16-mixed", "max_steps": 4, "validate_every": 1}
    expected = fit(tiny_pair, tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        ending_at(3, stop, patch)
        with pytest.raises(Killed):
            fit(tiny_pair, tmp_path / "stopped", **settings)
    assert same(fit(tiny_pair, tmp_path / "stopped", **settings), expected)


def test_killed_between_its_checkpoints_and_after_its_last_step(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, TrainedMap]
) -> None:
    """The best of a look is written before the last; and once training is over, no step more is taken."""
    save = Kept._save_checkpoint
    saved: list[str] = []

    def dying(self: Kept, trainer: Any, path: str) -> None:
        save(self, trainer, path)
        saved.append(Path(path).stem)
        if len(saved) == 3:
            raise Killed

    monkeypatch.setattr(Kept, "_save_checkpoint", dying)
    with pytest.raises(Killed):
        fit(tiny_pair, tmp_path)
    assert same(fit(tiny_pair, tmp_path), whole[1])
    assert saved == ["best", "last", "best"] + ["best", "last"] * 2
    out = Told()
    again = fit(tiny_pair, tmp_path, out=out)
    assert same(again, whole[1])
    assert facts(again.record) == facts(whole[1].record)
    assert len(saved) == 7
    assert not any("train/loss" in values for values in out.numbers)


def test_a_training_that_gains_nothing_ends(tiny_pair: Pair, tmp_path: Path) -> None:
    settings = {"patience": 1, "lr": 1e-12, "warmup_steps": 0, "max_steps": 20}
    found = fit(tiny_pair, tmp_path / "whole", **settings)
    assert found.record["stopped"] == "patience"
    assert found.record["steps"] < 20
    out = Told()
    again = fit(tiny_pair, tmp_path / "whole", out=out, **settings)
    assert facts(again.record) == facts(found.record)
    assert not any("train/loss" in values for values in out.numbers)


def test_a_checkpoint_is_taken_over(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, TrainedMap]
) -> None:
    with monkeypatch.context() as patch:
        ending_at(5, stop, patch)
        with pytest.raises(Killed):
            fit(tiny_pair, tmp_path / "first")
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    assert same(fit(tiny_pair, tmp_path / "second", ckpt_path=str(last)), whole[1])
    files = sorted(path.name for path in (tmp_path / "second" / "checkpoints").iterdir())
    assert files == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 1e-3}, "is of another training"),
        ({"spec": MLP("mlp", hidden=4)}, "is of another training"),
        ({"rows": training_rows(6)}, "is of another training"),
        ({"ckpt_path": "none.ckpt"}, r"trainer.ckpt_path: there is no checkpoint none.ckpt"),
        ({"ckpt_path": "best.ckpt"}, r"trainer.ckpt_path: .*best.ckpt holds weights alone"),
        ({"ckpt_path": __file__}, r"trainer.ckpt_path: .* is no checkpoint of a trained map"),
    ],
)
def test_a_checkpoint_of_another_question_is_refused(
    tiny_pair: Pair, tmp_path: Path, done: Path, changes: dict[str, Any], message: str
) -> None:
    if changes.get("ckpt_path") == "best.ckpt":
        changes = {"ckpt_path": str(done / "best.ckpt")}
    with pytest.raises(KvxferError, match=message):
        fit(tiny_pair, tmp_path, **{"ckpt_path": str(done / "last.ckpt"), **changes})
    assert not (tmp_path / "checkpoints").exists()


def test_what_a_checkpoint_needs_beside_it(tiny_pair: Pair, tmp_path: Path, done: Path) -> None:
    shutil.copy(done / "last.ckpt", tmp_path / "alone.ckpt")
    with pytest.raises(KvxferError, match=r"the best so far must lie beside alone.ckpt: there is no"):
        fit(tiny_pair, tmp_path / "work", ckpt_path=str(tmp_path / "alone.ckpt"))


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
@pytest.mark.parametrize("damage", ["half", "number", "gone"])
def test_a_broken_checkpoint_of_its_own_is_set_aside(
    damage: str,
    name: str,
    tiny_pair: Pair,
    tmp_path: Path,
    whole: tuple[Path, TrainedMap],
    done: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training begins anew, and ends as one that nothing befell."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(done, folder)
    file = folder / name
    if damage == "half":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "gone":
        file.unlink()
    else:
        state = torch.load(file, weights_only=True)
        next(iter(state["state_dict"].values())).view(-1)[0] += 1
        torch.save(state, file)
    monkeypatch.setattr(logging.getLogger("kvxfer"), "propagate", True)
    assert same(fit(tiny_pair, tmp_path), whole[1])
    if (name, damage) == ("last.ckpt", "gone"):
        return
    assert "set aside, and training begins anew" in caplog.text
    assert ((folder / f"{name}.damaged").exists()) == (damage != "gone")


@pytest.fixture(scope="module")
def whole(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainedMap]:
    """A training that nothing stopped, and where it lies."""
    work = tmp_path_factory.mktemp("whole")
    return work, fit(tiny_pair, work)


@pytest.fixture(scope="module")
def done(whole: tuple[Path, TrainedMap]) -> Path:
    """Its checkpoints."""
    return whole[0] / "checkpoints"
