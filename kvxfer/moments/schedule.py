"""What a calibration pass will take, said before it starts."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence

import torch

from kvxfer.errors import KvxferError
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import layout_for, products_dtype
from kvxfer.moments.layout import Layout
from kvxfer.moments.probe_pass import probe_bytes
from kvxfer.moments.spec import CALIBRATION_SPLITS, WEIGHTED_SPLITS, CalibrationSpec

_DEVICE_SHARE = 0.6
"""Of the free device memory, what the accumulators may take; the rest is for activations."""

_MUCH = 2.0
"""How many times slower than in float32 a pass is said to be slow."""


class PassPlan:
    """Bytes, rows and time of a pass over loaded models; ``home`` is where the accumulators live.

    Args:
        kept: the source layers that each target layer keeps, once they are known; until then the plan takes the
            ``calibration.keep_layers`` ones at its relative depth.

    Attributes:
        layout: what is kept of one split.
        weighted_bytes: those of all target layers' weighted moments of one split.
        disk_bytes: what the finished moments of all splits take.
        first: what a first pass over a few rows chooses, if there is one.
        slow: that the models' dtype is slow here, and what is not.

    Raises:
        KvxferError: nothing is kept, or the moments fit neither the device nor the host.
    """

    def __init__(
        self,
        pair: Pair,
        spec: CalibrationSpec,
        rows: dict[str, int],
        length: int,
        skip_first: int,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.rows, self.length = rows, length
        width = (dtype := products_dtype(pair)).itemsize
        tokens = len(spec.kept(length, skip_first))
        self.first = None
        if spec.keep_layers is not None and kept is None:
            kept = neighbours(pair, spec, spec.keep_layers)
            self.first = (
                f"a small one chooses {spec.keep_layers} source layers for each target layer "
                "(calibration.selection_rows), the other reads all rows"
            )
        self.layout = layout = layout_for(pair, spec, kept)
        if not tokens or not min(rows.values()):
            raise KvxferError("no token is kept: lower corpus.skip_first or calibration.stride, or raise corpus.rows")
        self.probe_bytes = 0
        if spec.probe_rows:
            if spec.probe_tokens <= skip_first:
                raise KvxferError(
                    f"calibration.probe_tokens={spec.probe_tokens} must be more than corpus.skip_first={skip_first}, "
                    "the first tokens that no score counts"
                )
            probe_rows = min(spec.probe_rows, rows["validation"])
            self.probe_bytes = probe_bytes(pair, layout, probe_rows, min(spec.probe_tokens, length))
        # Columns, and their shifted copies.
        columns = layout.starts[-1] + len(layout.outputs) * layout.width
        self.working_bytes = 2 * width * spec.batch_size * tokens * columns
        if spec.weights != "none":
            # Scores and probabilities of one KV head's queries, float32.
            target = pair.target.geometry
            self.working_bytes += 4 * 2 * spec.batch_size * target.heads // target.kv_heads * length**2
        weighted = _weighted(layout, spec)
        self.weighted_bytes = sum(part.bytes for part in weighted)
        self.disk_bytes = len(CALIBRATION_SPLITS) * layout.stored_bytes(width)
        self.disk_bytes += len(WEIGHTED_SPLITS) * sum(part.stored_bytes(width) for part in weighted)
        self.home = _home(pair, spec, layout.bytes + self.weighted_bytes, self.working_bytes)
        everything = sum(rows.values())
        self.kept_tokens = tokens * everything
        weighed = tokens * sum(count for split, count in rows.items() if spec.weighs(split))
        forward = sum(m.geometry.prefill_flops(length) for m in (pair.source, pair.target)) * everything * length
        products = layout.flops_per_token * self.kept_tokens + sum(p.flops_per_token for p in weighted) * weighed
        device = pair.source.device
        moments = products / _speed(torch.device("cpu") if device.type == "mps" else device, dtype)
        self.seconds = forward / _speed(device, pair.source.dtype) + moments
        self.slow = _slow_dtype(pair, self.seconds, forward / _speed(device, torch.float32) + moments)

    def lines(self) -> list[str]:
        total = sum(self.rows.values())
        rows = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        weighted = f" and {size(self.weighted_bytes)} weighted" if self.weighted_bytes else ""
        return [
            *([f"two passes: {self.first}"] if self.first else []),
            f"rows: {total} of {self.length} tokens ({rows}); {self.kept_tokens:,} tokens kept",
            f"memory: moments {'about ' if self.first else ''}{size(self.layout.bytes)}{weighted} a split on "
            f"{self.home}, working set {size(self.working_bytes)}, on disk {size(self.disk_bytes)}",
            *([f"probe: {size(self.probe_bytes)} on disk"] if self.probe_bytes else []),
            f"time: about {_duration(self.seconds)}",
            *([self.slow] if self.slow else []),
        ]


def _slow_dtype(pair: Pair, seconds: float, in_float32: float) -> str | None:
    """A hint where a CPU has no instructions for the models' dtype, which then may take many times as long."""
    dtype = pair.source.dtype
    if pair.source.device.type != "cpu" or dtype == torch.float32 or seconds < _MUCH * in_float32:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"{name} is slow on this CPU: pair.dtype=float32 would take about {_duration(in_float32)}"


