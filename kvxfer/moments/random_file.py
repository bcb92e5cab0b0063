"""The random features that a calibration keeps beside its moments: drawn once, the same in every share."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import RANDOM
from kvxfer.maps.random_features import RandomFeatures
from kvxfer.moments.layout import Layout
from kvxfer.moments.tensors import AGAIN, read_tensors

log = logging.getLogger("kvxfer")

RANDOM_FILE = "random.safetensors"


def draw_random(layout: Layout) -> RandomFeatures | None:
    """The random features of a layout, or None if it keeps none: a function of its layers and widths."""
    return RandomFeatures.draw(layout.source_layers, layout.width, _widths(layout))


def keep_random(layout: Layout, path: Path) -> RandomFeatures | None:
    """The random features of a pass: those of its file, or (the first time, and where it is damaged) drawn anew."""
    if path.is_file():
        try:
            return load_random(layout, path)
        except KvxferError as error:
            log.warning("%s: they are drawn again", error)
    drawn = draw_random(layout)
    if drawn is not None:
        # A pass that is killed while it writes must not find half of it.
        temporary = path.with_name(f".{path.name}.tmp")
        save_file(drawn.tensors(), temporary)
        temporary.replace(path)
    return drawn


def load_random(layout: Layout, path: Path) -> RandomFeatures | None:
    """The random features that a calibration of this layout was made with; None if the layout keeps none.

    Raises:
        KvxferError: the file is missing, unreadable, or another layout's.
    """
    widths = _widths(layout)
    if not widths:
        return None
    tensors = _read(path)
    try:
        found = RandomFeatures.of(tensors, layout.source_layers, layout.width)
    except (ValueError, TypeError):
        found = None
    if found is None or found.widths != widths:
        raise KvxferError(f"{path} holds other random features than the moments beside it: {AGAIN}")
    return found


def merge_random(shares: list[Path], path: Path) -> None:
    """Copy the random features of the first share, once those of the others were found to be the same.

    Raises:
        KvxferError: a share has none, or others, as another version of torch may have drawn them.
    """
    first = _read(shares[0])
    for share in shares[1:]:
        other = _read(share)
        if set(other) != set(first) or not all(torch.equal(other[name], first[name]) for name in first):
            raise KvxferError(
                f"{share} is not the same as {shares[0]}: run all shares again with one version of torch and force=true"
            )
    save_file(first, path)


def _widths(layout: Layout) -> dict[str, int]:
    """Features of each random kind that a layout keeps."""
    return {block.kind: n for block, n in zip(layout.blocks, layout.widths, strict=True) if block.kind in RANDOM}


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise KvxferError(f"{path} is missing, and without it no map can compute its random features: {AGAIN}")
    return read_tensors(path)
