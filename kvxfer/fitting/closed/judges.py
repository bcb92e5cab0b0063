"""What selection and automatic choices maximise: one score per output of some linear map of a design."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.attention import LayerAttention, by_head
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.maps.blocks import Block
from kvxfer.moments.probe import Probe
from kvxfer.moments.query_metric import Metrics

Judge = Callable[
    [HeldOut, Float[Tensor, "features columns"], Float[Tensor, " columns"]],
    Float[Tensor, " outputs"],
]
"""Scores a map of one design, by its weight and bias, on a split: one score per output, 1 is perfect."""


@dataclass(frozen=True)
class AttentionScore:
    """What a map of one kind does to the output of the target's attention on the probe, the other kind being true.

    The target's part of the probe is held in memory once it was read, and the columns of the last design.
    """

    probe: Probe
    _layers: dict[int, LayerAttention] = field(default_factory=dict)
    _designs: dict[tuple[Block, ...], Tensor] = field(default_factory=dict)

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One score per output; the moments are not read."""
        if held.blocks not in self._designs:
            self._designs.clear()
            self._designs[held.blocks] = self.probe.design(held.blocks)
        x = self._designs[held.blocks]
        mapped = (x @ weight.to(x) + bias.to(x)).chunk(len(held.outputs), dim=-1)
        scores = []
        for (layer, kind), columns in zip(held.outputs, mapped, strict=True):
            if layer not in self._layers:
                self._layers[layer] = LayerAttention(self.probe, layer)
            attention = self._layers[layer]
            scores.append(attention.score(**{kind: by_head(columns, attention.keys.shape[1])}))
        return torch.tensor(scores, dtype=torch.float64, device=weight.device)


def judge_for(criterion: str, metrics: Metrics | None, probe: Probe | None) -> Judge:
    """The judge of a criterion; ``query`` needs metrics.

    Raises:
        KvxferError: the calibration did not keep a probe that the criterion reads.
    """
    if criterion == "attention":
        return AttentionScore(required_probe(probe, "solver.criterion=attention"))
    if criterion == "r2":
        return HeldOut.r2
    assert metrics is not None
    return partial(HeldOut.metric_r2, metrics=metrics)


def required_probe(probe: Probe | None, setting: str) -> Probe:
    """The probe, or the error that says which setting reads one."""
    if probe is None:
        raise KvxferError(f"{setting} reads a probe, but the calibration kept none: set calibration.probe_rows=16")
    return probe
