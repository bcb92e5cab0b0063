"""``kvxfer report``: evaluations side by side."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.errors import KvxferError, file_error, files_of
from kvxfer.report.console import say


def report(arguments: Sequence[str]) -> None:
    """The command; exits with 1 and one line on a mistake."""
    parser = argparse.ArgumentParser(
        "kvxfer report", description="Set evaluations side by side in comparison.md and comparison.html."
    )
    parser.add_argument("runs", nargs="+", help="directories or ids of finished evaluations")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="where runs are looked for")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder to write to (default: this one)")
    given = parser.parse_args(arguments)
    # --help needs none of it.
    from kvxfer.report.evaluated import find, finished
    from kvxfer.report.side_by_side import write_comparison

    try:
        runs = find(given.runs, given.outputs)
        with files_of("--out", given.out):
            # What diagnostics foretell is told over all maps of their pair that were evaluated there.
            diagnosed = any(run.kind == "diagnostics" for run in runs)
            paths = write_comparison(runs, given.out, finished(given.outputs) if diagnosed else [])
    except Exception as error:
        if (told := error if isinstance(error, KvxferError) else file_error(error)) is None:
            raise
        sys.exit(f"error: {told}")
    say(*(os.path.relpath(path) for path in paths))
