"""What selection and automatic choices maximise: one score per output of some linear map of a design."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.attention import LayerAttention, by_head
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.maps.blocks import Block
from kvxfer.moments.probe import Probe
from kvxfer.moments.query_metric import Metrics


@runtime_checkable
class Judge(Protocol):
    """Scores a map of one design; more is better, 1 is perfect."""

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One score for each of the outputs whose columns lie side by side.

        Args:
            held: the design, its outputs and their moments on the split to score on.
        """
        ...


@dataclass(frozen=True)
class PlainR2:
    """R² of keys and values."""

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output."""
        return held.r2(weight, bias)


@dataclass(frozen=True)
class QueryR2:
    """R² in each output's metric: errors weighed by what the target's attention sees of them."""

    metrics: Metrics

    def __call__(
        self, held: HeldOut, weight: Float[Tensor, "features columns"], bias: Float[Tensor, " columns"]
    ) -> Float[Tensor, " outputs"]:
        """One R² per output."""
        return held.metric_r2(weight, bias, self.metrics)


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
    """The judge of a criterion.

    Raises:
        KvxferError: the calibration did not keep what it reads.
    """
    if criterion == "query":
        if metrics is None:
            raise KvxferError(
                "solver.criterion=query reads metrics, but the calibration kept none: set calibration.metrics=true"
            )
        return QueryR2(metrics)
    return (
        AttentionScore(required_probe(probe, "solver.criterion=attention")) if criterion == "attention" else PlainR2()
    )


def required_probe(probe: Probe | None, setting: str) -> Probe:
    """The probe, or the error that says which setting reads one."""
    if probe is None:
        raise KvxferError(f"{setting} reads a probe, but the calibration kept none: set calibration.probe_rows=16")
    return probe
