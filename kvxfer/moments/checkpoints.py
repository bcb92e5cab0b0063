"""The state of a calibration pass on disk: killed at any moment, it goes on from the last checkpoint."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.files import file_sha256, read_sealed, write_sealed
from kvxfer.models.geometry import Geometry
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.query_metric import QueryMoments
from kvxfer.moments.random_file import RANDOM_FILE
from kvxfer.moments.sinks import SinkCounter
from kvxfer.moments.spec import WEIGHTED_SPLITS

log = logging.getLogger("kvxfer")

_POINTER, _WEIGHTED, _DAMAGED = "checkpoint.json", "weighted.{}.safetensors", "damaged"


def weighted_file(split: str, layer: int) -> str:
    return f"weighted.{split}.{layer}.safetensors"


_SAVED = ("split", "next_row", "tokens_read", "bad_rows", "number")


class PassState:
    """How far a pass has come: as far as the last checkpoint in ``work``, or nowhere yet.

    Finished splits lie in ``work`` as moments files; ``split`` is None at the end. ``weighted`` holds the current
    split's moments of each target layer whose tokens are weighed, if any are. ``seconds`` are those of earlier
    processes, up to the checkpoint that this one goes on from; ``dtype`` that of finished splits' products.
    """

    def __init__(
        self,
        work: Path,
        layout: Layout,
        home: str | torch.device,
        target: Geometry,
        weighing: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.work, self.layout, self.home, self.weighing, self.dtype = work, layout, home, weighing, dtype
        self.sinks = {which: SinkCounter(target.vocabulary) for which in ("source", "target")}
        self.queries = QueryMoments(target.layers, target.kv_heads, target.head_dim)
        self.moments = Moments(layout, home)
        self.split: str | None = "fit"
        self.next_row = self.tokens_read = self.number = 0
        self.bad_rows: list[list[Any]] = []
        self.seconds, self.started = 0.0, time.monotonic()
        self._files: dict[str, str] = {}
        if (work / _POINTER).exists():
            try:
                known = self._known()
            except KvxferError as error:
                self._set_aside(error)
            else:
                self._go_on(known)
                return
        self.weighted = self._fresh_weighted()

    def _known(self) -> dict[str, Any]:
        """What the last checkpoint says, whose files, and those of finished splits, are as they were written."""
        known: dict[str, Any] = read_sealed(self.work / _POINTER)
        for name, digest in known["files"].items():
            file = self.work / name
            if not file.is_file() or file_sha256(file) != digest:
                raise KvxferError(f"{file} is missing, or is not as it was written")
        return known

    def _go_on(self, known: dict[str, Any]) -> None:
        # The next checkpoint has files of its own.
        self._files = {name: digest for name, digest in known.pop("files").items() if "/" not in name}
        vars(self).update(known)
        for name, part in self._counters().items():
            vars(part).update(load_file(self._folder / f"{name}.safetensors"))
        self.weighted = self._fresh_weighted()
        if self.next_row:
            self.moments = Moments.load(self._folder / "moments.safetensors", self.home)
            self.weighted = {n: Moments.load(self._folder / _WEIGHTED.format(n), self.home) for n in self.weighted}

    def _set_aside(self, error: KvxferError) -> None:
        """A pass that can't go on begins anew; what is left of it stays beside it until it has ended."""
        aside = self.work / _DAMAGED
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for path in [self.work / _POINTER, *self.work.glob("checkpoint-*"), *self.work.glob("*.safetensors")]:
            path.rename(aside / path.name)
        log.warning("%s: the checkpoint is set aside as %s, and the pass begins anew", error, aside)

    @property
    def _folder(self) -> Path:
        return self.work / f"checkpoint-{self.number}"

    def _counters(self) -> dict[str, SinkCounter | QueryMoments]:
        return {**{f"sinks.{which}": counter for which, counter in self.sinks.items()}, "queries": self.queries}

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
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        for name, part in self._counters().items():
            save_file(vars(part), self._folder / f"{name}.safetensors")
        if self.next_row:
            self.moments.save(self._folder / "moments.safetensors")
            for layer, moments in self.weighted.items():
                moments.save(self._folder / _WEIGHTED.format(layer))
        seconds = self.seconds + time.monotonic() - self.started
        if (random := self.work / RANDOM_FILE).is_file() and RANDOM_FILE not in self._files:
            self._files[RANDOM_FILE] = file_sha256(random)
        own = {f"{self._folder.name}/{path.name}": file_sha256(path) for path in sorted(self._folder.iterdir())}
        known = {**{name: getattr(self, name) for name in _SAVED}, "seconds": seconds}
        write_sealed(self.work / _POINTER, {**known, "files": {**self._files, **own}})
        shutil.rmtree(self.work / f"checkpoint-{old}", ignore_errors=True)

    def finish_split(self, splits: Sequence[str]) -> None:
        """Store the split's moments and begin the next one."""
        assert self.split is not None
        parts = {f"{self.split}.safetensors": self.moments}
        parts |= {weighted_file(self.split, layer): moments for layer, moments in self.weighted.items()}
        for name, moments in parts.items():
            moments.finish(self.work / name, self.dtype)
            self._files[name] = file_sha256(self.work / name)
        following = splits.index(self.split) + 1
        self.split = splits[following] if following < len(splits) else None
        self.next_row = 0
        self.moments, self.weighted = Moments(self.layout, self.home), self._fresh_weighted()
        self.save()

    @property
    def scaffold(self) -> list[Path]:
        """What the result is complete without: checkpoints, whole and damaged."""
        return [self.work / _POINTER, *self.work.glob("checkpoint-*"), self.work / _DAMAGED]
