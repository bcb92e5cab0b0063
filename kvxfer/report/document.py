"""The document of a report: verdict, sections, what the map costs, where all of it comes from, glossary; its files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.files import write_text
from kvxfer.report.html import page
from kvxfer.report.numbers import percent, quantity, setting
from kvxfer.report.prose import fill
from kvxfer.report.table import Table

REPORT, PAGE, RESULTS = "report.md", "report.html", "results.json"
PROVENANCE_ROWS = 20
SETTINGS = {"solver": "Solver", "penalty": "Penalty", "lam": "λ (relative)", "rank": "Rank", "features": "Features"}
SETTINGS |= {"k": "Source layers per target layer (k)", "trained_on": "Trained on the map"}
SETTINGS |= {"trainer_seed": "Seed of the training"}

Results = Mapping[str, Any]


def document(title: str, first: str, sections: Sequence[str]) -> str:
    """A whole report: title, the first screen, and then in sections what this is about, all numbers and the glossary.

    Args:
        sections: each begins with a heading of the second level.
    """
    text = fill("report", title=title, first=first, sections=sections)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def lead(sentence: str, remarks: Sequence[str] = ()) -> str:
    """The verdict, and what a reader must know with it."""
    return "\n\n".join(f"**{said}**" for said in (sentence, *remarks)) + "\n"


def about_map(results: Results) -> str:
    """What the map is and what it costs."""
    fitted = results["map"]
    rows = [(label, setting(fitted[key])) for key, label in SETTINGS.items() if key in fitted]
    if "slice" in fitted:
        rows.append(("Target layers (a slice; what follows is of these alone)", fitted["slice"]))
    if fitted.get("random"):
        rows.append(("Weights", "random"))
    rows += [
        ("Parameters", quantity(fitted.get("parameters"))),
        ("Size", quantity(fitted.get("bytes"), "B")),
        ("Cost per token", quantity(fitted.get("flops_per_token"), "FLOPs")),
        (
            "The whole handoff, as a share of the target's prefill FLOPs",
            percent(fitted["handoff_share_of_prefill_flops"]),
        ),
        ("The map alone, per mapped token", percent(fitted["share_of_prefill_flops"])),
        ("SHA-256", _short(fitted.get("sha256"))),
    ]
    return f"## The map and its cost\n\n{Table(('Quantity', 'Value'), rows)}\n"


def provenance(results: Results) -> str:
    """Where it comes from."""
    pair = results["pair"]
    rows = [("evaluation", setting(results["run_id"]))]
    simple = [(f"pair.{key}", item) for key, item in pair.items() if not isinstance(item, Mapping | list)]
    sides = [(side, pair[side]) for side in ("source", "target") if isinstance(pair.get(side), Mapping)]
    keys = ("model", "revision", "sha256")
    simple += [(f"{side}.{key}", item[key]) for side, item in sides for key in keys if item.get(key) is not None]
    # The whole configuration would bury what a reader looks for.
    kept = {key: item for key, item in results["provenance"].items() if key not in ("config", "warnings")}
    others = simple + _flat(kept)
    rows += [(name, _short(item)) for name, item in others[:PROVENANCE_ROWS]]
    end = "The whole configuration and every single item's scores are in `results.json`."
    return f"## Provenance\n\n{Table(('What', 'Value'), rows, right=False)}\n\n{_warnings(results)}{end}\n"


def _warnings(results: Results) -> str:
    """What libraries warned of while models and tasks were loaded and asked: it may have changed a number."""
    said = results["provenance"].get("warnings") or ()
    return "".join(f"- Warned: {remark}\n" for remark in said) + ("\n" if said else "")


def _short(value: Any) -> str:
    """A provenance value in a cell: hashes cut, floats rounded, long texts and lists ended."""
    text = ", ".join(map(_short, value)) if isinstance(value, list) else setting(value)
    text = re.sub(r"\b[0-9a-f]{32,64}\b", lambda match: match.group()[:12], text)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _flat(value: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        name = f"{path}.{key}" if path else str(key)
        rows += _flat(item, name) if isinstance(item, Mapping) else [(name, item)]
    return rows


def write_pages(text: str, directory: Path, name: str = REPORT) -> None:
    """Write a report as Markdown and as one HTML page; its figures are there already, at the paths that it names."""
    file = directory / name
    write_text(file, text)
    write_text(file.with_suffix(".html"), page(text, directory))


def written(directory: Path) -> list[Path]:
    """The paths of a finished evaluation, results.json last: that is what scripts read."""
    return [directory / REPORT, directory / PAGE, directory / RESULTS]
