"""What a calibration pass will take, said before it starts."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from kvxfer.calibration import CalibrationSpec, kept_positions, layout_for
from kvxfer.errors import KvxferError
from kvxfer.pairs import Pair
from kvxfer.probing import probe_bytes

_DEVICE_SHARE = 0.6
"""Of the free device memory, what the accumulators may take; the rest is for activations."""


@dataclass(frozen=True)
class PassPlan:
    """Bytes, rows and time of a pass; ``home`` is where the accumulators live."""

    rows: dict[str, int]
    length: int
    kept_tokens: int
    moment_bytes: int
    working_bytes: int
    probe_bytes: int
    home: str
    seconds: float

    def lines(self) -> list[str]:
        """For people."""
        total = sum(self.rows.values())
        rows = ", ".join(f"{count} {split}" for split, count in self.rows.items())
        lines = [
            f"rows: {total} of {self.length} tokens ({rows}); {self.kept_tokens:,} tokens kept",
            f"memory: moments {_size(self.moment_bytes)} a split on {self.home}, working set "
            f"{_size(self.working_bytes)}, on disk {_size(3 * self.moment_bytes)}",
            f"time: about {_duration(self.seconds)}",
        ]
        if self.probe_bytes:
            lines.insert(2, f"probe: {_size(self.probe_bytes)} on disk")
        return lines


def plan_pass(pair: Pair, spec: CalibrationSpec, rows: dict[str, int], length: int, skip_first: int) -> PassPlan:
    """Plan a pass over loaded models.

    Raises:
        KvxferError: nothing is kept, or the moments fit neither the device nor the host.
    """
    kept = len(kept_positions(length, skip_first, spec.stride))
    layout = layout_for(pair, spec)
    if not kept or not min(rows.values()):
        raise KvxferError("no token is kept: lower corpus.skip_first or calibration.stride, or raise corpus.rows")
    probe = 0
    if spec.probe_rows:
        if spec.probe_tokens <= skip_first:
            raise KvxferError(
                f"calibration.probe_tokens={spec.probe_tokens} must be more than corpus.skip_first={skip_first}, the "
                "first tokens that no score counts"
            )
        probe = probe_bytes(pair, layout, min(spec.probe_rows, rows["validation"]), min(spec.probe_tokens, length))
    in_batch = spec.batch_size * kept
    working = 8 * 3 * in_batch * (layout.starts[-1] + len(layout.outputs) * layout.width)
    home = _home(pair, layout.bytes, working)
    tokens = sum(rows.values()) * length
    forward = sum(m.geometry.prefill_flops(length) for m in (pair.source, pair.target)) * tokens
    products = layout.flops_per_token * kept * sum(rows.values())
    device = pair.source.device
    seconds = forward / _speed(device, pair.source.dtype) + products / _speed(device, torch.float64)
    return PassPlan(rows, length, kept * sum(rows.values()), layout.bytes, working, probe, home, seconds)


def _home(pair: Pair, moments: int, working: int) -> str:
    """The device if the accumulators fit beside the work, else the host, else an error with the number."""
    if pair.source.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(pair.source.device)
        if moments + working < _DEVICE_SHARE * free:
            return str(pair.source.device)
    available = _available_bytes()
    needed = moments + (working if pair.source.device.type != "cuda" else 0)
    if needed > available:
        raise KvxferError(
            f"the moments need {_size(needed)} and {_size(available)} are free: keep fewer candidate source layers "
            "(calibration.layers=[0,2,4,...]), a leaner design (calibration.features=same) or a smaller "
            "calibration.batch_size"
        )
    return "cpu"


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # no /proc: not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a small matrix product there: a rough guide, enough for "about"."""
    if device.type == "mps" and dtype == torch.float64:
        device = torch.device("cpu")
    size = 512 if device.type == "cpu" else 2048
    a = torch.ones(size, size, dtype=dtype, device=device)
    a @ a
    started, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < 0.05:
        float((a @ a)[0, 0])
        count += 1
    return 2 * size**3 * count / elapsed


def _size(number: int) -> str:
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
