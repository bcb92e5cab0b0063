"""What an evaluation leaves for a reader: report.md, the same as report.html, and results.json."""

from __future__ import annotations

from pathlib import Path

from kvxfer.files import write_text
from kvxfer.report.html import page

REPORT, PAGE, RESULTS = "report.md", "report.html", "results.json"


def write_pages(text: str, directory: Path, name: str = REPORT) -> None:
    """Write a report as Markdown and as one HTML page; its figures are there already, at the paths that it names."""
    file = directory / name
    write_text(file, text)
    write_text(file.with_suffix(".html"), page(text, directory))


def written(directory: Path) -> list[Path]:
    """The paths of a finished evaluation, results.json last: that is what scripts read."""
    return [directory / REPORT, directory / PAGE, directory / RESULTS]
