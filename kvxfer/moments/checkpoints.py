"""The state of a calibration pass on disk: killed at any moment, it goes on from the last checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.files import read_json, write_json
from kvxfer.models.geometry import Geometry
from kvxfer.moments.moments import Layout, Moments
from kvxfer.moments.query_metric import QueryMoments
from kvxfer.moments.sinks import SinkCounter
from kvxfer.moments.spec import WEIGHTED_SPLITS

_POINTER = "checkpoint.json"


def weighted_file(split: str, layer: int) -> str:
    """The file of a target layer's weighted moments."""
    return f"weighted.{split}.{layer}.safetensors"


@dataclass
class PassState:
    """How far a pass has come. Finished splits lie in ``work`` as moments files; ``split`` is None at the end.

    ``weighted`` holds the current split's moments of each target layer whose tokens are weighed, if any are.
    ``seconds`` are those of earlier processes, up to the checkpoint that this one goes on from.
    """

    work: Path
    layout: Layout
    home: str | torch.device
    moments: Moments
    sinks: dict[str, SinkCounter]
    queries: QueryMoments
    weighing: bool = False
    weighted: dict[int, Moments] = field(default_factory=dict)
    split: str | None = "fit"
    next_row: int = 0
    tokens_read: int = 0
    bad_rows: list[list[Any]] = field(default_factory=list)
    number: int = 0
    seconds: float = 0.0
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    @staticmethod
    def resume(
        work: Path, layout: Layout, home: str | torch.device, target: Geometry, weighing: bool = False
    ) -> PassState:
        """The last saved state, or a fresh one."""
        sinks = {which: SinkCounter(target.vocabulary) for which in ("source", "target")}
        queries = QueryMoments(target.layers, target.kv_heads, target.head_dim)
        state = PassState(work, layout, home, Moments(layout, home), sinks, queries, weighing)
        if not (work / _POINTER).exists():
            state.weighted = state._fresh_weighted()
            return state
        saved = read_json(work / _POINTER)
        for name in ("split", "next_row", "tokens_read", "bad_rows", "number"):
            setattr(state, name, saved[name])
        # Checkpoints from before they said it.
        state.seconds = saved.get("seconds", 0.0)
        folder = work / f"checkpoint-{state.number}"
        for which, counter in sinks.items():
            counter.restore(load_file(folder / f"sinks.{which}.safetensors"))
        queries.restore(load_file(folder / "queries.safetensors"))
        state.weighted = state._fresh_weighted()
        if state.next_row:
            state.moments = Moments.load(folder / "moments.safetensors", home)
            state.weighted = {n: Moments.load(folder / f"weighted.{n}.safetensors", home) for n in state.weighted}
        return state

    def _fresh_weighted(self) -> dict[int, Moments]:
        """Empty weighted moments of every target layer, if the current split has any."""
        if not self.weighing or self.split not in WEIGHTED_SPLITS:
            return {}
        layers = sorted({layer for layer, _ in self.layout.outputs})
        return {layer: Moments(self.layout.only(layer), self.home) for layer in layers}

    def update_weighted(
        self,
        x: Float[Tensor, "tokens columns"],
        y: Float[Tensor, "tokens outputs width"],
        weights: Iterable[Float[Tensor, " tokens"]],
    ) -> None:
        """Add tokens to the weighted moments of every target layer, each with its own weights of these tokens."""
        places = {block: i for i, block in enumerate(self.layout.blocks)}
        for moments, own in zip(self.weighted.values(), weights, strict=True):
            columns = self.layout.columns([places[block] for block in moments.layout.blocks])
            outputs = [self.layout.outputs.index(output) for output in moments.layout.outputs]
            moments.update(x[:, columns], y[:, outputs], own)

    def save(self) -> None:
        """Write a new checkpoint, point to it in one step, then drop the one before."""
        old, self.number = self.number, self.number + 1
        folder = self.work / f"checkpoint-{self.number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for which, counter in self.sinks.items():
            save_file(counter.state(), folder / f"sinks.{which}.safetensors")
        save_file(self.queries.state(), folder / "queries.safetensors")
        if self.next_row:
            self.moments.save(folder / "moments.safetensors")
            for layer, moments in self.weighted.items():
                moments.save(folder / f"weighted.{layer}.safetensors")
        names = ("split", "next_row", "tokens_read", "bad_rows", "number")
        seconds = self.seconds + time.monotonic() - self.started
        write_json(self.work / _POINTER, {**{name: getattr(self, name) for name in names}, "seconds": seconds})
        shutil.rmtree(self.work / f"checkpoint-{old}", ignore_errors=True)

    def finish_split(self, splits: Sequence[str]) -> None:
        """Store the split's moments and begin the next one."""
        assert self.split is not None
        self.moments.save(self.work / f"{self.split}.safetensors")
        for layer, moments in self.weighted.items():
            moments.save(self.work / weighted_file(self.split, layer))
        following = splits.index(self.split) + 1
        self.split = splits[following] if following < len(splits) else None
        self.next_row = 0
        self.moments, self.weighted = Moments(self.layout, self.home), self._fresh_weighted()
        self.save()

    def clear(self) -> None:
        """Remove checkpoints: the result is complete without them."""
        (self.work / _POINTER).unlink(missing_ok=True)
        for folder in self.work.glob("checkpoint-*"):
            shutil.rmtree(folder)
