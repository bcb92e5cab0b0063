"""All evaluations of a map in one report (``full``): what they come to together, each in a line, then each in full."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import rich.table
from matplotlib.axes import Axes

from kvxfer.errors import KvxferError
from kvxfer.report import document as page
from kvxfer.report.figures import COLOURS, INK, MUTED, canvas, label, name_line, tidy
from kvxfer.report.kinds import REPORTS
from kvxfer.report.numbers import percent, percent_in
from kvxfer.report.prose import anchor, fill, plain_text
from kvxfer.report.table import Table
from kvxfer.report.verdict import WORDS
from kvxfer.report.wording import DESIGNS

Json = Mapping[str, Any]

OUTCOMES = {"beats": "better", "none": "no benefit", "worse": "worse", "mixed": "mixed", "unable": "cannot tell"}
"""What one evaluation comes to, against the source."""

ITEMS = ("items", "samples")
"""What evaluations call a list with an entry for every single item."""

RETENTION = "figures/retention.png"
SIDES = {"source": "small", "target": "large"}
NOT_COMPARED = "Not compared"
ROW = 0.42
_ORDER = {"worse": 0, "mixed": 1, "none": 1, "unable": 1, "beats": 2}


def measured(name: str, results: Json, seconds: float) -> dict[str, Any]:
    """A part of the full report's data: a finished evaluation, all but the scores of single items."""
    report = REPORTS[results["kind"]]
    tasks = report.by_task(results["data"])
    return {
        "name": name,
        "status": "measured",
        "kind": results["kind"],
        "heading": report.heading,
        "run_id": results["run_id"],
        "seconds": seconds,
        "verdict": results["verdict"],
        "tasks": [_task(name, task, conditions) for task, conditions in tasks.items()],
        "results": without_items(results),
    }


def missing(name: str, status: str, reason: str) -> dict[str, Any]:
    """A part that ``failed`` or was ``skipped``, and why."""
    return {"name": name, "status": status, "reason": reason}


def without_items(value: Any) -> Any:
    """The same without any list of single items' scores: its own run has them."""
    if isinstance(value, Mapping):
        return {k: without_items(v) for k, v in value.items() if not (k in ITEMS and isinstance(v, list))}
    return [without_items(item) for item in value] if isinstance(value, list) else value


def _task(part: str, task: str, conditions: Json) -> dict[str, Any]:
    """One row of the figure of tasks: shares of the ceiling's accuracy, None where that is 0."""
    mapped, ceiling = conditions["mapped"], conditions["ceiling"]["accuracy"]
    accuracies = {name: conditions[name]["accuracy"] for name in ("ceiling", "source", "mapped")}
    return {
        "part": part,
        "task": task,
        "n": mapped["n"],
        **accuracies,
        "retention": mapped["retention"],
        "retention_ci": mapped["retention_ci"],
        "source_retention": accuracies["source"] / ceiling if ceiling else None,
    }


def overall(parts: Sequence[Json]) -> dict[str, Any]:
    """What all parts come to: the first with items decides, or else the first that is about the source.

    What is timed is compared with the target's own prefill, so it never says whether a map beats the source.

    Returns:
        ``kind`` and ``head`` of the deciding part; ``word`` says the kind in a word or two, ``sentence`` begins with
        it; ``decided_by`` that part's name (None where nothing was compared with the source); ``against`` and
        ``in_favour`` the names of measured parts that say less, or more.

    Raises:
        KvxferError: no part was measured.
    """
    known = [part for part in parts if part["status"] == "measured"]
    if not known:
        reasons = "; ".join(f"{part['name']}: {part['reason']}" for part in parts)
        raise KvxferError(f"eval.parts: none could be measured ({reasons})")
    compared = [part for part in known if REPORTS[part["kind"]].against_source]
    if not compared:
        names = ", ".join(part["name"] for part in known)
        sentence = f"{NOT_COMPARED}: nothing was set against the source, only times were measured ({names})."
        said = {"kind": "none", "word": NOT_COMPARED, "head": NOT_COMPARED, "sentence": sentence, "decided_by": None}
        return {**said, **_others(known, "none")}
    first = next((part for part in compared if REPORTS[part["kind"]].decides), compared[0])
    kind, sentence = first["verdict"]["kind"], first["verdict"]["sentence"]
    if not sentence.startswith(WORDS[kind]):
        sentence = f"{WORDS[kind]}. {sentence}"
    said = {"kind": kind, "word": WORDS[kind], "head": first["verdict"]["head"], "sentence": sentence}
    others = [part for part in known if part is not first]
    return {**said, "decided_by": first["name"], **_others(others, kind)}


