"""The state of a calibration pass on disk: killed at any moment, it goes on from the last checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvxfer.geometry import Geometry
from kvxfer.metrics import QueryMoments
from kvxfer.moments import Layout, Moments
from kvxfer.runs import read_json, write_json
from kvxfer.sinks import SinkCounter

_POINTER = "checkpoint.json"


@dataclass
class PassState:
    """How far a pass has come. Finished splits lie in ``work`` as moments files; ``split`` is None at the end."""

    work: Path
    layout: Layout
    home: str | torch.device
    moments: Moments
    sinks: dict[str, SinkCounter]
    queries: QueryMoments
    split: str | None = "fit"
    next_row: int = 0
    tokens_read: int = 0
    bad_rows: list[list[Any]] = field(default_factory=list)
    number: int = 0

    @staticmethod
    def resume(work: Path, layout: Layout, home: str | torch.device, target: Geometry) -> PassState:
        """The last saved state, or a fresh one."""
        sinks = {which: SinkCounter(target.vocabulary) for which in ("source", "target")}
        queries = QueryMoments(target.layers, target.kv_heads, target.head_dim)
        state = PassState(work, layout, home, Moments(layout, home), sinks, queries)
        if not (work / _POINTER).exists():
            return state
        saved = read_json(work / _POINTER)
        for name in ("split", "next_row", "tokens_read", "bad_rows", "number"):
            setattr(state, name, saved[name])
        folder = work / f"checkpoint-{state.number}"
        for which, counter in sinks.items():
            counter.restore(load_file(folder / f"sinks.{which}.safetensors"))
        queries.restore(load_file(folder / "queries.safetensors"))
        if state.next_row:
            state.moments = Moments.load(folder / "moments.safetensors", home)
        return state

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
        names = ("split", "next_row", "tokens_read", "bad_rows", "number")
        write_json(self.work / _POINTER, {name: getattr(self, name) for name in names})
        shutil.rmtree(self.work / f"checkpoint-{old}", ignore_errors=True)

    def finish_split(self, splits: Sequence[str]) -> None:
        """Store the split's moments and begin the next one."""
        assert self.split is not None
        self.moments.save(self.work / f"{self.split}.safetensors")
        following = splits.index(self.split) + 1
        self.split = splits[following] if following < len(splits) else None
        self.next_row = 0
        self.moments = Moments(self.layout, self.home)
        self.save()

    def clear(self) -> None:
        """Remove checkpoints: the result is complete without them."""
        (self.work / _POINTER).unlink(missing_ok=True)
        for folder in self.work.glob("checkpoint-*"):
            shutil.rmtree(folder)
