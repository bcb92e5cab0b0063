"""Reading the safetensors that a calibration keeps."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvxfer.errors import KvxferError

AGAIN = "calibrate again (calibrate.py with force=true)"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, mapped and not read; raises KvxferError where they can't be."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise KvxferError(f"{path} is not readable ({error}): {AGAIN}") from error
