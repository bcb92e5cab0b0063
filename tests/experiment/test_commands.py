"""The three commands, end to end, on tiny random doubles of the pair options; and sweeps of them."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import config_directory
from kvxfer.maps.artifact import CacheMap
from kvxfer.models.pair import load_pair
from kvxfer.report.schema import validate
from tests.doubles import DOUBLES, make_double
from tests.small_runs import TEXT_ROWS, TOY_EVAL, results_of, run, settings_of, toy_models, write_text
from tests.wandb_reader import read_runs

ROOT = Path(__file__).parents[2]
WITHOUT = ("toy", "geometry")  # one comes with its weights, the other has only random ones
CLASSES = ("qwen3_1.7b_4b", "qwen2.5_1.5b_3b", "llama3.1_8b_70b", "ministral3_3b_8b", "ministral8b_nemo12b")
"""A pair of every class of models and rotary type; a pruned pair's commands have tests of their own."""

PRUNED = DOUBLES["smollm2_mild"].build
OPTIONS = sorted(file.stem for file in (config_directory() / "pair").glob("*.yaml") if file.stem not in WITHOUT)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a small corpus of text."""
    folder = write_text(tmp_path_factory.mktemp("text") / "docs")
    return ["corpus=text", f"corpus.path={folder}", *TEXT_ROWS, "solver.k=2"]


def without_solver(overrides: list[str]) -> list[str]:
    return [o for o in overrides if not o.startswith(("solver", "eval"))]


def of_double(option: str, folder: Path) -> list[str]:
    source, target = make_double(option, folder)
    return [f"pair={option}", f"pair.source.model={source}", f"pair.target.model={target}"]


def goes_through(overrides: list[str], outputs: Path) -> dict[str, Any]:
    """All three commands; each finds what the one before it has left. Returns the results."""
    moments = run("calibrate", outputs, *without_solver(overrides))
    cache_map = run("train", outputs, *overrides, "build_missing=false")
    results = results_of(run("evaluate", outputs, *overrides, "build_missing=false"))
    validate(results)
    assert results["provenance"]["inputs"]["calibrate"] == moments.name
    assert results["provenance"]["inputs"]["train"] == cache_map.name
    assert all(gate["passed"] for gate in results["data"]["gates"])
    assert [gate["name"] for gate in results["data"]["gates"]] == ["identity", "oracle", "zeroed cache"]
    manifest = json.loads((cache_map / "manifest.json").read_text())
    assert manifest["pair"] == {k: v for k, v in results["pair"].items() if k != "name"}
    assert manifest["longest_context"] >= 24
    evidence = json.loads((cache_map / "evidence" / f"{results['run_id']}.json").read_text())
    assert evidence["map"] == CacheMap.load(cache_map).hash == results["map"]["sha256"]
    for stage in ("calibrate", "train", "evaluate"):
        assert [p.name for p in (outputs / stage).iterdir() if not p.name.startswith(".")] == [
            {"calibrate": moments, "train": cache_map, "evaluate": outputs / results["run_id"]}[stage].name
        ]
    return results


def test_every_option_has_a_double():
    assert set(DOUBLES) == set(OPTIONS)
    assert {DOUBLES[option].build for option in CLASSES} >= {double.build for double in DOUBLES.values()} - {PRUNED}


@pytest.mark.parametrize("option", [option for option in OPTIONS if option not in CLASSES])
def test_a_double_of_every_pair_loads(option, tmp_path):
    pair = load_pair(settings_of("calibrate", tmp_path, *of_double(option, tmp_path)).pair)
    double = DOUBLES[option]
    dropped = pair.describe()["source"].get("drop_layers", [])
    assert pair.source.geometry.layers == double.source.layers - len(dropped)
    assert pair.target.geometry.layers == double.target.layers
    assert bool(dropped) == (option == "smollm2_mild")


@pytest.mark.parametrize("option", CLASSES)
def test_a_double_of_every_class_goes_through_all_commands(option, text, tmp_path):
    results = goes_through([*of_double(option, tmp_path), *text], tmp_path / "out")
    assert results["pair"]["name"] == option
    assert results["pair"]["direction"] == "forward"
    assert results["data"]["conditions"]["identity"]["perplexity"] == pytest.approx(
        results["data"]["conditions"]["ceiling"]["perplexity"], rel=0.05
    )


def test_a_reversed_pair_goes_through_all_commands(text, tmp_path):
    results = goes_through([*of_double("qwen3_0.6b_4b", tmp_path), *text, "pair.reverse=true"], tmp_path / "out")
    assert results["pair"]["name"] == "qwen3_0.6b_4b_reversed"
    assert results["pair"]["direction"] == "reversed"
    layers = [results["pair"][side]["geometry"]["layers"] for side in ("source", "target")]
    assert layers == [4, 3]


def keep_wandb(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What W&B keeps for itself stays in the folder."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(folder / "home" / name.lower()))
    monkeypatch.delenv("WANDB_MODE", raising=False)


def test_a_real_evaluation_builds_what_is_missing_and_ends_with_the_paths(tiny_folders, tmp_path):
    line = [*toy_models(tiny_folders), *TOY_EVAL, "pair.device=cpu", "logger=disabled"]
    line = [sys.executable, str(ROOT / "evaluate.py"), *line]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report, page, results = done.stdout.strip().splitlines()[-3:]
    assert [Path(path).name for path in (report, page, results)] == ["report.md", "report.html", "results.json"]
    validate(json.loads((tmp_path / results).read_text()))
    assert (tmp_path / report).read_text().startswith("# ")
    for part in ("Traceback", "Warning"):
        assert part not in done.stderr
    assert "rows: 20 of 48 tokens" in done.stderr


def test_a_sweep_is_one_group_from_one_calibration_and_goes_on_where_it_was_killed(
    tiny_folders, tmp_path, monkeypatch, command
):
    keep_wandb(monkeypatch, tmp_path)
    # W&B's service of this process may run elsewhere: it needs the whole path.
    places = ["pair.device=cpu", f"paths.outputs={tmp_path / 'outputs'}"]
    sweep = [*without_solver(toy_models(tiny_folders)), *places, "penalty.lam=1e-5,1e-1", "solver.k=1,2"]
    done = command("train", sweep, "-m")
    assert done.returncode == 0, done.stderr
    maps = sorted(p for p in (tmp_path / "outputs" / "train").iterdir() if not p.name.startswith("."))
    dials = {(m["penalty"]["lam"], m["solver"]["k"]) for m in (CacheMap.load(p).manifest for p in maps)}
    assert dials == {(lam, k) for lam in (1e-5, 1e-1) for k in (1, 2)}
    assert len([p for p in (tmp_path / "outputs" / "calibrate").iterdir() if not p.name.startswith(".")]) == 1
    runs = [r for r in read_runs(tmp_path / "outputs") if r.job_type == "train"]
    assert sorted(r.id for r in runs) == [p.name for p in maps]
    assert {(r.config["lam"], r.config["k"]) for r in runs} == dials
    assert len({r.group for r in read_runs(tmp_path / "outputs")}) == 1
    assert {r.exit_code for r in runs} == {0}

    # As after a kill during one job: its directory is not there, a hidden one with half of it is.
    lost, kept = maps[2], {p: (p / "run.json").read_bytes() for p in maps if p != maps[2]}
    half = shutil.move(lost, lost.with_name(f".{lost.name}.partial"))
    (half / "run.json").unlink()
    shutil.rmtree(tmp_path / "outputs" / "wandb")
    again = command("train", sweep, "-m")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("is there already") == 3
    assert all((p / "run.json").read_bytes() == content for p, content in kept.items())
    assert CacheMap.load(lost)
    (only,) = read_runs(tmp_path / "outputs")
    assert (only.id, only.group) == (lost.name, runs[0].group)


def test_a_logger_that_fails_does_not_end_the_run(tiny_folders, tmp_path, monkeypatch, caplog):
    def broken(**options: Any) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr(wandb, "init", broken)
    logging.getLogger("kvxfer").propagate = True
    made = run("train", tmp_path, *toy_models(tiny_folders), "logger=online")
    assert CacheMap.load(made)
    assert json.loads((made / "log.json").read_text())["status"] == "finished"
    assert "W&B failed at start" in caplog.text


def test_a_failed_run_is_marked_failed_and_leaves_no_result(tiny_folders, tmp_path, monkeypatch):
    keep_wandb(monkeypatch, tmp_path)
    overrides = [*toy_models(tiny_folders), "logger=offline", "logger.group=mine"]
    run("calibrate", tmp_path / "out", *without_solver([o for o in overrides if not o.startswith("logger")]))
    with pytest.raises(KvxferError, match=r"solver\.k=99"):
        run("train", tmp_path / "out", *overrides, "solver.k=99")
    (failed,) = read_runs(tmp_path / "out")
    assert failed.exit_code == 1
    assert failed.group == "mine"
    assert [p for p in (tmp_path / "out" / "train").iterdir() if not p.name.startswith(".")] == []
    (log,) = (tmp_path / "out" / "train").rglob("log.json")
    assert json.loads(log.read_text())["status"] == "failed"
    columns = {"stage": "train", "pair": "toy", "solver": "ridge", "penalty": "isotropic", "rank": "full"}
    assert {c: failed.config[c] for c in (*columns, "features")} == {**columns, "features": "previous"}


def test_force_computes_again(tiny_folders, tmp_path):
    overrides = toy_models(tiny_folders)
    first = run("train", tmp_path, *overrides)
    before = (first / "run.json").stat().st_mtime_ns
    assert run("train", tmp_path, *overrides) == first
    assert (first / "run.json").stat().st_mtime_ns == before
    assert run("train", tmp_path, *overrides, "force=true") == first
    assert (first / "run.json").stat().st_mtime_ns > before
    assert settings_of("train", tmp_path, *overrides).force is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["solver.k=9"], r"solver\.k=9 must be from 1 to 2"),
        (["rank=reduced", "rank.r=9999"], r"rank\.r=9999 must be below the \d+ output columns"),
        (["solver=head_local", "rank=reduced", "rank.r=32"], r"rank\.r=32 must be below the \d+ output columns"),
    ],
)
def test_what_no_map_can_be_is_refused_before_a_calibration_is_made_for_it(tiny_folders, tmp_path, options, message):
    with pytest.raises(KvxferError, match=message):
        run("train", tmp_path, *toy_models(tiny_folders), *options)
    assert not list(tmp_path.glob("calibrate/*/fit.safetensors"))
