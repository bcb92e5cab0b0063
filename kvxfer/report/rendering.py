"""The report and results.json of an evaluation of a kind of its own, from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.evals.kinds import KINDS
from kvxfer.files import write_json
from kvxfer.report import markdown
from kvxfer.report.pages import RESULTS, write_pages
from kvxfer.report.results import validate

Results = Mapping[str, Any]


def render(results: Results) -> str:
    """Markdown for a reader who has never seen the project."""
    kind = KINDS[results["kind"]]
    lead = [f"**{results['verdict']['sentence']}**", ""]
    lines = [f"## {kind.heading}", "", *kind.sections(results["data"])]
    rest = [*markdown.about_map(results), *markdown.provenance(results)]
    return markdown.document(results["title"], lead, [*lines, *rest])


def write_report(results: Results, directory: Path) -> None:
    """Figures, report.md, report.html and results.json."""
    validate(results)
    figures = directory / "figures"
    figures.mkdir(exist_ok=True)
    KINDS[results["kind"]].figures(results["data"], figures)
    write_pages(render(results), directory)
    write_json(directory / RESULTS, results)
