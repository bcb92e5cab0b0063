"""The end of a sweep: its table, its CSV and its figure."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from launching import PNG
from rich.console import Console

from kvxfer.errors import KvxferError
from kvxfer.experiment.sweeps.jobs import Job, Outcome
from kvxfer.experiment.sweeps.measures import MEASURES
from kvxfer.experiment.sweeps.summary import Row, summarise, table
from kvxfer.report.sweep_figure import draw, geometric
from kvxfer.report.swept import Measure, Numbers

pytestmark = pytest.mark.draws


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_numbers_that_grow_by_a_factor_get_a_logarithmic_axis() -> None:
    assert geometric([1e-6, 1e-4, 1e-2, 1.0])
    assert geometric([32, 64, 128, 256])
    assert geometric([0, 1e-3, 1e-2, 1e-1])
    assert not geometric([1, 2, 3, 4, 5, 6])
    assert not geometric([0.25, 0.5, 0.75])
    assert not geometric([-1, 1, 10])
    assert not geometric([1, 100])


@pytest.mark.parametrize(
    "values",
    [
        [{"penalty.lam": lam, "solver.k": k} for lam in (0, 1e-6, 1e-4, 1e-2) for k in (1, 2)],
        [{"features": name} for name in ("same", "both")],
        [{"penalty.lam": lam, "features": name} for lam in ("auto", 0.1) for name in ("same", "both")],
        [{"eval.generate": flag, "solver.k": 3} for flag in (True, False)],
    ],
)
def test_any_grid_can_be_drawn(values: list[dict[str, Any]], tmp_path: Path) -> None:
    measure = Measure("quality", "quality", share=True, lines={"source alone": "source_quality"})
    points = [
        (point, {"quality": number / 9, "quality_low": 0.0, "quality_high": 0.9, "source_quality": 0.5})
        for number, point in enumerate(values)
    ]
    assert draw(points, [measure, Measure("never", "never")], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_a_sweep_without_a_finished_job_still_ends_with_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quality.png").write_bytes(b"of an earlier time")
    jobs = [Job(number, {"solver.k": number}, {}) for number in (1, 2)]
    with pytest.raises(KvxferError, match="2 of 2 jobs failed"):
        summarise("train", tmp_path, jobs, [Outcome(error="no disk"), Outcome(run=str(tmp_path / "gone"))])
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "summary.csv")
    assert [row["status"] for row in rows_of(str(tmp_path / "summary.csv"))] == ["failed", "failed"]
    assert not (tmp_path / "quality.png").exists()


def test_a_narrow_table_cuts_no_name_and_no_value_short(capsys: pytest.CaptureFixture[str]) -> None:
    values: list[dict[str, Any]] = [
        {"features": "previous", "penalty.alpha": 0.125, "penalty.lam": lam} for lam in ("auto", 0.001)
    ]
    measures = [measure for measure in MEASURES["evaluate"] if measure.column]
    found: Numbers = {measure.key: 1234.5678 for measure in measures}
    rows = [Row(Job(n, each, {}), Outcome(run="/runs/8e139292fb86"), found) for n, each in enumerate(values)]
    Console(width=80).print(table(rows, measures).terminal())
    said = capsys.readouterr().out
    assert "8e139292fb86" in said
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
