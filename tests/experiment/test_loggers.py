"""What a run leaves behind in files and in W&B, and that W&B can neither end nor disturb it."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from omegaconf import OmegaConf
from PIL import Image
from wandb_reader import OfflineRun, read_runs

from kvxfer.errors import KvxferError
from kvxfer.experiment.loggers import LoggerSpec, RunLogger, open_logger
from kvxfer.experiment.runs import Run

CONFIGS = Path(__file__).parents[2] / "configs" / "logger"
COLUMNS = {"pair": "toy", "solver": "ridge", "penalty": "isotropic", "rank": "full", "features": "same"}
OFFLINE, DISABLED = LoggerSpec(), LoggerSpec(wandb="disabled")


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "home" / name))


NAME = "toy/same-ridge-isotropic-full"
CONFIG, INPUTS = {"solver": {"name": "ridge"}}, {"calibrate": "0123"}


def opened(spec: LoggerSpec, folder: Path, run_id: str = "r1", **columns: str) -> Any:
    run = Run("train", run_id, folder, folder, {"config": CONFIG, "inputs": INPUTS})
    return open_logger(spec, run, COLUMNS | columns)


def tell_all(log: RunLogger, folder: Path) -> None:
    """Everything that a stage may tell."""
    for layer in (3, 1):
        log.metrics({"fit/layer": layer, "fit/r2": torch.tensor(layer / 8)}, axis="fit/layer")
    log.metrics({"fit/lost": float("nan")})
    log.table("per layer", ["layer", "r2"], [[0, 0.5]])
    log.table("per layer", ["layer", "r2"], [[0, 0.5], [1, None]])
    Image.new("RGB", (2, 2)).save(folder / "heat.png")
    log.figure("heat", folder / "heat.png")
    (folder / "map").mkdir()
    (folder / "map" / "map.safetensors").write_bytes(b"12345")
    log.artifact("toy map", "kv-map", [folder / "map", folder / "heat.png"], {"k": 2})


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "log.json").read_text())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvxfer logged; W&B's own log goes to its files."""
    return [record.getMessage() for record in caplog.records if record.name == "kvxfer"]


def only_run(folder: Path) -> OfflineRun:
    (run,) = read_runs(folder)
    return run


