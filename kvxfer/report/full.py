"""The report of ``eval=full``, from its JSON alone but for the figures, which its parts have drawn."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.evals.full import OUTCOMES, decisive, kind_of
from kvxfer.evals.kinds import KINDS
from kvxfer.files import write_json
from kvxfer.report import markdown
from kvxfer.report.pages import RESULTS, write_pages
from kvxfer.report.results import validate
from kvxfer.report.retention_figure import retention_figure
from kvxfer.report.tables import interval, percent
from kvxfer.report.wording import DESIGNS

Json = Mapping[str, Any]
RETENTION = "figures/retention.png"
SIDES = {"source": "small", "target": "large"}


def render(results: Json) -> str:
    """Markdown: the verdict and what speaks against it, every part in a line, then every part in full."""
    parts = results["data"]["parts"]
    lines = [*_compared(results), *_glance(parts), *_tasks(parts)]
    for part in parts:
        lines += _part(part)
    rest = [*markdown.about_map(results), *markdown.provenance(results)]
    return markdown.document(f"Full evaluation: {results['title']}", _lead(results), [*lines, *rest])


def write_full(results: Json, directory: Path, folders: Mapping[str, Path]) -> None:
    """Figures, report.md, report.html and results.json; ``folders`` are those of the measured parts."""
    validate(results)
    figures = directory / "figures"
    figures.mkdir(exist_ok=True)
    for name, folder in folders.items():
        if (folder / "figures").is_dir():
            shutil.copytree(folder / "figures", figures / name, dirs_exist_ok=True)
    rows = task_rows(results["data"]["parts"])
    if rows:
        retention_figure(rows, directory / RETENTION)
    write_pages(render(results), directory)
    write_json(directory / RESULTS, results)


def task_rows(parts: Sequence[Json]) -> list[Json]:
    """The tasks of all parts whose retention is known."""
    return [task for part in parts for task in part.get("tasks", []) if task["retention"] is not None]


def _title(part: Json) -> str:
    """A part's heading; a failed one has only its option's name."""
    return f"{part['heading']} ({part['name']})" if part["status"] == "measured" else str(part["name"])


def _link(part: Json) -> str:
    title = _title(part)
    return f"[{title}](#{markdown.anchor(title)})"


def _lead(results: Json) -> list[str]:
    """The verdict, then whatever a reader must know with it."""
    said, parts = results["verdict"], {part["name"]: part for part in results["data"]["parts"]}
    lines = [f"**{said['sentence']}**", "", *_warnings(decisive(results["data"]["parts"], said))]
    for names, words in ((said["against"], "What speaks against it"), (said["in_favour"], "What speaks for the map")):
        if names:
            lines += [f"{words}:", ""]
            lines += [f"- {_link(parts[name])}: {parts[name]['verdict']['sentence']}" for name in names]
            lines += [""]
    gone = [part for part in parts.values() if part["status"] != "measured"]
    if gone:
        lines += ["Not measured, so the verdict does not know of it:", ""]
        lines += [f"- `{part['name']}` ({part['status']}): {markdown.plain_text(part['reason'])}" for part in gone]
        lines += [""]
    return lines


def _warnings(part: Json) -> list[str]:
    return markdown.warnings(part["results"]) if part["kind"] == "items" else []


def _compared(results: Json) -> list[str]:
    """Which models, which map, which text: what a reader needs before any number."""
    pair, fitted = results["pair"], results["map"]
    sides = [(f"{side.capitalize()} (the {size} model)", _model(pair, side)) for side, size in SIDES.items()]
    reads = DESIGNS.get(fitted["features"], "see its configuration")
    plan = results["provenance"]["plan"]
    rows = [
        *sides,
        ("Map", f"{fitted['solver']}, design “{fitted['features']}”: {reads}"),
        ("Its cost", f"{percent(fitted['share_of_prefill_flops'])} of the target's prefill FLOPs per token"),
        ("Tokens that the target computes itself", f"the first {plan['exact_first']}, the last {plan['hold_back']}"),
    ]
    lines = [f"- **{what}**: {markdown.plain_text(which)}" for what, which in rows]
    return ["## What was compared", "", *lines, ""]


def _model(pair: Json, side: str) -> str:
    """A model's name and size; one that was read from a folder has its digest for a name."""
    model = pair[side]
    layers = model["geometry"]["layers"]
    name = model.get("model") or f"{side} of pair “{pair['name']}”, sha256 {str(model.get('sha256'))[:12]}"
    return f"{name}: {layers} layers"


def _glance(parts: Sequence[Json]) -> list[str]:
    rows = []
    for part in parts:
        if part["status"] == "measured":
            own = part["verdict"]
            rows.append((_link(part), OUTCOMES[own["kind"]], own["head"], f"{part['seconds']:,.0f}"))
        else:
            rows.append((part["name"], part["status"], part["reason"], ""))
    said = (
        "Each row is an evaluation of its own: what the mapped cache comes to against the source alone (of latency: "
        "against the target's own prefill)."
    )
    header = ("Evaluation", "Outcome", "What it says", "Seconds")
    return ["## At a glance", "", said, "", *markdown.table(header, rows, right=False)]


def _tasks(parts: Sequence[Json]) -> list[str]:
    """Every task that has answers, as a figure and as its numbers."""
    tasks = [(part, task) for part in parts for task in part.get("tasks", [])]
    if not tasks:
        return []
    rows = [
        (
            task["task"],
            part["name"],
            f"{task['n']:,}",
            *(percent(task[name]) for name in ("ceiling", "source", "mapped")),
            f"{percent(task['retention'])} {interval(task['retention_ci'])}".rstrip(),
            percent(task["source_retention"]),
        )
        for part, task in tasks
    ]
    header = ("Task", "Evaluation", "Items", "Ceiling", "Source", "Mapped", "Retention [95 %]", "Source's retention")
    said = "Accuracy by task, and how much of the ceiling's is kept. A map earns its keep where it is above the source."
    lines = ["## Retention by task", "", said, ""]
    if task_rows(parts):
        lines += [f"![Retention by task with its 95 % interval, and the source's, which it must beat]({RETENTION})", ""]
    return [*lines, *markdown.table(header, rows)]


def _part(part: Json) -> list[str]:
    """One evaluation in full: its verdict, then its own sections one level down."""
    if part["status"] != "measured":
        return []
    results = part["results"]
    own = markdown.findings(results) if kind_of(results) == "items" else KINDS[part["kind"]].sections(results["data"])
    lines = [f"## {_title(part)}", "", f"**{part['verdict']['sentence']}**", "", *_warnings(part)]
    return [*lines, *(_inside(line, part["name"]) for line in own), ""]


def _inside(line: str, name: str) -> str:
    """A part's line in the whole report: headings one level down, figures in the part's own folder."""
    demoted = f"#{line}" if line.startswith("##") else line
    return demoted.replace("](figures/", f"](figures/{name}/")
