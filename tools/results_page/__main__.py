"""``python -m tools.results_page results/``: the tables of docs/results.md made anew from collected JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvxfer.errors import KvxferError
from tools.results_page.page import write


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; exits with 1 and one line on a mistake."""
    parser = argparse.ArgumentParser(
        "python -m tools.results_page", description="Rewrite the tables of docs/results.md from collected JSON."
    )
    parser.add_argument("folder", type=Path, help="the JSON that tools.collect writes, e.g. results/")
    parser.add_argument("--page", type=Path, help="the page to rewrite (default: docs/results.md beside the folder)")
    given = parser.parse_args(arguments)
    page = given.page or given.folder.resolve().parent / "docs" / "results.md"
    try:
        write(page, given.folder)
    except KvxferError as error:
        sys.exit(f"error: {error}")
    print(os.path.relpath(page))


if __name__ == "__main__":
    main()
