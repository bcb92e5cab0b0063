"""Trained maps from config to report on a tiny pair, with the real training loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages.train import train_id
from kvxfer.maps.artifact import CacheMap
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models
from tools.collect import Wanted, collect
from tools.results_page.data import MapResult, Scores

FEW = ["corpus.rows.training=4", "trainer.max_steps=2", "trainer.batch_size=2", "trainer.warmup_steps=0"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def tiny(tiny_folders: tuple[Path, Path]) -> list[str]:
    return [*toy_models(tiny_folders), "eval=mapped", *TOY_EVAL]


@pytest.mark.parametrize("solver", ["residual", "mlp_small"])
def test_a_trained_solver_gives_a_map_that_is_evaluated_and_collected(
    solver: str, outputs: Path, tiny: list[str]
) -> None:
    given = [f"solver={solver}", "solver.hidden=8", *FEW, "trainer.validate_every=1"]
    with pytest.raises(KvxferError, match="set build_missing=true"):
        run("evaluate", outputs, *tiny, *given, "build_missing=false")
    results = results_of(run("evaluate", outputs, *tiny, *given))
    base = CacheMap.load(run("train", outputs, *[one for one in tiny if not one.startswith("eval")]))
    path = outputs / "train" / results["provenance"]["inputs"]["train"]
    trained = CacheMap.load(path)
    assert results["map"]["solver"] == solver
    assert results["map"]["parameters"] == trained.parameters
    assert trained.manifest["base"]["sha256"] == base.hash
    assert (results["map"]["trained_on"], results["map"]["trainer_seed"]) == (trained.manifest["base"]["run"], 0)
    assert trained.trunks
    assert results["data"]["fit_check"]["tokens"] > 0
    if solver == "residual":
        assert all(torch.equal(trained.layers[output].weight, base.layers[output].weight) for output in base.layers)
    (found,) = collect(outputs, Wanted(eval=results["run_id"]))["maps"]
    assert found["base"] == trained.manifest["base"]
    assert found["training"]["steps"] == 2
    assert found["training"]["corpus"]["rows"]["training"] == 4
    assert found["training"]["held_out"]["base"]["kl"] >= 0
    timed = json.loads((path / "training.json").read_text())["map_seconds"]
    assert timed["tokens"] == 4 * 48
    assert min(timed["base"], timed["trained"], found["training"]["map_seconds_ratio"]) > 0
    # Another run of the same question takes another time and must give the same artifact.
    assert "seconds" not in (path / "manifest.json").read_text()
    assert found["cost"]["bytes"] == trained.bytes
    assert found["r2_held_out"]["keys"] == pytest.approx(
        sum(row["r2_held_out"] for row in layers(path) if row["kind"] == "keys") / 3, abs=1e-5
    )
    asked = MapResult(found, Scores.read(found["scores"])).overrides.split()
    again = settings_of("evaluate", outputs, *tiny, *asked, "corpus.rows.training=4")
    assert train_id(again) == path.name


def layers(path: Path) -> list[dict[str, float]]:
    return json.loads((path / "diagnostics.json").read_text())["layers"]