def _others(parts: Sequence[Json], kind: str) -> dict[str, list[str]]:
    """The names of parts that say less than ``kind``, and of those that say more."""
    order = [(part["name"], _ORDER[part["verdict"]["kind"]] - _ORDER[kind]) for part in parts]
    return {"against": [n for n, more in order if more < 0], "in_favour": [n for n, more in order if more > 0]}


def decisive(parts: Sequence[Json], verdict: Json) -> Json:
    """The part that stands for the whole: the one that decided, else the first that was measured."""
    known = (part for part in parts if part["status"] == "measured")
    return next(part for part in known if verdict["decided_by"] in (part["name"], None))


def render(results: Json) -> str:
    """Markdown: the verdict and what speaks against it, every part in a line, then every part in full."""
    parts, said = results["data"]["parts"], results["verdict"]
    by_name = {part["name"]: part for part in parts}
    against = [f"{_link(by_name[name])}: {by_name[name]['verdict']['sentence']}" for name in said["against"]]
    against += [
        f"Not measured, so the verdict does not know of it: `{part['name']}` ({part['status']}): "
        f"{plain_text(part['reason'])}"
        for part in parts
        if part["status"] != "measured"
    ]
    chosen = decisive(parts, said)
    screen = REPORTS[chosen["kind"]].first_screen(chosen["results"]["data"])
    # The deciding part's own words against it come first.
    figure = screen.figure and screen.figure.replace("figures/", f"figures/{chosen['name']}/", 1)
    screen = replace(screen, figure=figure, against=[*screen.against, *against])
    first = screen.markdown([said["sentence"], *_remarks(chosen)])
    tasks = [task for part in parts for task in part.get("tasks", [])]
    own = fill(
        "full",
        compared=_compared(results),
        glance=glance([_link(part) for part in parts], parts),
        in_favour=[(_link(by_name[n]), by_name[n]["verdict"]["sentence"]) for n in said["in_favour"]],
        tasks=_tasks_table(tasks) if tasks else None,
        figure=RETENTION if task_rows(parts) else None,
    )
    each = [_part(part) for part in parts if part["status"] == "measured"]
    sections = [own, *each, page.about_map(results), page.provenance(results)]
    return page.document(f"Full evaluation: {results['title']}", first, sections)


def figures(results: Json, directory: Path, folders: Mapping[str, Path]) -> None:
    """The parts' own figures, from their ``folders``, and retention by task."""
    for name, folder in folders.items():
        if (folder / "figures").is_dir():
            shutil.copytree(folder / "figures", directory / "figures" / name, dirs_exist_ok=True)
    if rows := task_rows(results["data"]["parts"]):
        retention_figure(rows, directory / RETENTION)


def terminal(results: Json) -> rich.table.Table:
    """Every part in a line, and the verdict."""
    parts = results["data"]["parts"]
    table = glance([part["name"] for part in parts], parts)
    shown = Table(table.columns[:-1], [row[:-1] for row in table.rows], right=False)
    return shown.terminal(results["title"], results["verdict"]["sentence"])


def glance(names: Sequence[str], parts: Sequence[Json]) -> Table:
    """Every part in a line: its outcome, or why it was not measured."""
    rows = []
    for name, part in zip(names, parts, strict=True):
        if part["status"] == "measured":
            own = part["verdict"]
            rows.append((name, OUTCOMES[own["kind"]], own["head"], f"{part['seconds']:,.0f}"))
        else:
            rows.append((name, part["status"], part["reason"], ""))
    return Table(("Evaluation", "Outcome", "What it says", "Seconds"), rows, right=False)


def task_rows(parts: Sequence[Json]) -> list[Json]:
    """The tasks of all parts whose retention is known."""
    return [task for part in parts for task in part.get("tasks", []) if task["retention"] is not None]


def _title(part: Json) -> str:
    """A part's heading; a failed one has only its option's name."""
    return f"{part['heading']} ({part['name']})" if part["status"] == "measured" else str(part["name"])


def _link(part: Json) -> str:
    title = _title(part)
    return f"[{title}](#{anchor(title)})" if part["status"] == "measured" else title


def _remarks(part: Json) -> list[str]:
    return REPORTS[part["kind"]].remarks(part["results"]["data"])