def test_files_hold_everything(tmp_path: Path) -> None:
    with opened(DISABLED, tmp_path / "run") as log:
        assert record(tmp_path / "run")["status"] == "running"
        tell_all(log, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"fit/layer": 3, "fit/r2": 0.375}, {"fit/layer": 1, "fit/r2": 0.125}, {"fit/lost": "nan"}]
    with (tmp_path / "run" / "tables" / "per-layer.csv").open() as file:
        assert list(csv.reader(file)) == [["layer", "r2"], ["0", "0.5"], ["1", ""]]
    log_json = record(tmp_path / "run")
    assert log_json.pop("seconds") >= 0
    assert log_json == {
        **{"run_id": "r1", "stage": "train", "name": NAME, "status": "finished"},
        "config": {"stage": "train", "run_id": "r1", **COLUMNS, "config": CONFIG, "inputs": INPUTS},
        "tables": ["per-layer.csv"],
        "figures": {"heat": "heat.png"},
        "artifacts": {"toy map": {"type": "kv-map", "paths": ["map", "heat.png"], "metadata": {"k": 2}}},
    }
    with opened(DISABLED, tmp_path / "run") as log:
        log.metrics({"more": 1})
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4, "a resumed run appends"


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failed_run_is_marked_and_its_error_goes_on(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as raised, opened(DISABLED, tmp_path):
        raise error
    assert raised.value is error
    assert record(tmp_path)["status"] == "failed"


def test_the_error_survives_a_directory_that_is_gone(tmp_path: Path) -> None:
    def work() -> None:
        with opened(DISABLED, tmp_path / "run"):
            (tmp_path / "run").rename(tmp_path / "elsewhere")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        work()


def test_the_reader_still_understands_wandb(tmp_path: Path) -> None:
    """The canary: if this fails and nothing else was changed, W&B changed its private format."""
    with wandb.init(mode="offline", dir=str(tmp_path), id="canary", settings=wandb.Settings(silent=True)) as run:
        for step in range(3000):  # more than one block of 32 KiB
            run.log({"value": step})
    read = only_run(tmp_path)
    assert max(file.stat().st_size for file in tmp_path.rglob("*.wandb")) > 3 * 32 * 1024
    assert (read.id, read.exit_code, read.points("value")) == ("canary", 0, list(range(3000)))


def test_an_offline_run_holds_everything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with opened(LoggerSpec(group="sweep", tags=("mine", "toy")), tmp_path / "run", features="t" * 70) as log:
        tell_all(log, tmp_path / "run")
    assert (said(caplog), capfd.readouterr()) == ([], ("", ""))
    run = only_run(tmp_path / "run" / "wandb")
    assert (run.id, run.project, run.group, run.job_type) == ("r1", "kvxfer", "sweep", "train")
    assert run.name == NAME.replace("same", "t" * 70)
    assert run.tags == ("full", "isotropic", "mine", "ridge", "toy", "t" * 64)
    assert {"stage": "train", "run_id": "r1", **COLUMNS, "features": "t" * 70}.items() <= run.config.items()
    assert run.points("fit/layer") == [3, 1], "a layer that comes later is not dropped"
    assert run.points("fit/r2") == [0.375, 0.125]
    assert run.axes == {"fit/r2": "fit/layer"}
    assert str(run.points("fit/lost")) == "[nan]"
    assert len(run.points("per layer.sha256")) == 1, "a table is sent once"
    assert run.points("per layer.nrows") == [2]
    assert len(run.points("heat.path")) == 1
    artifact = run.artifacts["toy-map"]
    assert artifact["type"] == "kv-map"
    assert artifact["metadata"] == {"k": 2}
    assert sorted(artifact["aliases"]) == ["latest", "r1"]
    assert artifact["files"]["map/map.safetensors"] == 5
    assert run.exit_code == 0
    assert record(tmp_path / "run")["status"] == "finished"


def test_artifacts_survive_the_move_of_the_run(tmp_path: Path) -> None:
    with opened(OFFLINE, tmp_path / "partial") as log:
        tell_all(log, tmp_path / "partial")
    (tmp_path / "partial").rename(tmp_path / "complete")
    copies = [copy for told in only_run(tmp_path / "complete").artifacts.values() for copy in told["copies"]]
    assert copies
    assert all(copy.is_file() for copy in copies)


def test_a_failed_run_exits_with_one(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), opened(OFFLINE, tmp_path):
        raise RuntimeError("boom")
    assert only_run(tmp_path).exit_code == 1


def test_two_jobs_in_one_process_are_two_runs(tmp_path: Path) -> None:
    left_open = wandb.init(mode="offline", dir=str(tmp_path), id="stray", settings=wandb.Settings(silent=True))
    for job in ("one", "two"):
        with opened(OFFLINE, tmp_path / job, job) as log:
            log.metrics({"value": job})
    runs = {run.id: run for run in read_runs(tmp_path)}
    assert set(runs) == {"stray", "one", "two"}
    assert all(runs[job].points("value") == [job] and runs[job].group == "toy" for job in ("one", "two"))
    assert runs["stray"].history == []
    left_open.finish()


def test_a_group_and_a_directory_that_are_set_win(tmp_path: Path) -> None:
    spec = LoggerSpec(group="mine", project="other", directory=str(tmp_path / "all" / "runs"))
    with opened(spec, tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "wandb").exists()
    run = only_run(tmp_path / "all" / "runs" / "wandb")
    assert (run.group, run.project) == ("mine", "other")


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        return os.getcwd(), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    before = state()
    with opened(OFFLINE, tmp_path):
        assert state() == before


@pytest.mark.parametrize(
    ("configured", "environment", "mode"),
    [
        ("online", None, "online"),
        ("online", "offline", "offline"),
        ("online", "disabled", "disabled"),
        ("offline", "disabled", "disabled"),
        ("offline", "online", "offline"),
        ("disabled", "offline", "disabled"),
        ("online", "dryrun", "offline"),
        ("offline", "run", "offline"),
        ("online", "Disabled", "disabled"),
    ],
)
def test_the_environment_only_makes_it_quieter(
    configured: str, environment: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert LoggerSpec(wandb=configured).mode == mode


@pytest.mark.parametrize(
    ("value", "mode"), [("true", "disabled"), ("1", "disabled"), ("false", "online"), ("", "online")]
)
def test_wandb_disabled_in_the_environment_switches_it_off(
    value: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DISABLED", value)
    assert LoggerSpec(wandb="online").mode == mode


def settings_file(folder: Path, mode: str) -> None:
    folder.mkdir(parents=True)
    (folder / "settings").write_text(f"[default]\nproject = 100 % mine\nmode = {mode}\n")


def test_what_was_switched_off_in_a_folder_or_by_the_user_stays_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings_file(tmp_path / "home" / "CONFIG", "offline")
    assert LoggerSpec(wandb="online").mode == "offline"
    settings_file(tmp_path / "wandb", "disabled")  # as `wandb disabled` writes it: it wins over the user's
    assert LoggerSpec(wandb="online").mode == "disabled"
    monkeypatch.setenv("WANDB_MODE", "offline")  # W&B itself would let this win
    assert LoggerSpec(wandb="online").mode == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    settings_file(tmp_path / "elsewhere" / ".wandb", "online")
    assert LoggerSpec(wandb="offline").mode == "offline"
    (tmp_path / "elsewhere" / ".wandb" / "settings").write_text("no settings at all")
    assert LoggerSpec(wandb="online").mode == "offline"  # the user's


def test_the_command_line_of_wandb_writes_the_file_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = wandb.Settings(root_dir=str(tmp_path)).read_system_settings()
    files.set("mode", "disabled")
    (tmp_path / "wandb").mkdir()
    files.save()
    assert LoggerSpec().mode == "disabled"


@pytest.mark.parametrize("variable", ["WANDB_SWEEP_ID", "WANDB_LAUNCH"])
def test_under_an_agent_what_is_made_first_is_logged_to_files_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LoggerSpec().of_inputs.mode == "offline"
    monkeypatch.setenv(variable, "abcd1234")
    assert (LoggerSpec().mode, LoggerSpec().of_inputs.mode) == ("offline", "disabled")


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", None)])
def test_an_online_run_that_is_there_already_goes_on(
    mode: str, resume: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}

    def init(**options: Any) -> None:
        told.update(options)
        raise RuntimeError("no server in a test")

    monkeypatch.setattr(wandb, "init", init)
    with opened(LoggerSpec(wandb=mode, entity="team"), tmp_path):
        pass
    assert (told["mode"], told["resume"], told["entity"], told["id"]) == (mode, resume, "team", "r1")


def test_disabled_never_touches_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb, "init", None)
    with opened(DISABLED, tmp_path / "run") as log:
        tell_all(log, tmp_path / "run")
    assert said(caplog) == []
    assert not list(tmp_path.rglob("wandb"))


def test_a_wrong_mode_is_named() -> None:
    with pytest.raises(KvxferError, match=r"logger\.wandb='on': choose one of online, offline, disabled"):
        LoggerSpec(wandb="on")


@pytest.mark.parametrize("name", ["offline", "online", "disabled"])
def test_the_options_are_specs(name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(values, dict)
    values["tags"] = tuple(values["tags"])
    spec = LoggerSpec(**{str(key): value for key, value in values.items()})
    assert spec == LoggerSpec(wandb=name)


def test_a_wandb_that_does_not_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**options: Any) -> None:
        raise wandb.errors.CommError("no route\nto host")

    monkeypatch.setattr(wandb, "init", init)
    with opened(OFFLINE, tmp_path / "run") as log:
        tell_all(log, tmp_path / "run")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert said(caplog)[0].startswith("W&B failed at start (CommError: no route); the run goes on")
    assert record(tmp_path / "run")["status"] == "finished"


class BrokenRun:
    """A run of which nothing works."""

    def __getattr__(self, name: str) -> Any:
        raise OSError(f"{name}: broken pipe")


def test_a_wandb_that_breaks_later_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb, "init", lambda **options: BrokenRun())
    with opened(OFFLINE, tmp_path / "run") as log:
        tell_all(log, tmp_path / "run")
    broken = "W&B failed at metrics (OSError: define_metric: broken pipe); the run goes on, its files are complete"
    assert said(caplog) == [broken]
    assert record(tmp_path / "run")["status"] == "finished"
    assert list(record(tmp_path / "run")["artifacts"]) == ["toy map"]
    with pytest.raises(RuntimeError, match="boom"), opened(OFFLINE, tmp_path / "failed"):
        raise RuntimeError("boom")
    assert record(tmp_path / "failed")["status"] == "failed"


def test_what_wandb_refuses_does_not_stop_the_rest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(OFFLINE, tmp_path) as log:
        log.figure("missing", tmp_path / "missing.png")
        log.figure("missing", tmp_path / "missing.png")
        log.metrics({"after": 1})
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith("W&B failed at figure missing (")
    assert only_run(tmp_path).points("after") == [1]


def test_importing_the_loggers_does_not_import_wandb() -> None:
    code = "import sys, kvxfer.experiment.loggers; sys.exit('wandb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=CONFIGS.parents[1], check=False).returncode == 0
