"""Sweeps: checked before they run, resumed by the same command, summed up at the end, the same for every launcher."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from doubles import TEXT, make_double
from launching import PNG, SWEEPS, Done, run_sweep

from kvxfer.experiment.config import compose, job_config, load_job, plain, save_job, to_settings
from kvxfer.experiment.stages.calibrate import calibration_id
from kvxfer.experiment.sweeps.jobs import sweep_id

BOTH = ("train", "evaluate")
DEFAULTS = {file.stem: yaml.safe_load(file.read_text())["defaults"] for file in sorted(SWEEPS.glob("*.yaml"))}
# A grid of both commands is tried with the one whose config holds the other's, and one of them with both.
GRIDS = [
    (grid, stage)
    for grid, given in DEFAULTS.items()
    for stage in BOTH
    if stage in given or ("stage" in given and (stage == "evaluate" or grid == "ridge_lambda"))
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides for a tiny random pair and a small folder of text, in an outputs directory of this module."""
    home = tmp_path_factory.mktemp("sweeps")
    source, target = make_double("custom", home)
    text = home / "text"
    text.mkdir()
    words = [word for sentence in TEXT for word in sentence.split()]
    for number in range(60):
        order = [words[(number * step + step) % len(words)] for step in range(80)]
        (text / f"{number}.txt").write_text(f"{number} " + " ".join(order))
    rows = {"fit": 16, "validation": 4, "held_out": 4, "evaluation": 6}
    return [
        "pair=custom",
        f"pair.source.model={source}",
        f"pair.target.model={target}",
        "pair.dtype=float32",
        "pair.device=cpu",
        "corpus=text",
        f"corpus.path={text}",
        "corpus.length=32",
        *(f"corpus.rows.{split}={count}" for split, count in rows.items()),
        f"paths.outputs={home / 'out put'}",
        "eval.batch_size=2",
    ]


