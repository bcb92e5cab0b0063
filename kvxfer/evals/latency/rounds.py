"""Rounds of a handoff under a clock: its steps, and what it is compared with, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvxfer.evals.latency.clocks import Stopwatch
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.models.hf.model import LoadedModel

_SOURCE_STEPS = ("export", "strip")
_FIXED = ("strip", "restore", "exact", "held_back", "first_decode", "source", "target")
"""What has a part that does not grow with depth: angles are computed once, and a model has its embedding and head."""


@dataclass(frozen=True)
class Clocked:
    """Seconds of each round: of every step, of ``source`` (its prefill) and ``target`` (its own, to its first token).

    ``handoff`` are the rounds' sums of steps; ``whole`` the handoff under one clock, without waiting for its steps
    (None where the times are scaled from a slice, which leaves only steps to scale).
    """

    parts: dict[str, list[float]]
    whole: list[float] | None

    @property
    def handoff(self) -> list[float]:
        """Seconds of all steps of each round together."""
        return [float(sum(steps)) for steps in zip(*(self.parts[step] for step in STEPS), strict=True)]


@torch.inference_mode()
def clock(
    transfer: Transfer,
    length: int,
    batch: int,
    repeats: int,
    warmup: int,
    seed: int,
    advance: Callable[[int], None],
) -> Clocked:
    """Time ``repeats`` rounds after ``warmup`` others, on random tokens; a slice's times are scaled to all layers."""
    source, target = transfer.pair.source, transfer.pair.target
    draw = torch.Generator().manual_seed(seed)
    vocabulary = min(source.geometry.vocabulary, target.geometry.vocabulary)
    rounds: list[dict[str, float]] = []
    whole: list[float] = []
    for _ in range(warmup + repeats):
        # New tokens each time: nothing may be remembered.
        prompt = torch.randint(vocabulary, (batch, length), generator=draw).to(target.device)
        watch = Stopwatch(target.device)
        watch.start()
        running = transfer.read(transfer.split(prompt)[0])
        watch.lap("source")
        transfer.first_token(running, prompt, watch.lap)
        target.next_token(target.inject(None), prompt)
        watch.lap("target")
        whole.append(watch.of(lambda: transfer.first_token(running, prompt)))  # noqa: B023
        if _is_slice(source) or _is_slice(target):
            watch.seconds |= _without_layers(transfer, prompt)
        rounds.append(watch.seconds)
        del running
        advance(1)
    parts = {name: [each[name] for each in rounds[warmup:]] for name in rounds[0]}
    if _is_slice(source) or _is_slice(target):
        return Clocked(_scaled(parts, source, target), None)
    return Clocked(parts, whole[warmup:])


def _is_slice(model: LoadedModel) -> bool:
    return model.whole.layers != model.geometry.layers


def _without_layers(transfer: Transfer, prompt: Int[Tensor, "batch prompt"]) -> dict[str, float]:
    """What steps cost whatever the depth, under ``base_`` and the step's name."""
    source, target = transfer.pair.source, transfer.pair.target
    head, tail = transfer.split(prompt)
    watch = Stopwatch(target.device)
    past = target.prefill(head)
    angles = {"strip": source, "restore": target}
    found = {f"base_{step}": watch.of(lambda: model.cos_sin(head.shape[1])) for step, model in angles.items()}  # noqa: B023
    with source.without_layers(), target.without_layers():
        found["base_source"] = watch.of(lambda: source.begin(head, hidden=transfer.mapper.needs_hidden))
        found["base_target"] = watch.of(lambda: target.next_token(target.inject(None), prompt))
        first = min(transfer.plan.exact_first, head.shape[1])
        found["base_exact"] = watch.of(lambda: target.begin(head[:, :first])) if first else 0.0
        running = target.inject(past)
        found["base_held_back"] = 0.0
        if tail.shape[1] > 1:
            found["base_held_back"] = watch.of(lambda: target.extend(running, tail[:, :-1]))
        found["base_first_decode"] = watch.of(lambda: target.next_token(running, tail[:, -1:]))
    return found


def _scaled(parts: dict[str, list[float]], source: LoadedModel, target: LoadedModel) -> dict[str, list[float]]:
    """Times of all layers: what grows with depth times as many as there are more layers, the rest once."""
    more = {
        "source": source.whole.layers / source.geometry.layers,
        "target": target.whole.layers / target.geometry.layers,
    }
    found = {}
    for name in (*STEPS, "source", "target"):
        factor = more["source"] if name in (*_SOURCE_STEPS, "source") else more["target"]
        fixed = 0.0
        if name in _FIXED:
            fixed = float(np.median(parts[f"base_{name}"]))
        found[name] = [min(fixed, each) + (each - min(fixed, each)) * factor for each in parts[name]]
    return found
