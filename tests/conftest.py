"""What every test shares: no network, and one tiny random pair on disk."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# One thread a worker: two workers that each start two threads wait for one another on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import shape_checks  # noqa: F401  (before anything of this package)
from composing_once import composed_once
from hub_cache import hub_cache  # noqa: F401  (a fixture)
from launching import PNG, command, launched  # noqa: F401  (two fixtures)
from matplotlib.figure import Figure

from kvxfer.models.pair import Pair, load_pair
from kvxfer.models.spec import ModelSpec, PairSpec


@pytest.fixture(scope="session", autouse=True)
def _digests_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is remembered of the files of tests is not left in somebody's home."""
    home = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvxfer.models.digests.cache_home", lambda: home)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compose_options_once() -> Iterator[None]:
    with composed_once():
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_drawing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Figures are made but not rendered, which takes longer than a tiny pair's numbers; files marked ``draws`` do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("draws") is None:
            patch.setattr(Figure, "savefig", lambda self, path, **options: Path(path).write_bytes(PNG))
        yield


@pytest.fixture(scope="session")
def tiny_spec(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    """Two untrained toy-like Qwen3 models with the toy tokenizer: 2 and 3 layers, 2 KV heads of 32, float32."""
    import torch

    from kvxfer.toy.recipe import RECIPES, build_model, save

    folder = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng(devices=[]):
        for name, layers, heads in (("source", 2, 4), ("target", 3, 6)):
            recipe = replace(RECIPES[name], width=64, feed_forward=64, heads=heads)
            torch.manual_seed(recipe.seed)
            save(build_model(recipe, layers), folder / name)
    source, target = (ModelSpec(str(folder / name)) for name in ("source", "target"))
    return PairSpec("tiny", source, target, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_pair(tiny_spec: PairSpec) -> Pair:
    """The same two models, loaded."""
    return load_pair(tiny_spec)


@pytest.fixture(scope="session")
def tiny_folders(tiny_spec: PairSpec) -> tuple[Path, Path]:
    """The folders of the same two models."""
    return Path(tiny_spec.source.model), Path(tiny_spec.target.model)