@pytest.fixture(autouse=True)
def _without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def outputs(settings: list[str]) -> Path:
    return Path(next(item for item in settings if item.startswith("paths.outputs=")).partition("=")[2])


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_survives_a_failing_job_and_goes_on_with_workers(
    settings: list[str], command: Callable[..., Done]
) -> None:
    grid = ["penalty.lam=1e-3,1e-2,1e-1", "solver.k=1,99"]
    first = command("train", settings, "-m", *grid)
    assert first.returncode == 1
    assert "Traceback" not in first.stderr
    *_, summary, figure = first.stdout.splitlines()
    rows = rows_of(summary)
    assert [row["penalty.lam"] for row in rows] == ["0.001", "0.001", "0.01", "0.01", "0.1", "0.1"]
    assert [row["status"] for row in rows] == ["done", "failed"] * 3
    assert all("solver.k=99" in row["error"] for row in rows[1::2])
    assert all(math.isfinite(float(row["r2_held_out_keys"])) for row in rows[::2])
    assert Path(figure).read_bytes().startswith(PNG)
    assert Path(summary).parent.parent == outputs(settings) / "sweeps"
    assert "failed: job 1, 3, 5: solver.k=99" in first.stdout
    line = "job 1 (penalty.lam=0.001 solver.k=99) failed: solver.k=99 must be from 1 to "
    assert len([said for said in first.stderr.splitlines() if said.startswith(line)]) == 1
    assert first.stderr.splitlines()[-1].startswith("error: 3 of 6 jobs failed")

    before = {run: (run / "run.json").stat().st_mtime_ns for run in (outputs(settings) / "train").glob("[!.]*")}
    again = command("train", settings, "-m", *grid, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert again.returncode == 1
    assert again.stdout.splitlines()[-2:] == [summary, figure]
    assert rows_of(summary) == rows
    assert before == {run: (run / "run.json").stat().st_mtime_ns for run in before}
    assert again.stderr.count("is there already") == 3
    # Workers tell what they do, in this package's format.
    assert "job 4: penalty.lam=0.1 solver.k=1" in again.stderr.splitlines()


def test_workers_share_one_calibration(settings: list[str], command: Callable[..., Done]) -> None:
    """Both jobs need it and neither has it: one makes it, the other waits."""
    fresh = ["solver.k=1", "corpus.seed=1", "corpus.rows.fit=12", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    before = set((outputs(settings) / "calibrate").glob("[!.]*"))
    mine = [item for item in settings if not item.startswith("corpus.rows.fit")]
    done = command("train", mine, "-m", *fresh, "features=same,both", "calibration.features=both")
    assert done.returncode == 0, done.stderr
    assert len(set((outputs(settings) / "calibrate").glob("[!.]*")) - before) == 1
    assert [row["features"] for row in rows_of(done.stdout.splitlines()[-2])] == ["same", "both"]


def test_an_evaluate_sweep_ends_with_perplexity(settings: list[str], command: Callable[..., Done]) -> None:
    done = command("evaluate", settings, "-cd", "sweeps", "-cn", "ridge_lambda", "penalty.lam=0.01,1.0", "solver.k=1")
    assert done.returncode == 0, done.stderr
    *_, summary, figure = done.stdout.splitlines()
    # Each job tells one line; only the sweep prints a table.
    assert done.stderr.count("gap recovered") == 2
    assert "Zeroed cache" not in done.stdout
    rows = rows_of(summary)
    assert [float(row["penalty.lam"]) for row in rows] == [0.01, 1.0]
    assert all(float(row["perplexity"]) > 1 and float(row["nats_low"]) <= float(row["nats"]) for row in rows)
    assert len({row["ceiling_nats"] for row in rows}) == 1
    assert Path(figure).read_bytes().startswith(PNG)


@pytest.mark.parametrize(("grid", "stage"), GRIDS)
def test_every_grid_is_valid(
    grid: str, stage: str, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A hundred jobs take longer to compose than all others; those of full rank are composed below.
    few = ["features=same,relu", "rank=reduced"] if grid == "maps" else []
    end = run_sweep(monkeypatch, stage, "-cd", str(SWEEPS), "-cn", grid, f"paths.outputs={tmp_path}", *few)
    assert end.startswith(f"error: {len(launched)} of {len(launched)} jobs failed"), end
    assert len(launched) > 1
    assert len(list(tmp_path.glob("sweeps/*/jobs/*.yaml"))) == len(launched)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["penalty.lam=0.1,-1"], "job 1 (penalty.lam=-1): penalty.lam=-1.0 must be a number of 0 or more"),
        (["solver.k=range(1,4)", "penalty.lam=0.1,abc"], "job 1 (solver.k=1 penalty.lam=abc): penalty.lam=abc must be"),
        (["features=glob(*)", "solver.k=1,x"], "job 1 (features=auto solver.k=x): "),
        (["features=same,none_such"], "job 1 (features=none_such): "),
        (["solver.kk=1,2"], "job 0 (solver.kk=1): "),
        (["corpus.seed=0,1", "corpus.skip_first=999"], "job 0 (corpus.seed=0): corpus.skip_first=999"),
    ],
)
def test_one_wrong_value_starts_nothing(
    arguments: list[str], message: str, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end = run_sweep(monkeypatch, "train", "-m", *arguments, f"paths.outputs={tmp_path}")
    assert end.startswith(f"error: {message}")
    assert end.endswith("no job was started")
    assert "\n" not in end
    assert not launched
    assert not list(tmp_path.iterdir())


def test_a_grid_leaves_out_what_it_skips(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skip = "hydra.sweeper.skip=[{solver.k: [2, 3], features: same}, {features: both, solver.k: 1}]"
    run_sweep(monkeypatch, "train", "-m", "solver.k=1,2,3", "features=same,both", skip, f"paths.outputs={tmp_path}")
    assert [tuple(job[:2]) for job in launched] == [
        ("solver.k=1", "features=same"),
        ("solver.k=2", "features=both"),
        ("solver.k=3", "features=both"),
    ]
    assert len(list(tmp_path.glob("sweeps/*/jobs/*.yaml"))) == 3


def test_the_grid_of_maps_skips_only_what_heads_cannot_read(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    few = ["solver=head_local,weighted", "penalty=isotropic", "rank=full", "eval=mapped", f"paths.outputs={tmp_path}"]
    run_sweep(monkeypatch, "evaluate", "-cd", str(SWEEPS), "-cn", "maps", *few)
    heads = {o for job in launched if "solver=head_local" in job for o in job if o.startswith("features=")}
    assert heads == {"features=same", "features=both", "features=previous"}
    assert {o for job in launched for o in job if o == "features=relu"}
    checked = [load_job("evaluate", file)[1] for file in tmp_path.glob("sweeps/*/jobs/*.yaml")]
    calibrations = {calibration_id(to_settings("evaluate", config)) for config in checked}
    assert len(checked) == len(launched)
    assert len(calibrations) == 1


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        ("[{solver.j: 1}]", "hydra.sweeper.skip: solver.j is not swept"),
        ("[{solver.k: [1, 2]}]", "hydra.sweeper.skip leaves out every job of the grid"),
        ("[7]", "hydra.sweeper.skip: 7 is no combination"),
    ],
)
def test_a_wrong_skip_starts_nothing(
    skip: str, message: str, launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end = run_sweep(
        monkeypatch, "train", "-m", "solver.k=1,2", f"hydra.sweeper.skip={skip}", f"paths.outputs={tmp_path}"
    )
    assert message in end
    assert "\n" not in end
    assert not launched


def test_a_grid_of_another_command_is_refused(
    launched: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    end = run_sweep(monkeypatch, "train", "-cn", "evaluate", "-m", "plan=all,sinks", f"paths.outputs={tmp_path}")
    assert "job 0 (plan=all): this config is one of evaluate.py and cannot be run by train.py" in end
    assert not launched


def test_a_job_runs_from_the_config_that_was_checked(tmp_path: Path) -> None:
    """Types survive too: a number stays one, a text that looks like one does not become one."""
    overrides = [
        "penalty.lam=1e-9",
        "calibration.checkpoint_minutes=inf",
        "corpus.name='1e5'",
        "calibration.layers=[1]",
    ]
    config = job_config(compose("train", overrides))
    save_job(tmp_path / "jobs" / "0.yaml", "penalty.lam=1e-09", config)
    label, loaded = load_job("train", tmp_path / "jobs" / "0.yaml")
    assert label == "penalty.lam=1e-09"
    assert plain(loaded) == plain(config)
    assert (loaded.penalty.lam, loaded.corpus.name) == (1e-9, "1e5")


def test_a_sweep_id_is_of_what_is_asked() -> None:
    def id_of(*grids: list[str], stage: str = "train") -> str:
        return sweep_id(stage, [plain(job_config(compose("train", grid))) for grid in grids])

    here = id_of(["penalty.lam=0.1"], ["penalty.lam=1"])
    assert here == id_of(["penalty.lam=1", "logger=online", "force=true"], ["penalty.lam=1e-1", "paths.outputs=there"])
    assert here != id_of(["penalty.lam=0.1"], ["penalty.lam=2"])
    assert here != id_of(["penalty.lam=0.1"], ["penalty.lam=1"], stage="evaluate")
