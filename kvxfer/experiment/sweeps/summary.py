"""The end of a sweep: a table on the terminal, ``summary.csv``, ``quality.png``, and their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.text import Text

from kvxfer.errors import KvxferError, files_of
from kvxfer.experiment.sweeps.jobs import Job, Outcome
from kvxfer.experiment.sweeps.measures import MEASURES, numbers
from kvxfer.report.console import say
from kvxfer.report.numbers import NOTHING
from kvxfer.report.sweep_figure import draw
from kvxfer.report.swept import Measure, Numbers, write
from kvxfer.report.table import Table

SUMMARY, FIGURE = "summary.csv", "quality.png"


@dataclass(frozen=True)
class Row:
    """A job with its outcome and the numbers of its run."""

    job: Job
    outcome: Outcome
    numbers: Numbers = field(default_factory=dict)


def summarise(stage: str, home: Path, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
    """Write, then print, what a sweep found; the paths come last.

    Raises:
        KvxferError: a job failed, or a file could not be written. All else is written and printed by then.
    """
    rows = [_row(stage, job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
    measures = [m for m in MEASURES[stage] if any(row.numbers.get(m.key) is not None for row in rows)]
    wrong, paths = None, []
    try:
        with files_of("paths.outputs", home):
            paths = _write(rows, [m for m in measures if m.panel], home)
    except KvxferError as error:
        # What a terminal shows is then all that there is.
        wrong = error
    errors = (Text(f"failed: job {', '.join(each)}: {error}", style="red") for error, each in _errors(rows).items())
    say(table(rows, [m for m in measures if m.column]).terminal(), *errors, *paths)
    failed = [row for row in rows if row.outcome.error is not None]
    if failed:
        raise KvxferError(f"{len(failed)} of {len(rows)} jobs failed")
    if wrong is not None:
        raise wrong


def _write(rows: Sequence[Row], measures: Sequence[Measure], home: Path) -> list[Path]:
    paths = [everything(rows).write_csv(home / SUMMARY)]
    figure = home / FIGURE
    figure.unlink(missing_ok=True)
    points = [(row.job.values, row.numbers) for row in rows if row.outcome.run is not None]
    return [*paths, figure] if draw(points, measures, figure) else paths


def _row(stage: str, job: Job, outcome: Outcome) -> Row:
    if outcome.run is None:
        return Row(job, outcome)
    try:
        return Row(job, outcome, numbers(stage, Path(outcome.run)))
    except KvxferError as error:
        return Row(job, Outcome(error=str(error)))


def everything(rows: Sequence[Row]) -> Table:
    """One row per job: its values, its numbers, its run, and its error if it failed; for the CSV."""
    keys = list(rows[0].job.values)
    columns = list(dict.fromkeys(key for row in rows for key in row.numbers))
    cells = [
        (
            row.job.number,
            *(row.job.values[key] for key in keys),
            "failed" if row.outcome.error else "done",
            *(row.numbers.get(column) for column in columns),
            row.outcome.run,
            row.outcome.error,
        )
        for row in rows
    ]
    return Table(("job", *keys, "status", *columns, "run", "error"), cells)


def table(rows: Sequence[Row], measures: Sequence[Measure]) -> Table:
    """What the terminal shows: the swept values, the measures and the run's id."""
    columns = ("job", *rows[0].job.values, *(measure.label for measure in measures), "run")
    cells, last = [], len(columns) - 1
    for row in rows:
        values = [write(value) for value in row.job.values.values()]
        shown = [_shown(measure, row.numbers) for measure in measures]
        run = "failed" if row.outcome.run is None else Path(row.outcome.run).name
        cells.append((str(row.job.number), *values, *shown, run))
    failed = {(n, last): "red" for n, row in enumerate(rows) if row.outcome.run is None}
    return Table(columns, cells, whole=(last,), styles=failed)


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
        return NOTHING
    if measure.share:
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
