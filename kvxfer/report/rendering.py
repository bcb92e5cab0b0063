"""From results.json, of whatever kind, to what a person reads: report, console, and all files of an evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from kvxfer.files import write_text
from kvxfer.report import designs, full
from kvxfer.report.document import RESULTS, Results, about_map, document, provenance, write_pages, written
from kvxfer.report.kinds import REPORTS
from kvxfer.report.schema import validate

COMPOSED: dict[str, Any] = {"full": full, "designs": designs}
"""Modules of the kinds whose data are other evaluations."""


def render(results: Results) -> str:
    """Markdown for a reader who has never seen the project."""
    if (composed := COMPOSED.get(results["kind"])) is not None:
        return composed.render(results)
    report, data = REPORTS[results["kind"]], results["data"]
    heading = "" if report.sectioned else f"## {report.heading}\n"
    sections = [heading, report.sections(data), about_map(results), provenance(results)]
    first = report.first_screen(data).markdown([results["verdict"]["sentence"], *report.remarks(data)])
    return document(results["title"], first, sections)


def terminal(results: Results) -> RenderableType:
    """What a console shows of them."""
    if (composed := COMPOSED.get(results["kind"])) is not None:
        return composed.terminal(results)
    return REPORTS[results["kind"]].terminal(results["title"], results["data"])


def write(results: Results, directory: Path, folders: Mapping[str, Path] | None = None) -> list[Path]:
    """Write figures, report.md, report.html and (last) results.json into a directory; returns the three paths.

    Args:
        folders: where the parts of a full report lie, which have drawn their own figures.

    Raises:
        KvxferError: a key is missing; nothing is written then.
    """
    results = plain(results)
    validate(results)
    (directory / "figures").mkdir(exist_ok=True)
    if (composed := COMPOSED.get(results["kind"])) is not None:
        composed.figures(results, directory, folders or {})
    else:
        REPORTS[results["kind"]].figures(results["data"], directory / "figures")
    write_pages(render(results), directory)
    write_text(directory / RESULTS, dumps(results) + "\n")
    return written(directory)


def plain(value: Any) -> Any:
    """The same in JSON's own types; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def dumps(value: Any, depth: int = 0) -> str:
    """JSON whose short objects and lists stay on one line, so that a person can read and compare files."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(line) <= 110 or not isinstance(value, dict | list) or not value:
        return line
    inside, outside = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {dumps(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inside + part for part in parts) + "\n" + outside + "}"
    return "[\n" + ",\n".join(inside + dumps(item, depth + 1) for item in value) + "\n" + outside + "]"
