"""Figures of vLLM's prefill (``benchmarks/vllm_prefill.py``): what they hold, and which are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.costs import prefill_work
from kvxfer.models.geometry import Geometry

SCHEMA = 1
SHAPE = ("layers", "heads", "kv_heads", "head_dim", "hidden", "vocabulary", "body_parameters")
KEYS = ("schema", "model", "revision", "dtype", "device", "vllm", "geometry", "peak_flops", "points")


def floor_seconds(geometry: Geometry, tokens: int, peak: float) -> float:
    """The least time that a prefill of one prompt to its first token can take at ``peak`` FLOP/s."""
    return prefill_work(geometry, tokens, 1, 2, first_token=True).flops / peak


def require_above_floor(seconds: float, floor: float, tokens: int, where: str) -> None:
    """Refuse a figure that no prefill can have: prefix caching was on, and cache hits were timed."""
    if seconds < floor:
        raise KvxferError(
            f"{where}: {1e3 * seconds:.4g} ms for {tokens} tokens is below the {1e3 * floor:.4g} ms that the card's "
            "peak FLOP/s allow, so cache hits were timed and not a prefill: turn prefix caching off and time again"
        )


def read_figures(path: str) -> dict[str, Any]:
    """The file's content, or an error that says what is wrong with it."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise KvxferError(f"eval.vllm={path}: no such file; benchmarks/vllm_prefill.py writes it")
    try:
        found = json.loads(file.read_text())
        wrong = _wrong(found)
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong is not None:
        raise KvxferError(f"eval.vllm={path} is no file of benchmarks/vllm_prefill.py of this version ({wrong})")
    return dict(found)


def _wrong(found: Any) -> str | None:
    """What a file's content lacks, or None."""
    if not isinstance(found, dict):
        return "it holds no object"
    missing = next((key for key in KEYS if key not in found), None)
    if missing is not None:
        return f"{missing} is missing"
    if found["schema"] != SCHEMA:
        return f"its schema is {found['schema']} and not {SCHEMA}"
    if not isinstance(found["geometry"], dict):
        return "geometry is no object"
    if not _is_positive(found["peak_flops"]):
        return "peak_flops is no number above 0"
    points = found["points"]
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        return "points is no list of objects"
    for n, point in enumerate(points):
        for key in ("tokens", "median"):
            if not _is_positive(point.get(key)):
                return f"points.{n}.{key} is no number above 0"
    return None


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def figures_for(
    path: str, target: Mapping[str, Any], lengths: Sequence[int], geometry: Geometry, peak: float
) -> dict[int, float]:
    """Seconds to the first token for each length, from a file that is about this target on this machine.

    Args:
        target: its ``revision`` (None with random weights, which any model of that shape stands for), ``dtype`` and
            ``device`` (its name).
        geometry: of the whole target.
        peak: FLOP/s that were measured here.

    Raises:
        KvxferError: it is about another model, dtype or device, lacks a length, or has a figure below the floor.
    """
    found = read_figures(path)
    for key in ("revision", "dtype", "device"):
        if target[key] is not None and found[key] != target[key]:
            raise KvxferError(f"eval.vllm={path}: its {key} is {found[key]}, but here it is {target[key]}")
    for key in SHAPE:
        if found["geometry"].get(key) != getattr(geometry, key):
            raise KvxferError(
                f"eval.vllm={path} is about {found['model']}, whose {key} is {found['geometry'].get(key)}, but the "
                f"target's is {getattr(geometry, key)}: time the target itself"
            )
    medians = {point["tokens"]: point["median"] for point in found["points"]}
    for length in lengths:
        if length not in medians:
            raise KvxferError(f"eval.vllm={path} has no {length} tokens (eval.lengths), only {sorted(medians)}")
        floor = floor_seconds(geometry, length, max(peak, found["peak_flops"]))
        require_above_floor(medians[length], floor, length, f"eval.vllm={path}")
    return {length: medians[length] for length in lengths}
