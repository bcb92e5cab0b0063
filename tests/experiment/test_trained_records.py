"""What is drawn, logged and said of a training once it is over."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvxfer.experiment.stages.train_network import log_training
from kvxfer.fitting.trained.specs import TrainerSpec
from kvxfer.models.pair import Pair
from tests.trainings import TRAINER, Told, fit


def log(pair: Pair, work: Path, trainer: TrainerSpec = TRAINER) -> Told:
    """What a short training tells."""
    out = Told()
    log_training(out, work, fit(pair, work, max_steps=trainer.max_steps, lr=trainer.lr))
    return out


def test_a_training_is_drawn_logged_and_kept(tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    out = log(tiny_pair, tmp_path)
    assert out.figures == {"training": tmp_path / "training.png"}
    assert (tmp_path / "training.png").is_file()
    [(kind, files)] = out.artifacts.values()
    assert (kind, files) == ("checkpoint", [tmp_path / "checkpoints" / "best.ckpt"])
    [summary] = out.numbers
    assert summary["train/steps"] == TRAINER.max_steps
    assert summary["held_out/trained_kl"] < summary["held_out/base_kl"]
    assert caplog.messages[-1].startswith(f"held-out rows: KL {summary['held_out/trained_kl']:.4f} nats per token")


def test_a_training_that_gains_nothing_says_so(
    tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = fit(tiny_pair, tmp_path, max_steps=2)
    log_training(Told(), tmp_path, trained)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    monkeypatch.setitem(trained.record, "base_val_kl", 0.0)
    log_training(Told(), tmp_path, trained)
    assert "is not below the base's, 0.0000: the training gains nothing" in caplog.messages[-1]
