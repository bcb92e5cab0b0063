"""How the calibration pass is made, as settings (``kvxfer.text.spec`` says what a field's metadata may)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import DESIGNS, Features

CALIBRATION_SPLITS = ("fit", "validation", "held_out")
SELECTION_SPLITS = ("fit", "validation")
"""Splits whose first rows choose the source layers that are kept."""

WEIGHTED_SPLITS = ("fit", "validation")
"""Splits whose tokens are weighed; the held-out split reports plain numbers."""

WEIGHTS = ("none", "attention")


def _read_with(key: str, other: str, off: Any) -> dict[str, Any]:
    """Of a field that is read unless another one is off."""
    return {"id": lambda spec: None if getattr(spec, other) == off else getattr(spec, key)}


@dataclass(frozen=True)
class CalibrationSpec:
    """How a pass is made.

    Args:
        features: the richest design that a map fitted from these moments may use.
        layers: candidate source layers, or None for all.
        stride: every how many tokens one is kept.
        batch_size: rows per forward pass.
        metrics: keep the queries' moments, for penalties, ranks and criteria that weigh errors by attention.
        probe_rows: validation rows whose content, queries and attention are kept beside the moments (0: none).
        probe_tokens: how much of each probe row is kept.
        keep_layers: how many source layers each target layer may read, chosen by a small first pass; None: all.
        selection_rows: rows of the fit split (and at most as many of the validation split) that the first pass reads.
        weights: ``attention`` also keeps moments per target layer whose tokens are weighed by its attention; ``none``.
        weight_clip: the largest weight of a token, in medians of its row.
        max_bad_rows: share of rows with a non-finite value above which the pass fails.
        checkpoint_minutes: how often the state is saved (0: after every batch).
    """

    features: Features = field(default=DESIGNS["same"], metadata={"given": "auto"})
    layers: tuple[int, ...] | None = None
    stride: int = 1
    batch_size: int = 8
    metrics: bool = True
    probe_rows: int = field(default=0, metadata={"given": "auto"})
    probe_tokens: int = field(default=256, metadata=_read_with("probe_tokens", "probe_rows", 0))
    keep_layers: int | None = None
    selection_rows: int = field(default=64, metadata=_read_with("selection_rows", "keep_layers", None))
    weights: str = field(default="none", metadata={"given": "auto"})
    weight_clip: float = field(default=10.0, metadata=_read_with("weight_clip", "weights", "none"))
    max_bad_rows: float = 0.01
    checkpoint_minutes: float = field(default=5.0, metadata={"id": False})

    def __post_init__(self) -> None:
        least = {"stride": 1, "batch_size": 1, "probe_rows": 0, "probe_tokens": 1, "keep_layers": 1}
        for key, minimum in (least | {"selection_rows": 1}).items():
            if getattr(self, key) is not None and getattr(self, key) < minimum:
                raise KvxferError(f"calibration.{key}={getattr(self, key)} must be {minimum} or more")
        if self.weights not in WEIGHTS:
            raise KvxferError(f"calibration.weights={self.weights!r} is none of auto, {', '.join(WEIGHTS)}")
        if not 1 <= self.weight_clip < math.inf:
            raise KvxferError(
                f"calibration.weight_clip={self.weight_clip} must be 1 or more (finite) medians of a row's weights"
            )
        if not 0 <= self.max_bad_rows <= 1:
            raise KvxferError(f"calibration.max_bad_rows={self.max_bad_rows} must be a share between 0 and 1")
        if not self.checkpoint_minutes >= 0:
            raise KvxferError(f"calibration.checkpoint_minutes={self.checkpoint_minutes} must be 0 or more")

    @property
    def overrides(self) -> str:
        """What a solver decides of a pass where it is left to it, as calibrate.py can be told."""
        return f"calibration.features={self.features.name} calibration.weights={self.weights} " + (
            f"calibration.probe_rows={self.probe_rows}"
        )

    @property
    def weighing(self) -> dict[str, Any] | None:
        """What tokens are weighed by, for manifests; None if they are not."""
        return None if self.weights == "none" else {"by": self.weights, "clip": self.weight_clip}

    def weighs(self, split: str) -> bool:
        """Whether a split's tokens are weighed too."""
        return self.weights != "none" and split in WEIGHTED_SPLITS

    def source_layers(self, available: int) -> list[int]:
        """The candidate source layers, checked against the source's depth."""
        if self.layers is None:
            return list(range(available))
        bad = [layer for layer in self.layers if not 0 <= layer < available]
        if bad or not self.layers:
            raise KvxferError(f"calibration.layers={list(self.layers)}: the source has layers 0 to {available - 1}")
        return sorted(set(self.layers))
