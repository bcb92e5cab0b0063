"""Commands that a W&B agent starts: all W&B runs of their process would get one id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import run_sweep

import kvxfer.experiment.stages.evaluate as evaluate
import kvxfer.experiment.stages.train as train
from kvxfer.evals.questions import Questions
from tests.small_runs import settings_of, toy_models


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What W&B would be told: of every run its stage, and the numbers that it logs."""
    runs: list[dict[str, Any]] = []

    class Told:
        def __init__(self, spec: Any, directory: Path, **about: Any) -> None:
            self.numbers: dict[str, Any] = {}
            runs.append({"stage": about["job_type"], "numbers": self.numbers})

        def metrics(self, values: dict[str, Any], axis: str | None = None) -> None:
            self.numbers |= values

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    monkeypatch.setattr("kvxfer.experiment.loggers.WandbLogger", Told)
    monkeypatch.setenv("WANDB_SWEEP_ID", "abcd1234")
    return runs


def test_only_the_run_that_was_asked_for_takes_the_agents_id(
    told: list[dict[str, Any]], tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    given = ["logger=offline", *toy_models(tiny_folders)]
    train.train(settings_of("train", tmp_path, *given))
    assert [run["stage"] for run in told] == ["train"]
    assert "fit/r2_held_out_keys" in told[0]["numbers"]
    told.clear()
    settings = settings_of("evaluate", tmp_path, *given, "penalty.lam=0.5", "eval=full", "eval.parts=[standard]")
    items = Questions("standard", stories=4, questions=3, batch_size=6, generate=False)
    settings = replace(settings, parts={"standard": replace(settings.parts["standard"], eval=items)})
    evaluate.evaluate(settings, show=False)
    assert [run["stage"] for run in told] == ["evaluate"]
    assert "eval/mapped/accuracy" in told[0]["numbers"], "what the agent's sweep is about"


def test_a_multirun_is_refused(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = run_sweep(monkeypatch, "train", "-m", "penalty.lam=1,2", f"paths.outputs={tmp_path}")
    assert "-m under a W&B agent" in said
    assert said.endswith("no job was started")
    assert not told
