"""report.md and results.json of an evaluation of a kind of its own, from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvxfer.evals import markdown
from kvxfer.evals.kinds import KINDS
from kvxfer.runs import write_json, write_text

Results = Mapping[str, Any]


def render(results: Results) -> str:
    """Markdown for a reader who has never seen the project."""
    kind = KINDS[results["kind"]]
    lines = [f"**{results['verdict']['sentence']}**", "", f"## {kind.heading}", "", *kind.sections(results["data"])]
    return markdown.document(results["title"], [*lines, *markdown.about_map(results), *markdown.provenance(results)])


def write_report(results: Results, directory: Path) -> None:
    """Figures, report.md and results.json."""
    figures = directory / "figures"
    figures.mkdir(exist_ok=True)
    KINDS[results["kind"]].figures(results["data"], figures)
    write_text(directory / "report.md", render(results))
    write_json(directory / "results.json", results)
