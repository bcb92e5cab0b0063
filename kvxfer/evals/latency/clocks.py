"""Clocks, and what the machine can do at most: a time means something only beside both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from kvxfer.maps.products import ways

_MATRICES = {"cpu": (1024, 2048)}
_COPIED = {"cpu": 2**27}
_TRIES, _ENOUGH = 8, 0.3


def synchronise(device: torch.device) -> None:
    """Wait until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass
class Stopwatch:
    """Seconds of consecutive steps; each ends only when the device has finished it."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def start(self) -> None:
        """Begin the next step now."""
        synchronise(self.device)
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a step, add its seconds to those of its name, and begin the next."""
        synchronise(self.device)
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def of(self, function: Callable[[], object]) -> float:
        """Seconds of one call."""
        self.start()
        function()
        synchronise(self.device)
        return time.perf_counter() - self._last


@torch.inference_mode()
def peak_flops(device: torch.device, dtype: torch.dtype, sizes: Sequence[int] = ()) -> float:
    """FLOP/s of the best of several large square matrix products: what a product can hope for here, now.

    Args:
        sizes: rows and columns; of the product of each size every way that torch has is tried.
    """
    found = []
    for n in sizes or _MATRICES.get(device.type, (8192,)):
        a, b = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
        tried: list[Callable[[], object]] = [partial(torch.mm, a, b)]
        tried += [partial(way, a, b, b[0], None) for way in ways(device, dtype).values()]
        found += [2 * n**3 / _least(device, each) for each in tried]
    return max(found)


@torch.inference_mode()
def peak_bandwidth(device: torch.device) -> float:
    """Bytes/s, read and written, of the best of several large copies in the device's memory."""
    size = _COPIED.get(device.type, 2**30)
    origin = torch.ones(size, device=device, dtype=torch.uint8)
    copy = torch.empty_like(origin)
    return 2 * size / _least(device, lambda: copy.copy_(origin))


def _least(device: torch.device, function: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, of which the first counts only where calls are slow."""
    watch = Stopwatch(device)
    found: list[float] = []
    while len(found) < 2 or (len(found) < _TRIES and sum(found) < _ENOUGH):
        found.append(watch.of(function))
    return min(found)


def forget_file(path: Path) -> None:
    """Let the system drop a file from its memory where it can be asked to, so that the next reading is from disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
