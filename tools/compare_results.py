"""``python -m tools.compare_results OLD NEW``: do two outputs folders answer the same questions with the same numbers?

For a change that must not change numbers: evaluate before and after it, then compare. Evaluations are matched by what
they ask of which map, not by their ids, and every number of their results is compared; clocks, ids, paths and versions
are not. Maps are compared tensor by tensor. Exit status 1 where a number differs or an answer is missing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kvxfer.files import read_json

TIMED = ("latency", "full")
"""Kinds that measure clocks, or repeat what their parts' own runs say."""
_NO_NUMBER = (
    "run_id",
    "seconds",
    "sha256",
    "started",
    "environment",
    "provenance",
    "map",
    "pair",
    "title",
    "verdict",
    "schema",
)
_NAMES = ("solver", "penalty", "rank", "features")
_TOLERANCE = 1e-9


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("python -m tools.compare_results", description=__doc__.split("\n\n")[0])
    parser.add_argument("old", type=Path, help="an outputs folder of before")
    parser.add_argument("new", type=Path, help="an outputs folder of after")
    given = parser.parse_args()
    failures = 0
    for kind, find, compare in (("evaluation", evaluations, differences), ("map", maps, tensor_differences)):
        old, new = find(given.old), find(given.new)
        for question, file in old.items():
            found = [] if question not in new else list(compare(file, new[question]))
            told = "missing" if question not in new else f"{len(found)} differences" if found else "the same"
            failures += told != "the same"
            print(f"{kind} {' '.join(question)}: {told}", *found[:20], sep="\n    ")
    sys.exit(1 if failures else 0)


def evaluations(outputs: Path) -> dict[tuple[str, ...], Path]:
    """The results of an outputs folder by what they ask of which map."""
    found = {}
    for file in sorted(outputs.glob("evaluate/*/results.json")):
        results = read_json(file)
        if results.get("kind", "items") not in TIMED:
            asked = results["provenance"]["config"]["eval"]
            about = [str(results["map"][key]) for key in (*_NAMES, "k")]
            found[(results.get("kind", "items"), *about, f"{results['pair']['name']}", *_asked(asked))] = file
    return found


def _asked(settings: Mapping[str, Any]) -> list[str]:
    wanted = ("conditions", "questions", "stories", "seed", "generate", "prefixes", "rows", "choices")
    # What is off may go unsaid.
    return [f"{key}={settings[key]}" for key in wanted if settings.get(key, "all") not in (None, 0, "all")]


def maps(outputs: Path) -> dict[tuple[str, ...], Path]:
    """The maps of an outputs folder by their settings."""
    found = {}
    for file in sorted(outputs.glob("train/*/manifest.json")):
        manifest = read_json(file)
        names = [
            f"{manifest['pair']['name']}" if "name" in manifest["pair"] else "",
            *(manifest[k]["name"] for k in _NAMES),
        ]
        dials = (manifest["solver"]["k"], manifest["penalty"]["lam"], manifest.get("trainer", {}).get("max_steps"))
        found[(*names, *map(str, dials), str(manifest["pair"].get("direction")))] = file.parent / "map.safetensors"
    return found


def differences(old: Path, new: Path) -> Iterator[str]:
    """The numbers of two results that are not the same."""
    before, after = (dict(leaves(body(read_json(file)))) for file in (old, new))
    for key in sorted(set(before) | set(after)):
        if key not in before or key not in after:
            yield f"{key}: only {'after' if key in after else 'before'}"
        elif not math.isclose(before[key], after[key], rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            yield f"{key}: {before[key]} became {after[key]}"


def body(results: Mapping[str, Any]) -> Any:
    """What was measured: under ``data``, or (once) at the top."""
    return results.get("data", results)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON value by its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _NO_NUMBER:
                yield from leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}.{index}")
    elif isinstance(value, bool | int | float):
        yield path, float(value)


def tensor_differences(old: Path, new: Path) -> Iterator[str]:
    """The tensors of two maps that are not equal to the bit."""
    before, after = load_file(old), load_file(new)
    for name in sorted(set(before) | set(after)):
        if name not in before or name not in after or not torch.equal(before[name], after[name]):
            yield name


if __name__ == "__main__":
    main()
