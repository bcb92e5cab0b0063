"""The end of a sweep: a table on the terminal, ``summary.csv``, ``quality.png``, and their paths."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvxfer.errors import KvxferError
from kvxfer.experiment.sweeps.jobs import Job, Outcome
from kvxfer.experiment.sweeps.measures import MEASURES, numbers
from kvxfer.report.sweep_figure import draw
from kvxfer.report.swept import Measure, Numbers, write

SUMMARY, FIGURE = "summary.csv", "quality.png"
_NONE = "\N{EN DASH}"


@dataclass(frozen=True)
class Row:
    """A job with its outcome and the numbers of its run."""

    job: Job
    outcome: Outcome
    numbers: Numbers = field(default_factory=dict)


def summarise(stage: str, home: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    """Write and print what a sweep found; the paths come last.

    Raises:
        KvxferError: a job failed. Everything is written and printed by then.
    """
    rows = [_row(stage, job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
    measures = [m for m in MEASURES[stage] if any(row.numbers.get(m.key) is not None for row in rows)]
    console = Console()
    console.print(table(rows, [m for m in measures if m.column]))
    for error, numbered in _errors(rows).items():
        console.print(Text(f"failed: job {', '.join(numbered)}: {error}", style="red"), soft_wrap=True)
    paths = [write_csv(rows, home / SUMMARY)]
    figure = home / FIGURE
    figure.unlink(missing_ok=True)
    points = [(row.job.values, row.numbers) for row in rows if row.outcome.run is not None]
    if draw(points, [m for m in measures if m.panel], figure):
        paths.append(figure)
    for path in paths:
        print(path)
    failed = [row for row in rows if row.outcome.error is not None]
    if failed:
        raise KvxferError(f"{len(failed)} of {len(rows)} jobs failed")


def _row(stage: str, job: Job, outcome: Outcome) -> Row:
    if outcome.run is None:
        return Row(job, outcome)
    try:
        return Row(job, outcome, numbers(stage, Path(outcome.run)))
    except KvxferError as error:
        return Row(job, Outcome(error=str(error)))


def write_csv(rows: Sequence[Row], path: Path) -> Path:
    """One line per job: its values, its numbers, its run, and its error if it failed."""
    keys = list(rows[0].job.values)
    columns = list(dict.fromkeys(key for row in rows for key in row.numbers))
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["job", *keys, "status", *columns, "run", "error"])
        for row in rows:
            values, status = [row.job.values[key] for key in keys], "failed" if row.outcome.error else "done"
            found = [row.numbers.get(column) for column in columns]
            writer.writerow([row.job.number, *values, status, *found, row.outcome.run, row.outcome.error])
    os.replace(temporary, path)
    return path


def table(rows: Sequence[Row], measures: Sequence[Measure]) -> Table:
    """What the terminal shows: the swept values, the measures and the run's id."""
    result = Table(box=box.SIMPLE_HEAD)
    result.add_column("job", justify="right")
    # On a narrow terminal a name goes on in the next line: cut short, penalty.lam and penalty.alpha would look alike.
    for name in (*rows[0].job.values, *(measure.label for measure in measures)):
        result.add_column(name, justify="right", overflow="fold")
    result.add_column("run", no_wrap=True)
    for row in rows:
        values = [write(value) for value in row.job.values.values()]
        shown = [_shown(measure, row.numbers) for measure in measures]
        run = Text("failed", style="red") if row.outcome.run is None else Text(Path(row.outcome.run).name)
        result.add_row(str(row.job.number), *values, *shown, run)
    return result


def _errors(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The numbers of the failed jobs by their error: often one mistake ends many."""
    errors: dict[str, list[str]] = {}
    for row in rows:
        if row.outcome.error is not None:
            errors.setdefault(row.outcome.error, []).append(str(row.job.number))
    return errors


def _shown(measure: Measure, found: Numbers) -> str:
    value = found.get(measure.key)
    if value is None:
        return _NONE
    if measure.share:
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
