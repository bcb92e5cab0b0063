"""Kept layers and weights from the command line: ids, refusals, and maps that evaluation reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages.calibrate import REPORT, calibration_id
from kvxfer.experiment.stages.fit import SELECTION
from kvxfer.files import read_json
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models


def test_a_weighted_map_goes_through_all_commands(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    overrides = [*toy_models(tiny_folders), "solver=weighted", "solver.k=1", "calibration.keep_layers=1"]
    made = run("train", tmp_path, *overrides)
    manifest = CacheMap.load(made).manifest
    assert manifest["solver"]["name"] == "weighted"
    assert manifest["weights"] == {"by": "attention", "clip": 10.0}
    assert {"effective_tokens", "few_tokens"} <= set(read_json(made / DIAGNOSTICS)["layers"][0])
    scores = [score for row in read_json(made / SELECTION)["r2_keys"] for score in row]
    assert None in scores or len(scores) == 3  # all target layers may keep the same one
    calibration = tmp_path / "calibrate" / manifest["calibration"]
    assert calibration.name == calibration_id(settings_of("train", tmp_path, *overrides))
    assert len(read_json(calibration / REPORT)["kept"]["layers"]) == 3
    results = results_of(run("evaluate", tmp_path, *overrides, *TOY_EVAL, "build_missing=false"))
    assert results["provenance"]["inputs"]["train"] == made.name
    again = run("calibrate", tmp_path, *without_solver(overrides), "calibration.weights=attention")
    assert again == calibration


def without_solver(overrides: list[str]) -> list[str]:
    return [o for o in overrides if not o.startswith("solver")]


def test_a_solver_that_reads_no_weights_asks_for_none(tmp_path: Path) -> None:
    ids = {
        stage: calibration_id(settings_of(stage, tmp_path, *overrides))
        for stage, overrides in (("calibrate", []), ("train", ["solver=ridge", "calibration.weights=none"]))
    }
    assert ids["calibrate"] == ids["train"]
    weighted = settings_of("train", tmp_path, "solver=weighted")
    assert weighted.calibration.weights == "attention"
    assert calibration_id(weighted) != ids["train"]
    assert calibration_id(weighted) == calibration_id(
        settings_of("calibrate", tmp_path, "calibration.weights=attention")
    )


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["solver=weighted", "calibration.weights=none"], r"calibration\.weights=none.*solver=weighted"),
        (["calibration.keep_layers=2", "solver.k=3"], r"solver\.k=3 .*calibration\.keep_layers=2"),
        (["calibration.weights=luck"], r"calibration\.weights='luck'"),
    ],
)
def test_settings_that_cannot_go_together_are_refused_at_once(overrides: list[str], keys: str, tmp_path: Path) -> None:
    with pytest.raises(KvxferError, match=keys) as refusal:
        settings_of("train", tmp_path, *overrides)
    assert "\n" not in str(refusal.value)


def test_all_kept_layers_need_no_k(tmp_path: Path) -> None:
    settings = settings_of("train", tmp_path, "calibration.keep_layers=2", "solver.method=all", "solver.k=3")
    assert settings.calibration.keep_layers == 2
