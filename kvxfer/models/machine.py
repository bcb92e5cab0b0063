"""On which machine something was timed."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """What decides a time and no config says: the device by name, and the threads that a CPU uses."""
    if device.type == "cuda":
        return {"device": "cuda", "name": torch.cuda.get_device_name(device)}
    return {"device": device.type, "name": _processor(), "threads": torch.get_num_threads()}


def _processor() -> str:
    """The processor's model where the system says it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
