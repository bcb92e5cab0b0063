"""Small calibrations: their settings, and models that answer rows they have read before from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.experiment.loggers import LoggerSpec
from kvxfer.experiment.settings import CalibrateSettings
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV, LayerTensors
from kvxfer.models.spec import PairSpec
from kvxfer.moments.spec import CALIBRATION_SPLITS, CalibrationSpec
from kvxfer.text.spec import CorpusSpec, RowCounts

ROWS = RowCounts(fit=10, validation=5, held_out=3, evaluation=1)
LENGTH = 64
SPLIT_FILES = [f"{split}.safetensors" for split in CALIBRATION_SPLITS]


def make_settings(
    pair: PairSpec,
    outputs: Path,
    corpus: dict[str, Any] | None = None,
    calibration: dict[str, Any] | None = None,
    force: bool = False,
) -> CalibrateSettings:
    """Settings of a pass over a few rows of the toy world: batches of 4, a checkpoint after every one."""
    rows = CorpusSpec(**{"name": "toy", "kind": "toy", "length": LENGTH, "rows": ROWS, **(corpus or {})})
    spec = CalibrationSpec(**{"batch_size": 4, "checkpoint_minutes": 0.0, **(calibration or {})})
    return CalibrateSettings(pair, rows, spec, LoggerSpec(wandb="disabled"), outputs, force, verify=False)


def remember_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make every model read a batch once only; the list that comes back grows by the rows of each call."""
    known: dict[tuple[int, bytes, bool], KV] = {}
    calls: list[int] = []
    prefill = LoadedModel.prefill

    def remembered(self: LoadedModel, ids: torch.Tensor, past: KV | None = None, hidden: bool = False) -> KV:
        key = (id(self), ids.numpy().tobytes(), hidden)
        if key not in known:
            known[key] = prefill(self, ids, past, hidden)
        calls.append(len(ids))
        return known[key]

    with_queries: dict[tuple[int, bytes], tuple[KV, LayerTensors]] = {}
    queries = LoadedModel.queries

    def remembered_queries(self: LoadedModel, ids: torch.Tensor) -> tuple[KV, LayerTensors]:
        key = (id(self), ids.numpy().tobytes())
        if key not in with_queries:
            with_queries[key] = queries(self, ids)
        calls.append(len(ids))
        return with_queries[key]

    monkeypatch.setattr(LoadedModel, "prefill", remembered)
    monkeypatch.setattr(LoadedModel, "queries", remembered_queries)
    return calls


def spoil_prefills(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, row: torch.Tensor, value: float) -> None:
    """Put a value that is not finite into the cache of one model wherever it reads one row."""
    prefill, queries = LoadedModel.prefill, LoadedModel.queries

    def spoil(self: LoadedModel, ids: torch.Tensor, kv: KV) -> KV:
        kv = kv.apply(torch.clone)
        if self is model:
            for index in range(len(ids)):
                if torch.equal(ids[index], row):
                    kv.values[-1][index, 1, 30, 5] = value
        return kv

    def spoiled(self: LoadedModel, ids: torch.Tensor, past: KV | None = None, hidden: bool = False) -> KV:
        return spoil(self, ids, prefill(self, ids, past, hidden))

    def spoiled_queries(self: LoadedModel, ids: torch.Tensor) -> tuple[KV, LayerTensors]:
        kv, found = queries(self, ids)
        return spoil(self, ids, kv), found

    monkeypatch.setattr(LoadedModel, "prefill", spoiled)
    monkeypatch.setattr(LoadedModel, "queries", spoiled_queries)
