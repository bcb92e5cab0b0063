"""Trainings of a tiny pair on rows of made-up tokens, so that they take a moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvxfer.experiment.loggers import RunLogger
from kvxfer.fitting.trained.loop import TrainedMap, TrainingRows, fit_network
from kvxfer.fitting.trained.specs import Corrected, Trained, TrainerSpec
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS
from kvxfer.models.pair import Pair
from kvxfer.text.corpus import Rows
from tests.random_maps import random_map

TRAINER = TrainerSpec(
    max_steps=6, batch_size=2, lr=1e-2, warmup_steps=2, validate_every=2, patience=None, seed=3, cache_gib=0.1
)
SPEC = Corrected("corrected", attention=0.0, kl=1.0)
"""It lowers the KL of validation rows."""
EXACT = 2


class Told(RunLogger):
    """A run's logger that remembers what it is told."""

    def __init__(self) -> None:
        self.numbers: list[dict[str, Any]] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.figures: dict[str, Path] = {}
        self.artifacts: dict[str, tuple[str, list[Path]]] = {}

    def metrics(self, values: dict[str, Any], axis: str | None = None) -> None:
        self.numbers.append(values)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables[name] = [dict(zip(columns, row, strict=True)) for row in rows]

    def figure(self, name: str, path: str | Path) -> None:
        self.figures[name] = Path(path)

    def artifact(self, name: str, type: str, paths: Sequence[str | Path], metadata: dict[str, Any]) -> None:
        self.artifacts[name] = type, [Path(path) for path in paths]

    def finish(self, status: str) -> None: ...


def make_rows(count: int, first: int, length: int = 20) -> Rows:
    """Rows of one document each, numbered from ``first`` on."""
    generator = torch.Generator().manual_seed(first)
    tokens = torch.randint(5, 60, (count, length), generator=generator)
    return Rows(tokens, [(f"{first + n}",) for n in range(count)], "made up")


def training_rows(training: int = 5) -> TrainingRows:
    """A few rows of every split."""
    return TrainingRows(make_rows(training, 0), make_rows(3, 100), make_rows(1, 200))


def base_map(pair: Pair) -> CacheMap:
    """A poor map, which much can be gained on."""
    return replace(random_map(pair, DESIGNS["same"]), manifest={"pair": pair.describe()})


def fit(pair: Pair, work: Path, spec: Trained = SPEC, out: Any = None, **settings: Any) -> TrainedMap:
    """A training of the poor map, with other trainer settings if wanted."""
    rows = settings.pop("rows", None) or training_rows()
    return fit_network(
        pair, base_map(pair), spec, replace(TRAINER, **settings), rows, EXACT, work, Told() if out is None else out
    )


def same(one: TrainedMap, other: TrainedMap) -> bool:
    """Whether two trainings gave the same map, bit for bit."""
    return _tensors(one).keys() == _tensors(other).keys() and all(
        torch.equal(tensor, _tensors(other)[name]) for name, tensor in _tensors(one).items()
    )


def _tensors(trained: TrainedMap) -> dict[Any, torch.Tensor]:
    found = {}
    for output, layer in trained.layers.items():
        found |= {(output, name): getattr(layer, name) for name in ("weight", "bias", "right")}
    for n, trunk in enumerate(trained.trunks):
        found |= trunk.tensors(n)
    return {name: tensor for name, tensor in found.items() if tensor is not None}
