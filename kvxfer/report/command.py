"""``kvxfer report``: evaluations side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.experiment.runs import RECORD
from kvxfer.report.evaluations import find
from kvxfer.report.pages import RESULTS
from kvxfer.report.side_by_side import write_comparison
from tools.results_page.page import write


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits with 1 and one line on a mistake."""
    parser = argparse.ArgumentParser(
        "python -m kvxfer.report.writing",
        description="Set evaluations side by side in comparison.md and comparison.html; "
        "or, given a folder of collected JSON, rewrite the tables of docs/results.md.",
    )
    parser.add_argument("runs", nargs="+", help="directories or ids of evaluations; or one folder, e.g. results/")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="where ids are looked for")
    parser.add_argument("--out", type=Path, help="the folder to write the comparison to (default: this one)")
    parser.add_argument("--page", type=Path, help="the page to rewrite (default: docs/results.md beside the folder)")
    given = parser.parse_args(arguments)
    try:
        paths = _collected(given) if _is_collected(given.runs) else _comparison(given)
    except KvxferError as error:
        sys.exit(f"error: {error}")
    for path in paths:
        print(os.path.relpath(path))


def _is_collected(names: Sequence[str]) -> bool:
    """Whether a folder holds what ``tools.collect`` writes: JSON, but nothing of a run."""
    folder = Path(names[0])
    of_run = any((folder / name).exists() for name in (RESULTS, RECORD))
    return len(names) == 1 and any(folder.glob("*.json")) and not of_run


def _collected(given: argparse.Namespace) -> list[Path]:
    if given.out is not None:
        raise KvxferError(f"--out={given.out} is for comparisons of runs; tables are written into --page")
    folder = Path(given.runs[0])
    page = given.page or folder.resolve().parent / "docs" / "results.md"
    write(page, folder)
    return [page]


def _comparison(given: argparse.Namespace) -> list[Path]:
    if given.page is not None:
        raise KvxferError(f"--page={given.page} is for collected results; name the folder of one comparison with --out")
    folder = given.out or Path()
    try:
        return write_comparison(find(given.runs, given.outputs), folder)
    except OSError as error:
        raise KvxferError(f"cannot write to {folder} (--out): {error.strerror}") from error