def _compared(results: Json) -> dict[str, str]:
    """Which models, which map, which text: what a reader needs before any number."""
    pair, fitted, plan = results["pair"], results["map"], results["provenance"]["plan"]
    found = {}
    for side, size in SIDES.items():
        model = pair[side]
        # One that was read from a folder has its digest for a name.
        name = model.get("model") or f"{side} of pair “{pair['name']}”, sha256 {str(model.get('sha256'))[:12]}"
        found[f"{side.capitalize()} (the {size} model)"] = f"{name}: {model['geometry']['layers']} layers"
    reads = DESIGNS.get(fitted["features"], "see its configuration")
    found["Map"] = f"{fitted['solver']}, design “{fitted['features']}”: {reads}"
    whole, own = (percent(fitted[key]) for key in ("handoff_share_of_prefill_flops", "share_of_prefill_flops"))
    found["What a handoff costs"] = f"{whole} of the target's prefill FLOPs; the map alone {own} per mapped token"
    exact = f"the first {plan['exact_first']}, the last {plan['hold_back']}"
    return {**found, "Tokens that the target computes itself": exact}


def _tasks_table(tasks: Sequence[Json]) -> Table:
    """Every task that has answers."""
    return Table.of(
        tasks,
        ("Task", itemgetter("task")),
        ("Evaluation", itemgetter("part")),
        ("Items", lambda task: f"{task['n']:,}"),
        *((name.capitalize(), lambda task, name=name: percent(task[name])) for name in ("ceiling", "source", "mapped")),
        ("Retention [95 %]", lambda task: percent_in(task, "retention")),
        ("Source's retention", lambda task: percent(task["source_retention"])),
    )


def _part(part: Json) -> str:
    """One evaluation in full: its verdict, then its own sections one level down."""
    own = REPORTS[part["kind"]].sections(part["results"]["data"])
    own = re.sub(r"^##", "###", own, flags=re.MULTILINE).replace("](figures/", f"](figures/{part['name']}/")
    said = page.lead(part["verdict"]["sentence"], _remarks(part))
    return f"## {plain_text(_title(part))}\n\n{said}\n\n{own}"


def retention_figure(rows: Sequence[Json], path: Path | str) -> None:
    """Draw a line per task as PNG: a dot with its 95 % interval, and the source's retention as a tick to beat.

    Args:
        rows: ``task``, ``part``, ``n``, ``retention``, ``retention_ci`` and ``source_retention`` (None: no tick).
    """
    with canvas(path, (8.2, ROW * len(rows) + 1.6)) as figure:
        axes = figure.subplots()
        ends = [1.0]
        for y, row in enumerate(rows):
            ends += _draw(axes, y, row)
        axes.axvline(1.0, color=COLOURS["ceiling"], linewidth=1.4, zorder=1)
        name_line(axes, 1.0, "ceiling", COLOURS["ceiling"])
        axes.set_yticks(range(len(rows)), [f"{row['task']} (n = {row['n']:,})" for row in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        low = min([0.0, *ends])
        axes.set_xlim(low - (0.03 if low else 0), max(ends) + 0.12)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.set_xlabel("accuracy in per cent of the ceiling's, 95 % interval")
        handles = [
            axes.plot([], [], "o-", color=COLOURS["mapped"], linewidth=2.2, markersize=8, label="mapped cache")[0],
            axes.plot([], [], "|", color=COLOURS["source"], markersize=13, markeredgewidth=2.6, label="source alone")[
                0
            ],
        ]
        place = {"loc": "upper left", "bbox_to_anchor": (0, -0.14), "borderaxespad": 0}
        axes.legend(handles=handles, frameon=False, fontsize=9, ncols=2, labelcolor=[INK, MUTED], **place)
        tidy(axes, "x")


def _draw(axes: Axes, y: int, row: Json) -> list[float]:
    """One task; returns the ends of what was drawn."""
    value, source = row["retention"], row["source_retention"]
    low, high = row["retention_ci"] or (value, value)
    axes.plot([low, high], [y, y], color=COLOURS["mapped"], linewidth=2.2, zorder=3)
    axes.plot(value, y, "o", markersize=8, color=COLOURS["mapped"], zorder=4)
    if source is not None:
        axes.plot([source, source], [y - 0.32, y + 0.32], color=COLOURS["source"], linewidth=2.6, zorder=2)
    place = max(high, value if source is None or abs(source - value) > 0.1 else source)
    label(axes, f"{100 * value:.1f} %", (place, y), (8, 0), pad=0.8, va="center", fontsize=9.5, zorder=5)
    return [low, high, *([] if source is None else [source])]
