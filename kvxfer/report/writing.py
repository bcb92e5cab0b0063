"""A reader's view of results.json: report.md, the console's table and the figures; and writing all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from kvxfer.errors import KvxferError
from kvxfer.report import designs as designs_page
from kvxfer.report import markdown
from kvxfer.report.figures import conditions_figure, r2_heatmap
from kvxfer.report.pages import RESULTS, write_pages, written
from kvxfer.report.tables import (
    NOTHING,
    SCHEMA,
    interval,
    number,
    p_value,
    percent,
    perplexity,
    validate_results,
)
from kvxfer.report.verdict import accuracy_outcome, ancestry_sentence, cautions, nats_outcome, verdict
from kvxfer.report.wording import condition_name

__all__ = [
    "compare_designs",
    "render_comparison",
    "render_report",
    "terminal_table",
    "validate_results",
    "write_results",
]

Results = Mapping[str, Any]
SAME_ITEMS = 1e-6
STYLES = {"better": "green", "worse": "red", "none": "yellow"}


def render_report(results: Results) -> str:
    """Markdown for a reader who has never seen the project; a comparison of designs is rendered as one."""
    results = _plain(results)
    if "designs" in results:
        return render_comparison(results["designs"], results["best"], results["title"])
    return markdown.document(results["title"], markdown.lead(results), markdown.body(results))


def render_comparison(designs: Mapping[str, Results], best: str | None = None, title: str = "Designs compared") -> str:
    """Markdown that sets several designs of a map side by side, their shared baselines once, the best in detail."""
    designs = _plain(designs)
    best = best or best_design(designs)
    return markdown.document(title, designs_page.comparison_lead(designs, best), designs_page.comparison(designs, best))


def best_design(designs: Mapping[str, Results]) -> str:
    """The design whose mapped cache is most accurate, the lowest nats deciding ties and tasks without accuracy."""
    if not designs:
        raise KvxferError("designs: 0 were evaluated and at least 1 is needed; name one of same, both, previous")

    def rank(name: str) -> tuple[float, float]:
        row = designs[name]["conditions"]["mapped"]
        return row["accuracy"] or 0.0, -row["nats"]

    return max(designs, key=rank)


def compare_designs(designs: Mapping[str, Results], title: str) -> dict[str, Any]:
    """results.json of a comparison: every design's results, the best one's name, and its keys at the top level.

    Raises KvxferError when two designs were not scored on the same items: their ceilings or sources differ.
    """
    best = best_design(designs)
    for name, results in designs.items():
        for condition in ("ceiling", "source"):
            a, b = (r["conditions"][condition] for r in (designs[best], results))
            if a["n"] != b["n"] or abs(a["nats"] - b["nats"]) > SAME_ITEMS * max(1.0, abs(a["nats"])):
                raise KvxferError(
                    f"designs {best} and {name}: {condition} has {a['nats']:.6g} nats on {a['n']} items and "
                    f"{b['nats']:.6g} on {b['n']}; evaluate them on the same items"
                )
    return {**designs[best], "schema": SCHEMA, "title": title, "designs": dict(designs), "best": best}


COLUMNS = (
    "Accuracy\n% [95 %]",
    "Perp-\nlexity",
    "\nNats",
    "Re-\ntained",
    "Gap\nrecov.",
    "Gap\nrecov.",
    "p\nacc.",
    "p\nnats",
)


def _cells(results: Results, condition: str, in_accuracy: bool) -> list[str]:
    """A row under COLUMNS: without accuracy the nats take its place, so that a row fits 80 characters."""
    row, test = results["conditions"][condition], results["tests"].get(f"{condition}_vs_source", {})
    accuracy = f"{percent(row['accuracy']).removesuffix(' %')} {interval(row.get('accuracy_ci'))}".rstrip()
    cells = [accuracy, perplexity(row["perplexity"]), "" if in_accuracy else number(row["nats"])]
    cells += [percent(row["retention"]), percent(row["gap_recovered"])]
    cells.append("" if in_accuracy else percent(row["gap_recovered_nats"]))
    return cells + [p_value(test[key]) if key in test else "" for key in ("accuracy_p", "nll_p")]


def _terminal_rows(results: Results) -> list[tuple[str, Results, str]]:
    """(label, results, condition) of each row: the shared conditions, then what each design has of its own."""
    designs: Mapping[str, Results] = results.get("designs") or {}
    shared = [c for c in results["conditions"] if not (designs and c in markdown.PER_DESIGN)]
    rows = [(condition_name(c, short=True), results, c) for c in shared]
    for name, design in designs.items():
        labels = {"mapped": f"Mapped, {name}", "mapped_all": "  all but last"}
        rows += [(label, design, key) for key, label in labels.items() if key in design["conditions"]]
    return rows


def terminal_table(results: Results) -> Table:
    """The headline table for a console: one row per condition, or the shared ones once and two per design.

    It fits 80 columns; p is that of the comparison with the source, green where better, red where worse.
    """
    results = _plain(results)
    in_accuracy = results["conditions"]["mapped"]["accuracy"] is not None
    rows = _terminal_rows(results)
    cells = [_cells(source, condition, in_accuracy) for _, source, condition in rows]
    kept = [i for i in range(len(COLUMNS)) if any(row[i] not in ("", NOTHING) for row in cells)]
    best = f" ({results['best']})" if "designs" in results else ""
    caption = verdict(results["conditions"], results["tests"], subject=f"The mapped cache{best}").sentence
    caption = "\n".join(filter(None, (caption, *cautions(results), ancestry_sentence(results))))
    table = Table(
        title=Text(results["title"], style="bold"),
        caption=Text(f"\n{caption}\np: against the source alone.", style="not italic"),
        box=box.SIMPLE_HEAD,
        caption_justify="left",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
        padding=(0, 0),
    )
    table.add_column("\nCondition", overflow="fold")
    for index in kept:
        table.add_column(COLUMNS[index], justify="right", no_wrap=True)
    for (label, source, condition), row in zip(rows, cells, strict=True):
        test = source["tests"].get(f"{condition}_vs_source", {})
        outcomes = (accuracy_outcome(test), nats_outcome(test))
        styles = {len(COLUMNS) - 2 + i: STYLES[o] for i, o in enumerate(outcomes) if o is not None}
        bold = "bold" if condition == "mapped" else ""
        texts = [Text(row[i], style=f"{bold} {styles.get(i, '')}".strip()) for i in kept]
        table.add_row(Text(label, style=bold), *texts)
    return table


def _plain(value: Any) -> Any:
    """The same in JSON's own types; what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def _dumps(value: Any, depth: int = 0) -> str:
    """JSON whose short objects and lists stay on one line, so that a person can read and compare files."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(line) <= 110 or not isinstance(value, dict | list) or not value:
        return line
    inside, outside = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_dumps(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inside + part for part in parts) + "\n" + outside + "}"
    return "[\n" + ",\n".join(inside + _dumps(item, depth + 1) for item in value) + "\n" + outside + "]"


def write_results(results: Results, directory: Path | str) -> list[Path]:
    """Write figures, report.md, report.html and (last) results.json into a directory; returns the three paths.

    Raises KvxferError naming the key that is missing, before anything is written. The caller's directory is a
    temporary one that it renames, so nothing here needs to be atomic.
    """
    results = _plain(results)
    validate_results(results)
    directory = Path(directory)
    for name, path in markdown.figure_paths(results).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        if name == "r2":
            r2_heatmap(results["selection"], directory / path)
        elif name == "designs":
            rows, names = designs_page.design_rows(results["designs"])
            conditions_figure(rows, directory / path, results["chance"], names)
        else:
            conditions_figure(results["conditions"], directory / path, results["chance"])
    write_pages(render_report(results), directory)
    (directory / RESULTS).write_text(_dumps(results) + "\n", encoding="utf-8")
    return written(directory)
