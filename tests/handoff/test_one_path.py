"""One path maps a cache, and one works in content space: nothing applies a map's weights in another way."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.experiment.config import config_directory
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps import apply
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.pair import Pair
from tests.random_maps import identity_map
from tests.small_runs import TEXT_ROWS, TOY_ROWS, little, run, toy_models, write_text

HANDOFF, CONTENT_ERRORS = "handoff", "kvxfer.maps.content_errors"
NETWORK, LOOKS = "kvxfer.fitting.trained.networks", "kvxfer.fitting.trained.loop"
TIMED = "kvxfer.experiment.stages.train_network"
OPTIONS = sorted(file.stem for file in (config_directory() / "eval").glob("*.yaml") if file.stem != "full")
"""``full`` runs these and nothing of its own."""
TRAINED = ["corpus.rows.training=4", "trainer.max_steps=2", "trainer.batch_size=2", "trainer.warmup_steps=0"]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """By which way a map's weights were come to: the handover, or the module that asked the mapper for content."""
    found: set[str] = set()
    entered: list[str] = []

    def within(owner: type, name: str, way: Callable[[], str]) -> None:
        inner = getattr(owner, name)

        def watched(*given: Any, **options: Any) -> Any:
            entered.append(way())
            try:
                return inner(*given, **options)
            finally:
                entered.pop()

        monkeypatch.setattr(owner, name, watched)

    def caller() -> str:
        # This function, what watches, and the one that called the mapper; inference mode puts a frame between.
        frame = sys._getframe(2)
        while not (name := frame.f_globals["__name__"]).startswith(("kvxfer", "tests", "test_")):
            assert frame.f_back is not None
            frame = frame.f_back
        return name

    within(Transfer, "_pass", lambda: HANDOFF)
    for name in ("map", "content"):
        within(Mapper, name, caller)
    for product in (apply._Product, apply._Trunks):
        inner = product.run

        def applied(*given: Any, inner: Any = inner) -> Any:
            found.add(entered[0] if entered else "nobody knows")
            return inner(*given)

        monkeypatch.setattr(product, "run", applied)
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.mark.parametrize("option", OPTIONS)
def test_every_evaluation_hands_over_by_the_one_path(
    option: str, ways: set[str], outputs: Path, tiny_folders: tuple[Path, Path]
) -> None:
    if option == "lm_eval" and importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-evaluation-harness is not installed")
    overrides, more = toy_models(tiny_folders), list[str]()
    if "choices" in option:  # among texts
        texts = ["corpus=text", f"corpus.path={write_text(outputs / 'text')}", *TEXT_ROWS]
        overrides, more = [*(each for each in overrides if each not in TOY_ROWS), *texts], ["eval.choices=2"]
    fit = run("train", outputs, *overrides)
    assert not ways, "a closed form needs no map to be applied"
    run("evaluate", outputs, *overrides, f"map={fit}", *little(option, outputs, overrides), *more)
    assert ways - {CONTENT_ERRORS} == {HANDOFF}
    if CONTENT_ERRORS in ways:  # the check of the fit
        assert option in ("standard", "mapped", "choices", "mapped_choices")


@pytest.mark.parametrize("solver", ["residual", "mlp_small"])
def test_training_stays_in_content_space(
    solver: str, ways: set[str], outputs: Path, tiny_folders: tuple[Path, Path]
) -> None:
    run("train", outputs, *toy_models(tiny_folders), f"solver={solver}", "solver.hidden=8", *TRAINED)
    # A hidden layer that replaces the base leaves nothing of it to run while it is trained.
    assert ways - {NETWORK} == {LOOKS, TIMED}
    assert (NETWORK in ways) == (solver == "residual")


def test_another_way_would_be_seen(ways: set[str], tiny_pair: Pair) -> None:
    same = Pair(tiny_pair.spec, tiny_pair.target, tiny_pair.target, "")
    cache_map: CacheMap = identity_map(same)
    mapper, ids = Mapper(cache_map), torch.arange(5, 11)[None]
    content = same.content("source", same.source.prefill(ids))
    mapper.map(content)
    mapper.products[0].run(torch.zeros(1, 6, 64))
    assert ways == {__name__, "nobody knows"}
