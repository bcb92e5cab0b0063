"""Many configs of the same options are what Hydra composes one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from kvxfer.experiment.config import config_directory, plain, register
from kvxfer.experiment.sweeps.composing import Composer

GIVEN = [
    ["penalty.lam=0.5"],
    [],
    ["penalty.lam=0.25", "solver.k=2", "penalty.lam=0.125"],
    ["solver.k=2", "solver=weighted", "features=both"],
    ["solver=weighted", "features=both", "solver.k=auto"],
    ["corpus.rows={fit: 8}", "calibration.layers=[0,1]", "corpus.name='1e5'"],
    ["~penalty"],
]


@pytest.fixture
def composer() -> Iterator[Composer]:
    register()
    with hydra.initialize_config_dir(str(config_directory()), version_base="1.3"):
        yield Composer(GlobalHydra.instance().config_loader(), partial(hydra.compose, "train"))


def test_configs_are_those_that_hydra_composes(composer: Composer) -> None:
    for overrides in GIVEN:
        ours, theirs = composer.compose(overrides), hydra.compose("train", overrides)
        assert plain(ours) == plain(theirs)
        assert OmegaConf.get_type(ours) is OmegaConf.get_type(theirs)
    assert len(composer.chosen) == 3


@pytest.mark.parametrize("overrides", [["penalty.lamb=1"], ["solver=nope"], ["corpus.length=x"], ["rank=8"]])
def test_mistakes_are_those_that_hydra_finds(composer: Composer, overrides: list[str]) -> None:
    composer.compose([])
    with pytest.raises((HydraException, ValueError)) as ours:
        composer.compose(overrides)
    with pytest.raises((HydraException, ValueError)) as theirs:
        hydra.compose("train", overrides)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
