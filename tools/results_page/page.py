"""The generated parts of docs/results.md, from the results that are committed. All else is written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.files import write_text
from tools.results_page.choosing import budget_table, criteria_table
from tools.results_page.data import PairResults
from tools.results_page.findings import findings_table
from tools.results_page.loading import load_results
from tools.results_page.tables import (
    best_table,
    calibration_table,
    features_table,
    figure_name,
    form_table,
    frontier_table,
    maps_table,
    twins_table,
)
from tools.results_page.trained import trained_table

TABLES: dict[str, Callable[[PairResults], list[str]]] = {
    "maps": maps_table,
    "features": features_table,
    "frontier": frontier_table,
    "calibration": calibration_table,
    "best": best_table,
    "budget": budget_table,
    "criteria": criteria_table,
    "form": form_table,
    "blocks": partial(twins_table, change="blocks"),
    "weighted": partial(twins_table, change="weighted"),
    "reduced": partial(twins_table, change="reduced"),
    "trained": trained_table,
}
"""Tables about one pair, whose name follows; ``findings`` is about all pairs."""

END = "<!-- end table -->"
_BEGIN = re.compile(r"^<!-- begin table: (.*) -->$")


def blocks(text: str) -> list[str]:
    """The names of a page's generated blocks, in order.

    Raises:
        KvxferError: a block begins in another, or does not end.
    """
    names, inside = [], None
    for line in text.splitlines():
        begins = _BEGIN.match(line)
        if begins and inside is None:
            inside = begins.group(1)
            names.append(inside)
        elif begins:
            raise KvxferError(f"table {begins.group(1)!r} begins in table {inside!r}: end that with {END}")
        elif line == END:
            inside = None
    if inside is not None:
        raise KvxferError(f"table {inside!r} does not end: write {END} after it")
    return names


def render(text: str, results: Mapping[str, PairResults]) -> str:
    """A page with every block made anew; all other lines as they are.

    Raises:
        KvxferError: a block's table is unknown, or its pair has no results.
    """
    made = {name: _table(name, results) for name in blocks(text)}
    lines, inside = [], False
    for line in text.splitlines():
        inside = inside and line != END
        if not inside:
            lines.append(line)
        if begins := _BEGIN.match(line):
            lines += ["", *made[begins.group(1)]]
            inside = True
    return "\n".join(lines) + "\n"


def _table(name: str, results: Mapping[str, PairResults]) -> list[str]:
    if name == "findings":
        # Questions about a pair's text are few; its findings are about the text itself.
        return findings_table([found for pair, found in results.items() if "/" not in pair])
    kind, _, pair = name.partition(" ")
    if kind not in TABLES:
        known = ", ".join(f"{each} PAIR" for each in TABLES)
        raise KvxferError(f"table {name!r} is none of {known}, findings")
    # Files with trained maps stand apart.
    about, file = (f"{pair}/trained", f"{pair}_trained") if kind == "trained" else (pair, pair)
    if about not in results:
        raise KvxferError(
            f"table {name!r}: no results of pair {about!r} (there are {', '.join(results)}): write results/{file}.json "
            "with tools.collect, or remove the block"
        )
    return TABLES[kind](results[about])


def figures(text: str) -> dict[str, str]:
    """The pairs whose frontier a page shows, with the figure's path beside the page."""
    pairs = [name.partition(" ")[2] for name in blocks(text) if name.startswith("frontier ")]
    return {pair: f"figures/{figure_name(pair)}" for pair in pairs}


def write(page: Path, folder: Path) -> None:
    """Make a page's blocks and figures anew from the results in a folder."""
    from tools.results_page.figures import frontier_figure

    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise KvxferError(f"{page} cannot be read ({error.strerror}): name the page with --page") from error
    results = load_results(folder)
    made = render(text, results)
    for pair, path in figures(text).items():
        frontier_figure(results[pair], page.parent / path)
    write_text(page, made)
