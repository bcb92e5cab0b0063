"""Options of trained solvers as settings, and that they leave closed forms the questions that they were."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import compose, config_directory, to_settings
from kvxfer.experiment.loggers import label
from kvxfer.fitting.closed import SOLVERS
from kvxfer.fitting.trained.specs import QUERIES, TRAINED, TrainerSpec

ROOT = Path(__file__).parents[2]


def settings_of(*overrides: str) -> Any:
    return to_settings("train", compose("train", list(overrides)))


def test_every_option_has_a_line_for_every_field() -> None:
    """What it is unless it is asked for otherwise."""
    for name, option in TRAINED.items():
        wanted = {item.name for item in fields(option)}
        written: set[str] = set()
        file: str | None = name
        while file not in (None, *SOLVERS):
            text = yaml.safe_load((config_directory() / "solver" / f"{file}.yaml").read_text())
            written |= set(text)
            file = text["defaults"][0]
        assert written == {*wanted, "defaults"}
    # Which learning rate is a solver's own, the solver says.
    trainer = {item.name: item.default for item in fields(TrainerSpec)} | {"lr": None}
    assert yaml.safe_load((config_directory() / "trainer" / "default.yaml").read_text()) == trainer


def test_a_solver_has_a_learning_rate_of_its_own() -> None:
    rates = {name: settings_of(f"solver={name}").training.trainer.lr for name in TRAINED}
    assert rates == {"residual": 1e-3, "mlp": 1e-3, "mlp_small": 1e-3, "corrected": 1e-2}
    assert settings_of("solver=corrected", "trainer.lr=0.001").training.trainer.lr == 1e-3


def test_settings_of_a_training_are_plain_and_told_apart() -> None:
    given = ["trainer.seed=2", "trainer.lr=1", "solver.layers=[1,2]", "solver.delta_rank=4", "trainer.devices=2"]
    settings = settings_of("solver=corrected", *given)
    training = settings.training
    assert (training.spec.layers, training.spec.delta_rank, training.spec.base_map) == ((1, 2), 4, None)
    assert (training.trainer.seed, training.trainer.lr, training.trainer.devices) == (2, 1.0, 2)
    assert type(training.trainer.lr) is float
    columns = settings.columns()
    assert (columns["trainer_seed"], columns["max_steps"], columns["lr"]) == (2, 1000, 1.0)
    assert label(columns)[0].endswith("-corrected-isotropic-full-seed2")
    # A closed form has nothing of a training, whatever the group says.
    plain = settings_of("solver=ridge", "trainer.seed=2", "trainer.lr=-1")
    assert plain.training is None
    assert plain.base() is plain
    assert not {"trainer_seed", "max_steps", "lr"} & set(plain.columns())
    assert plain.solver_config == settings_of("solver=ridge").solver_config == settings.base().solver_config


def test_what_a_training_does_not_read_is_no_part_of_its_question() -> None:
    """Nobody's queries are asked at a weight of 0, and another option's name gives the same weights."""
    for unread in ("solver.queries=prefix", "trainer.name=other"):
        assert settings_of("solver=mlp", unread).solver_config == settings_of("solver=mlp").solver_config
    asked = [settings_of("solver=mlp", "solver.attention=1", f"solver.queries={q}").solver_config for q in QUERIES]
    assert len({json.dumps(each) for each in asked}) == len(QUERIES)


def test_a_base_brings_what_it_needs() -> None:
    auto = settings_of("solver=residual", "solver.base=auto")
    assert (auto.calibration.probe_rows, auto.calibration.weights) == (16, "attention")
    chosen = settings_of("solver=residual", "solver.base=auto", "solver.candidates=[ridge]", "solver.choose=one")
    assert (chosen.solver.candidates, chosen.solver.choose) == (("ridge",), "one")
    with pytest.raises(KvxferError, match=r"calibration\.weights=none, but solver=weighted"):
        settings_of("solver=mlp", "solver.base=weighted", "calibration.weights=none")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("solver=ridge solver.hidden=8", "solver.hidden=8 has no effect with solver=ridge"),
        ("solver=residual solver.depth=3", "solver.depth=3 has no effect with solver=residual"),
        ("solver=corrected solver.choose=one", "solver.choose=one has no effect with solver.base=ridge"),
        ("solver=residual solver.base=mlp", "solver.base='mlp' is none of ridge, head_local, weighted, auto"),
        ("solver=mlp solver.carried=true", "solver.carried=true has no effect with solver.attention=0"),
        ("solver=mlp solver.mse=0", "solver.attention, solver.kl and solver.mse are all 0"),
        ("solver=residual trainer.lr=soon", "trainer.lr=soon must be above 0, or auto"),
        ("solver=residual trainer.cache_gib=nan", "trainer.cache_gib=nan must be 0 or more"),
        ("solver=residual trainer.devices=3", "trainer.batch_size=8 is no multiple of trainer.devices=3"),
    ],
)
def test_what_makes_no_sense_is_named(overrides: str, message: str) -> None:
    with pytest.raises(KvxferError) as refused:
        settings_of(*overrides.split())
    assert message in str(refused.value)
