"""Metrics: the whole covariance, averaged over distances as a score would see it; kept, merged and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages import calibrate as stage
from kvxfer.experiment.stages.calibrate import calibrate, load_splits
from kvxfer.models.pair import Pair
from kvxfer.moments.query_metric import METRICS, Metric, Metrics, QueryMoments, average_over_distances, distances
from tests.calibrations import make_settings

DIM, HEADS = 8, 2


def random_covariance(seed: int = 0) -> torch.Tensor:
    half = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return half @ half.mT


def rotation(distance: int, dim: int = DIM, theta: float = 100.0) -> torch.Tensor:
    """R(δ) as a plain matrix, half-split: column pairs (i, i + dim/2) turn by δ theta^(-2i/dim)."""
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    half = dim // 2
    for i in range(half):
        angle = torch.tensor(distance * theta ** (-2 * i / dim), dtype=torch.float64)
        matrix[i, i] = matrix[i + half, i + half] = angle.cos()
        matrix[i, i + half], matrix[i + half, i] = -angle.sin(), angle.sin()
    return matrix


def angles(at: list[int], theta: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = theta ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    turned = torch.outer(torch.tensor(at, dtype=torch.float64), torch.cat([inverse, inverse]))
    return turned.cos().float(), turned.sin().float()


def test_the_full_matrix_is_averaged_over_distances() -> None:
    """Brute force with R(δ) spelt out; what lies between two rotary bands does not vanish."""
    covariance, at = random_covariance(), distances(100)
    found = average_over_distances(covariance, *angles(at))
    expected = torch.stack([rotation(d) @ covariance @ rotation(d).T for d in at]).mean(0)
    assert torch.allclose(found, expected, atol=1e-4)
    bands = torch.arange(DIM) % (DIM // 2)
    between = bands[:, None] != bands
    # A thousand times what the comparison above lets pass: an average of the bands alone would fail it.
    assert float(expected[:, between].abs().max()) > 0.1


def test_a_score_s_squared_error_is_what_the_metric_says() -> None:
    """Queries at distance δ, an error in content space: the mean square of the score's change."""
    covariance, at = random_covariance(), [1, 3, 40]
    root = torch.linalg.cholesky(covariance[0])
    queries = torch.randn(200_000, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64) @ root.T
    error = torch.randn(DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    # The query stands δ tokens after the key: its content is turned by δ more.
    squares = torch.stack([((queries @ rotation(d).T) @ error).square().mean() for d in at]).mean()
    found = average_over_distances(covariance, *angles(at))[0]
    assert float(error @ found @ error) == pytest.approx(float(squares), rel=0.02)


def test_distances_are_spread_from_one_to_the_longest() -> None:
    assert distances(1) == [1]
    spread = distances(2047)
    assert (spread[0], spread[-1]) == (1, 2047)
    assert spread == sorted(set(spread))


def test_queries_are_pooled_over_the_heads_that_share() -> None:
    queries = torch.randn(3, 6, 20, DIM, generator=torch.Generator().manual_seed(0)) + 50
    moments = QueryMoments(1, HEADS, DIM)
    for part in queries.split(2):
        moments.update([part.double().transpose(1, 2)])
    for head in range(HEADS):
        rows = queries[:, 3 * head : 3 * head + 3].transpose(0, 1).reshape(-1, DIM).double()
        assert int(moments.count) == len(rows)
        assert torch.allclose(moments.covariance(0)[head], torch.cov(rows.T, correction=0), atol=1e-6)
        assert torch.allclose(moments.second_moment(0)[head], rows.T @ rows / len(rows), rtol=1e-12)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize("singular", [False, True])
def test_a_metric_is_positive_definite_of_mean_one(scale: float, singular: bool) -> None:
    raw = random_covariance() * scale
    if singular:
        raw = raw[..., :1] @ raw[..., :1].mT
    metric = Metric.of(raw)
    values, vectors = metric.eigen
    assert torch.allclose(values.mean(-1), torch.ones(HEADS).double())
    assert float(values.min()) >= 0.05 * (1 - 1e-9)
    assert torch.equal(metric.matrix, metric.matrix.mT)
    root, inverse = metric.roots
    assert torch.allclose(root @ root, metric.matrix, atol=1e-9)
    assert torch.allclose(root @ inverse, torch.eye(DIM).double(), atol=1e-9)
    assert torch.allclose((vectors * values[:, None]) @ vectors.mT, metric.matrix, atol=1e-9)


@pytest.fixture
def settings_of(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stage, "load_pair", lambda spec: tiny_pair)
    return lambda corpus=None, **spec: make_settings(
        tiny_pair.spec, tmp_path / str(bool(corpus)), corpus, {"layers": (0,), "stride": 4, **spec}
    )


def test_calibration_keeps_the_metrics_of_the_fit_rows(tiny_pair: Pair, settings_of: Any) -> None:
    path = calibrate(settings_of())
    metrics = load_splits(path).metrics
    assert metrics is not None
    assert set(metrics.by_output) == {(layer, kind) for layer in range(3) for kind in ("keys", "values")}
    raw = load_file(path / METRICS)
    # Query heads of a KV head are pooled: 10 rows of 15 kept tokens, 3 query heads each.
    assert float(raw["count"]) == 10 * 15 * 3
    projection = tiny_pair.target.body.layers[1].self_attn.o_proj.weight
    for head in range(2):
        own = [projection[:, 32 * q : 32 * q + 32] for q in range(3 * head, 3 * head + 3)]
        gram = sum(part.T @ part for part in own)
        assert torch.allclose(raw["values"][1, head], gram, atol=1e-5)


def test_the_queries_mean_counts_unless_they_are_centred(settings_of: Any) -> None:
    """It changes scores as any other part of a query does; the metric of values knows no queries."""
    path = calibrate(settings_of())
    raw = load_file(path / METRICS)
    for centred in (False, True):
        metrics = load_splits(path, centred).metrics
        assert metrics is not None
        mean = raw["sum"][1] / raw["count"]
        moment = raw["square"][1] / raw["count"] - centred * mean[:, :, None] * mean[:, None]
        expected = Metric.of(average_over_distances(moment, raw["cos"], raw["sin"]))
        assert torch.allclose(metrics.by_output[1, "keys"].matrix, expected.matrix, atol=1e-9)
        assert torch.equal(metrics.by_output[1, "values"].matrix, Metric.of(raw["values"][1]).matrix)
    assert float(mean.square().sum() / raw["square"][1].diagonal(dim1=1, dim2=2).sum() * raw["count"]) > 0.01


def test_without_metrics_none_are_kept(settings_of: Any) -> None:
    path = calibrate(settings_of(metrics=False))
    assert load_splits(path).metrics is None
    with pytest.raises(KvxferError, match=r"metrics\.safetensors is missing.*calibration\.metrics=true"):
        Metrics.load(path / METRICS)


def test_shares_add_up_to_the_whole(settings_of: Any) -> None:
    whole = load_file(calibrate(settings_of()) / METRICS)
    for index in (1, 0):
        path = calibrate(settings_of({"num_shards": 2, "shard_index": index}))
    merged = load_file(path / METRICS)
    assert set(merged) == set(whole)
    for name, tensor in whole.items():
        assert torch.allclose(merged[name], tensor, rtol=1e-9, atol=1e-9), name