def neighbours(pair: Pair, spec: CalibrationSpec, count: int) -> list[list[int]]:
    """For every target layer the ``count`` candidates nearest to its relative depth: a guess, for planning.

    Raises:
        KvxferError: there are fewer candidates.
    """
    candidates = spec.source_layers(pair.source.geometry.layers)
    if count > len(candidates):
        raise KvxferError(
            f"calibration.keep_layers={count} must be from 1 to {len(candidates)}, the candidate source layers"
        )
    deepest = max(pair.target.geometry.layers - 1, 1)
    places = [layer / deepest * (len(candidates) - 1) for layer in range(pair.target.geometry.layers)]
    return [[candidates[i] for i in nearest(place, count, len(candidates))] for place in places]


def nearest(depth: float, k: int, layers: int) -> list[int]:
    """The k layers nearest to a depth, ascending."""
    return sorted(sorted(range(layers), key=lambda layer: abs(layer - depth))[:k])


def first_pass(pair: Pair, one_layer: int) -> tuple[str, int]:
    """Where the accumulators of a first pass live, and for how many source layers at once they fit there.

    Args:
        one_layer: bytes of both splits' moments of one source layer.
    """
    device = pair.source.device
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if one_layer < (room := int(_DEVICE_SHARE * free / 2)):
            return str(device), room // one_layer
    return "cpu", max(1, _available_bytes() // 2 // one_layer)


def _weighted(layout: Layout, spec: CalibrationSpec) -> list[Layout]:
    """What the weighted moments of every target layer keep."""
    if spec.weights == "none":
        return []
    return [layout.only(layer) for layer in sorted({layer for layer, _ in layout.outputs})]


def _home(pair: Pair, spec: CalibrationSpec, moments: int, working: int) -> str:
    """The device if the accumulators fit beside the work, else the host, else an error with the number."""
    if pair.source.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(pair.source.device)
        if moments + working < _DEVICE_SHARE * free:
            return str(pair.source.device)
    available = _available_bytes()
    needed = moments + (working if pair.source.device.type != "cuda" else 0)
    if needed > available:
        raise KvxferError(
            f"the moments need {size(needed)} and {size(available)} are free: "
            f"{_fitting(pair, spec, available - (needed - moments))}keep fewer candidate source layers "
            "(calibration.layers=[0,2,4,...]), a leaner design (features=same calibration.features=same) or a smaller "
            "calibration.batch_size"
        )
    return "cpu"


def _fitting(pair: Pair, spec: CalibrationSpec, room: int) -> str:
    """The largest calibration.keep_layers that is likely to fit, for an error; nothing if not even one does."""
    most = spec.keep_layers or len(spec.source_layers(pair.source.geometry.layers))
    for count in range(most - 1, 0, -1):
        layout = layout_for(pair, spec, neighbours(pair, spec, count))
        needed = layout.bytes + sum(part.bytes for part in _weighted(layout, spec))
        if needed <= room:
            return f"set calibration.keep_layers={count}, whose moments need about {size(needed)}, or "
    return ""


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a small matrix product there, by a transposed one as a model's layers do: a rough guide."""
    size = 512 if device.type == "cpu" else 2048
    a = torch.ones(size, size, dtype=dtype, device=device)
    a @ a.mT
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < 0.05:
        float((a @ a.mT)[0, 0])
        count += 1
    return 2 * size**3 * count / elapsed


def size(number: int) -> str:
    """A number of bytes, for people."""
    value = float(number)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
