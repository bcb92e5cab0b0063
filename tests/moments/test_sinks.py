"""Outlier norms are found by position and by token."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.experiment.stages import calibrate as stage
from kvxfer.experiment.stages.calibrate import REPORT, calibrate
from kvxfer.files import read_json
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments.sinks import SinkCounter
from tests.calibrations import make_settings


class Words:
    """Stands for a tokenizer."""

    def decode(self, ids: list[int]) -> str:
        """The word of an id."""
        return f"word{ids[0]}"


def rows_with(position: int | None = None, token: int | None = None, factor: float = 10.0) -> tuple[KV, Any]:
    """Random rows in which one position, or every place of one token, has another norm in one layer."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 8, (6, 40), generator=generator)
    keys, values = ([torch.randn(6, 2, 40, 16, generator=generator) for _ in range(3)] for _ in range(2))
    if position is not None:
        keys[1][:, :, position] *= factor
    if token is not None:
        values[2] = values[2] * torch.where(ids == token, factor, 1.0)[:, None, :, None]
    return KV(keys, values), ids


def report_of(kv: KV, ids: Any) -> dict[str, Any]:
    """The report of one batch."""
    counter = SinkCounter(8)
    counter.update(kv, ids)
    return counter.report(Words())


def test_rows_without_outliers_report_none() -> None:
    report = report_of(*rows_with())
    assert report["positions"] == report["tokens"] == []
    assert "3 times" in report["rule"]


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("position", [0, 17])
def test_a_planted_position_is_reported(position: int, factor: float) -> None:
    """Whether its norm is too large or too small."""
    found = report_of(*rows_with(position=position, factor=factor))["positions"]
    assert [p["position"] for p in found] == [position]
    assert found[0]["share"] == 1.0
    assert 5 < found[0]["largest_ratio"] < 30


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_planted_token_is_reported(factor: float) -> None:
    found = report_of(*rows_with(token=5, factor=factor))["tokens"]
    assert found == [{"token": "word5", "id": 5, "share": 1.0}]


def test_the_first_position_marks_no_token() -> None:
    kv, ids = rows_with(position=0)
    ids[:, 0], ids[:, 1:] = 7, ids[:, 1:] % 7
    report = report_of(kv, ids)
    assert [p["position"] for p in report["positions"]] == [0]
    assert report["tokens"] == []


def test_batches_add_up_and_a_state_comes_back() -> None:
    kv, ids = rows_with(position=3, token=2)
    whole, parts, restored = SinkCounter(8), SinkCounter(8), SinkCounter(8)
    whole.update(kv, ids)
    for rows in (slice(0, 4), slice(4, 4), slice(4, 6)):
        parts.update(kv.rows(rows), ids[rows])
    vars(restored).update(vars(parts))
    assert whole.report(Words()) == parts.report(Words()) == restored.report(Words())


def test_an_outlier_that_enters_the_moments_is_said(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, queries = LoadedModel.prefill, LoadedModel.queries

    def planted_with_queries(self: LoadedModel, ids: torch.Tensor) -> tuple[KV, list[torch.Tensor]]:
        return self.prefill(ids), queries(self, ids)[1]

    def planted(self: LoadedModel, ids: torch.Tensor, past: KV | None = None, hidden: bool = False) -> KV:
        kv = prefill(self, ids, past, hidden).apply(torch.clone)
        if self is tiny_pair.target:
            kv.keys[1][:, :, 2] *= 50
        return kv

    monkeypatch.setattr(stage, "load_pair", lambda spec: tiny_pair)
    monkeypatch.setattr(LoadedModel, "prefill", planted)
    monkeypatch.setattr(LoadedModel, "queries", planted_with_queries)
    monkeypatch.setattr(stage, "try_row", lambda *_: None)  # a model does not go on from a cache with a plant as it did
    with caplog.at_level(logging.INFO, "kvxfer"):
        path = calibrate(make_settings(tiny_pair.spec, tmp_path, {"skip_first": 1}))
    sinks = read_json(path / REPORT)["sinks"]
    assert 2 in [p["position"] for p in sinks["target"]["positions"]]
    assert 2 not in [p["position"] for p in sinks["source"]["positions"]]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("of the target is an outlier" in text and "corpus.skip_first=" in text for text in warnings)
