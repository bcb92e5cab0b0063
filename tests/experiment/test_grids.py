"""What the grids of sweeps/ ask."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from launching import REPOSITORY, SWEEPS, run_sweep
from small_corpora import text_spec, tokenizer_of

from kvxfer.experiment.config import compose
from kvxfer.text.corpus import load_rows
from kvxfer.text.spec import RowCounts


def test_the_wandb_sweep_is_the_hydra_grid(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sweep: dict[str, Any] = yaml.safe_load((SWEEPS / "wandb" / "ridge.yaml").read_text())
    names = list(sweep["parameters"])
    # The agent writes key=value with str().
    points = itertools.product(*(sweep["parameters"][name]["values"] for name in names))
    theirs = [[f"{name}={value}" for name, value in zip(names, point, strict=True)] for point in points]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    assert (REPOSITORY / sweep["program"]).is_file()
    run_sweep(monkeypatch, "train", "-cd", str(SWEEPS), "-cn", "ridge_lambda_k", f"paths.outputs={tmp_path}")
    parser = OverridesParser.create()

    def values(jobs: list[list[str]]) -> list[dict[str, Any]]:
        parsed = [parser.parse_overrides(job) for job in jobs]
        return [{item.key_or_group: item.value() for item in job if item.key_or_group in names} for job in parsed]

    assert values(theirs) == values(launched)
    assert all(isinstance(value, int | float) for job in values(theirs) for value in job.values())
    compose("train", theirs[0])


@pytest.mark.parametrize("few", [1, 3, 8])
def test_a_smaller_calibration_is_a_prefix_of_a_larger(tmp_path: Path, few: int) -> None:
    documents = [f"a{number} b{number} c{number} " * 9 for number in range(80)]
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    tokenizer = tokenizer_of(documents)
    spec = text_spec(tmp_path)

    def fit(count: int) -> list[list[int]]:
        return load_rows(replace(spec, rows=RowCounts(fit=count)), tokenizer, "fit").tokens.tolist()

    many = fit(12)
    assert fit(few) == many[:few]


def test_the_grid_of_trained_maps_fits_its_closed_form_once(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outputs = f"paths.outputs={tmp_path}"
    run_sweep(monkeypatch, "evaluate", "-cd", str(SWEEPS), "-cn", "trained", "eval=mapped", outputs)
    jobs = [tuple(job[:2]) for job in launched]
    assert [job for job in jobs if "solver=ridge" in job] == [("solver=ridge", "trainer.seed=0")]
    assert len(set(jobs)) == 1 + 4 * 3
    launched.clear()
    said = run_sweep(monkeypatch, "train", "-m", "solver=residual", "trainer.devices=2", outputs)
    assert "trainer.devices=2 in a multirun, where every job trains on one device: set trainer.devices=1" in said
    assert said.endswith("no job was started")
    assert not launched
