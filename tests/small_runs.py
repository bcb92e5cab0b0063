"""Stages called as their commands call them, on tiny models and little text, so that they take a moment."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

from kvxfer.experiment.config import compose, to_settings

TEXT = "the key is in the kitchen and anna has the red box; who reads the same prompt, models of one family?"
TEXT_ROWS = [
    "corpus.length=24",
    "corpus.rows.fit=12",
    "corpus.rows.validation=4",
    "corpus.rows.held_out=4",
    "corpus.rows.evaluation=5",
]
TOY_ROWS = ["corpus.length=48", "corpus.rows.fit=12", "corpus.rows.validation=4", "corpus.rows.held_out=4"]
TOY_EVAL = ["eval.stories=5", "eval.questions=3", "eval.batch_size=5"]

# Whatever an evaluation is set to, by the name of the key: so little that it takes a moment.
LITTLE = {
    **dict.fromkeys(("rows", "stories", "items", "documents", "conversations", "batch_size"), "3"),
    **{"questions": "2", "scored": "6", "turns": "2", "new_tokens": "4", "limit": "4", "answer": "4"},
    **{
        "prefixes": "[48,56]",
        "lengths": "[24,32]",
        "batch_sizes": "[1]",
        "samples": "1",
        "repeats": "6",
        "warmup": "0",
    },
}


def write_text(folder: Path) -> Path:
    """A folder with documents enough for a few rows of every split, each long enough for a row of an evaluation."""
    rng = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(rng.choices(TEXT.split(), k=100)))
    return folder


def settings_of(stage: str, outputs: Path, *overrides: str) -> Any:
    """The settings that a command line gives its stage; files only, unless an override says otherwise."""
    given = [] if any(o.startswith("logger=") for o in overrides) else ["logger=disabled"]
    return to_settings(stage, compose(stage, [*given, "pair.device=cpu", f"paths.outputs={outputs}", *overrides]))


def run(stage: str, outputs: Path, *overrides: str) -> Path:
    """The directory that a stage leaves behind."""
    settings = settings_of(stage, outputs, *overrides)
    call = getattr(importlib.import_module(f"kvxfer.experiment.stages.{stage}"), stage)
    return call(settings, show=False)[0].parent if stage == "evaluate" else call(settings)


def toy_models(folders: tuple[Path, Path]) -> list[str]:
    """Overrides that put two folders in the place of the embedded models, with little to compute."""
    return [f"pair.source.model={folders[0]}", f"pair.target.model={folders[1]}", "solver.k=2", *TOY_ROWS]


def results_of(directory: Path) -> dict[str, Any]:
    """``results.json`` of an evaluation."""
    return json.loads((directory / "results.json").read_text())


def little(option: str, outputs: Path, overrides: list[str]) -> list[str]:
    """An evaluation, and the keys that decide how much it computes, each as small as may be.

    The map of the other direction, where one is read, is fitted here.
    """
    keys = vars(settings_of("evaluate", outputs, *overrides, f"eval={option}").eval)
    small = [f"eval.{key}={value}" for key, value in LITTLE.items() if key in keys]
    if "reverse_map" in keys:
        small.append(f"eval.reverse_map={run('train', outputs, *overrides, 'pair.reverse=true')}")
    return [f"eval={option}", *small]
