"""Penalties, ranks and choices made out of sample: what each must do, against brute force where there is one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages.fit import _warn
from kvxfer.fitting.closed import Fit, HeadLocal, Ridge, Splits
from kvxfer.fitting.closed.linalg import Gram, reduce
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.fitting.dials import Attention, Full, Isotropic, Reduced
from kvxfer.maps.blocks import DESIGNS
from kvxfer.moments.query_metric import Metric
from tests.samples import Samples, make_samples, make_splits, reference_metric_r2, reference_ridge, relative_error

BOTH = DESIGNS["both"]


def fit(splits: Splits, solver: Any = Ridge, **options: Any) -> Fit:
    return solver(**{"k": 2, "features": BOTH, "penalty": Isotropic(1e-3), **options}).fit(splits)


def assert_same(found: Fit, expected: Fit, tolerance: float) -> None:
    assert found.selection.chosen == expected.selection.chosen
    for output, layer in expected.layers.items():
        assert relative_error(found.layers[output].dense(), layer.dense().double()) <= tolerance
        assert relative_error(found.layers[output].bias, layer.bias.double()) <= tolerance


@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
def test_alpha_zero_is_ridge_exactly(solver: Any) -> None:
    splits = make_splits(make_samples(BOTH))
    found = fit(splits, solver, penalty=Attention(1e-2, 0.0))
    assert_same(found, fit(splits, solver, penalty=Isotropic(1e-2)), 1e-10)


def test_a_flat_metric_is_ridge_whatever_alpha_is() -> None:
    splits = make_splits(make_samples(BOTH))
    assert splits.metrics is not None
    flat = {output: Metric.of(torch.eye(3).expand(2, 3, 3)) for output in splits.metrics.by_output}
    splits = replace(splits, metrics=replace(splits.metrics, by_output=flat))
    assert_same(fit(splits, penalty=Attention(1e-2, 1.0)), fit(splits, penalty=Isotropic(1e-2)), 1e-6)


@pytest.mark.parametrize("tiny", [0.0, 1e-300, 1e-14])
@pytest.mark.parametrize("lam", [0.0, 1e-9, 1e-3, 1.0])
def test_a_near_singular_metric_blows_nothing_up(tiny: float, lam: float) -> None:
    splits = make_splits(make_samples(BOTH, tokens=60))
    assert splits.metrics is not None
    raw = torch.diag(torch.tensor([1.0, tiny, tiny], dtype=torch.float64)).expand(2, 3, 3)
    singular = {output: Metric.of(raw) for output in splits.metrics.by_output}
    splits = replace(splits, metrics=replace(splits.metrics, by_output=singular))
    ridge = fit(splits, penalty=Isotropic(lam))
    found = fit(splits, penalty=Attention(lam, 1.0))
    for output, layer in found.layers.items():
        assert float(layer.weight.abs().max()) <= 10 * float(ridge.layers[output].weight.abs().max())


def test_a_fixed_alpha_says_where_it_does_worse_than_ridge() -> None:
    splits = make_splits(make_samples(BOTH, tokens=100))
    fixed = fit(splits, penalty=Attention("auto", 1.0))
    ridge = fit(splits, penalty=Isotropic("auto"))
    for ours, theirs in zip(fixed.diagnostics, ridge.diagnostics, strict=True):
        assert ours["alpha"] == 1.0
        assert ours["worse_than_isotropic"] == (theirs["r2_validation"] > ours["r2_validation"])
    chosen = fit(splits, penalty=Attention("auto", "auto"))
    for ours, theirs in zip(chosen.diagnostics, ridge.diagnostics, strict=True):
        assert not ours["worse_than_isotropic"]
        assert ours["r2_validation"] >= theirs["r2_validation"] - 1e-12
    assert {alpha for _, alpha, _ in chosen.curves["penalty"]["keys.0"]} == {0.0, 0.25, 0.5, 0.75, 1.0}


@pytest.mark.parametrize("setting", [(0.0, 1.0), (1e-3, 1e-12)])
def test_an_alpha_without_effect_is_not_called_worse_than_ridge(setting: tuple[float, float]) -> None:
    """With λ = 0 nothing is penalised, and an α of 1e-12 leaves λ as it is: what differs is rounding."""
    for seed in range(3):
        records = fit(make_splits(make_samples(BOTH, seed=seed)), penalty=Attention(*setting)).diagnostics
        assert not any(record["worse_than_isotropic"] for record in records)


def test_head_local_is_least_squares_of_every_head_by_itself() -> None:
    samples = make_samples(BOTH, tokens=800)
    found = fit(make_splits(samples), HeadLocal, penalty=Isotropic(0.0))
    train = samples.part(0, 400)
    for output, layer in found.layers.items():
        for head in range(2):
            own = slice(head * 3, head * 3 + 3)
            x = torch.cat([train.block(block)[:, own] for block in layer.blocks], dim=1).double()
            weight, bias = reference_ridge(x, train.targets([output])[:, own], 0.0)
            assert relative_error(layer.weight[head], weight) < 1e-6
            assert relative_error(layer.bias[own], bias) < 1e-6
    full = fit(make_splits(samples), penalty=Isotropic(0.0))
    biases = 4 * 6
    weights = [sum(layer.parameters for layer in f.layers.values()) - biases for f in (found, full)]
    assert weights[1] == 2 * weights[0]


@pytest.mark.parametrize("metric", [False, True])
def test_the_whole_rank_is_ridge_and_a_lower_one_is_a_bound(metric: bool) -> None:
    samples = make_samples(BOTH)
    x, y = samples.design(BOTH.blocks("keys", [0, 1])), samples.targets([(0, "keys")])
    a = x - x.mean(0)
    weight, _ = reference_ridge(x, y, 1e-3)
    own = make_splits(samples).metrics.by_output[0, "keys"] if metric else None  # type: ignore[union-attr]
    left, right = reduce(weight, a.T @ a, 6, own, [0, 1])
    assert relative_error(left @ right, weight) < 1e-10
    for rank in range(1, 6):
        left, right = reduce(weight, a.T @ a, rank, own, [0, 1])
        assert int(torch.linalg.matrix_rank(left @ right)) == left.shape[1] == rank


def prediction_error(samples: Samples, weight: torch.Tensor, full: torch.Tensor, metric: torch.Tensor) -> float:
    x = samples.design(BOTH.blocks("keys", [0, 1]))
    apart = (x - x.mean(0)) @ (weight - full)
    return float(((apart @ metric) * apart).sum())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_no_map_of_the_rank_is_nearer(rank: int) -> None:
    """Random ones, the best ones near it, and a truncated SVD of the weight: in the metric that was asked for."""
    samples = make_samples(BOTH)
    metric = make_splits(samples).metrics.by_output[0, "keys"]  # type: ignore[union-attr]
    x, y = samples.design(BOTH.blocks("keys", [0, 1])), samples.targets([(0, "keys")])
    gram = (x - x.mean(0)).T @ (x - x.mean(0))
    full, _ = reference_ridge(x, y, 1e-3)
    weigh = {False: torch.eye(6).double(), True: torch.block_diag(*metric.matrix)}
    best = {}
    for in_metric, matrix in weigh.items():
        left, right = reduce(full, gram, rank, metric if in_metric else None, [0, 1])
        best[in_metric] = left @ right
        reached = prediction_error(samples, left @ right, full, matrix)
        generator = torch.Generator().manual_seed(rank)

        def noise(like: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(like.shape, generator=generator, dtype=torch.float64)

        u, s, v = torch.linalg.svd(full, full_matrices=False)
        rivals = [(u * s)[:, :rank] @ v[:rank]]
        for scale in (1e-3, 1e-1):
            rivals += [(left + scale * noise(left)) @ (right + scale * noise(right)) for _ in range(50)]
        for _ in range(50):
            # The best left factor for a random right one.
            other = noise(right)
            rivals.append(full @ matrix @ other.T @ torch.linalg.inv(other @ matrix @ other.T) @ other)
        assert all(prediction_error(samples, rival, full, matrix) >= reached * (1 - 1e-9) for rival in rivals)
    plain, weighed = (prediction_error(samples, best[key], full, weigh[True]) for key in (False, True))
    assert weighed < plain


def test_an_attention_rank_wins_in_its_own_metric() -> None:
    splits = make_splits(make_samples(BOTH, tokens=2000))
    found = {metric: fit(splits, rank=Reduced(2, metric)) for metric in ("isotropic", "attention")}
    measures = {
        metric: [sum(d[name] for d in each.diagnostics) for name in ("metric_r2_fit", "r2_fit")]
        for metric, each in found.items()
    }
    assert measures["attention"][0] > measures["isotropic"][0]
    assert measures["attention"][1] < measures["isotropic"][1]


def low_rank(rank: int) -> Samples:
    """Outputs that all lie, but for a little noise, in a few directions."""
    samples = make_samples(BOTH, tokens=2000, noise=0.0)
    basis = torch.linalg.qr(torch.randn(6, rank, generator=torch.Generator().manual_seed(1)))[0]
    noise = 1e-3 * torch.randn(samples.y.shape, generator=torch.Generator().manual_seed(2))
    return replace(samples, y=samples.y @ basis @ basis.T + noise)


@pytest.mark.parametrize("rank", [2, 4])
def test_auto_rank_is_the_smallest_without_loss(rank: int) -> None:
    # Blocks of the layers that a target layer does not read would be noise: it reads all.
    found = fit(make_splits(low_rank(rank)), k=3, rank=Reduced("auto"))
    for record in found.diagnostics:
        assert record["rank"] == rank
        tried = [r for r, _ in found.curves["rank"][f"{record['kind']}.{record['layer']}"]]
        assert tried == sorted(set(tried))
        assert tried[-1] == 6


def test_auto_rank_may_stay_whole() -> None:
    found = fit(make_splits(make_samples(BOTH, tokens=2000, noise=1e-3)), k=3, rank=Reduced("auto"))
    for layer, record in zip(found.layers.values(), found.diagnostics, strict=True):
        assert (layer.right is None) == (record["rank"] == 6)
    assert any(layer.right is None for layer in found.layers.values())


@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_auto_rank_never_stores_more_than_the_dense_map(solver: Any, k: int) -> None:
    """``same`` with k = 1 reads as many columns as it gives: factors of half the width or more are no gain."""
    samples = low_rank(5)
    for features in (DESIGNS["same"], BOTH):
        splits = make_splits(samples)
        dense = fit(splits, solver, k=k, features=features)
        for output, layer in fit(splits, solver, k=k, features=features, rank=Reduced("auto")).layers.items():
            if layer.right is None:
                assert torch.equal(layer.weight, dense.layers[output].weight)
            else:
                assert layer.parameters < dense.layers[output].parameters


def test_auto_rank_leaves_out_what_would_be_larger() -> None:
    assert Reduced("auto").ranks(64) == (8, 16, 24, 32, 40, 48, 56, 64)
    assert Reduced("auto").ranks(64, inputs=64) == (8, 16, 24, 64)
    assert Reduced("auto").ranks(64, inputs=512) == (8, 16, 24, 32, 40, 48, 56, 64)
    assert Reduced("auto").ranks(64, inputs=1) == (64,)
    assert Reduced(60).ranks(64, inputs=64) == (60,)


@pytest.mark.parametrize("scale", [0.0, 0.05])
def test_metric_r2_of_moments_is_that_of_samples(scale: float) -> None:
    samples = make_samples(BOTH, mean=20.0)
    metrics = make_splits(samples).metrics
    assert metrics is not None
    blocks, outputs = BOTH.blocks("keys", [0, 2]), [(0, "keys"), (1, "keys")]
    x, y = samples.design(blocks), samples.targets(outputs)
    weight = scale * torch.randn(x.shape[1], 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    bias = y.mean(0) - x.mean(0) @ weight + 0.1
    found = HeldOut(samples.moments(), blocks, outputs).metric_r2(weight, bias, metrics)
    for n, score in enumerate(found):
        own = slice(n * 6, n * 6 + 6)
        expected = reference_metric_r2(x, y[:, own], weight[:, own], bias[own], metrics.by_output[outputs[n]])
        assert float(score) == pytest.approx(float(expected), rel=1e-8)


def test_what_needs_a_probe_says_so() -> None:
    splits = replace(make_splits(make_samples(BOTH)), probe=None)
    assert "attention_score" not in fit(splits).diagnostics[0]
    with pytest.raises(KvxferError, match=r"solver\.criterion=attention .*calibration\.probe_rows=16"):
        fit(splits, criterion="attention")


def test_what_needs_metrics_says_so() -> None:
    splits = replace(make_splits(make_samples(BOTH)), metrics=None)
    for options in (
        {"penalty": Attention(1e-3, 1.0)},
        {"rank": Reduced(2, "attention")},
        {"criterion": "query"},
    ):
        with pytest.raises(KvxferError, match=r"calibration\.metrics=true"):
            fit(splits, **options)
    assert "metric_r2_held_out" not in fit(splits).diagnostics[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Attention(1.0, 2.0), r"penalty\.alpha=2\.0 must be"),
        (lambda: Attention(1.0, None), r"penalty\.alpha=None must be"),
        (lambda: Attention(-1.0, 1.0), r"penalty\.lam=-1\.0 must be"),
        (lambda: Reduced(0), r"rank\.r=0 must be"),
        (lambda: Reduced(1.5), r"rank\.r=1\.5 must be"),
        (lambda: Reduced("half"), r"rank\.r=half must be"),
        (lambda: Reduced(2, "query"), r"rank\.metric='query'"),
        (lambda: Reduced(10000).ranks(64), r"rank\.r=10000 must be below the 64"),
        (lambda: HeadLocal(k=1, features=DESIGNS["embedding"]), "features=embedding has embedding: use solver=ridge"),
    ],
)
def test_wrong_values_are_one_line(build: Any, message: str) -> None:
    with pytest.raises(KvxferError, match=message) as refusal:
        build()
    assert "\n" not in str(refusal.value)


def test_fractions_are_of_the_width() -> None:
    assert Reduced(0.5).ranks(64) == (32,)
    assert Reduced(0.001).ranks(64) == (1,)
    assert Full(r=3).ranks(64) == ()


def test_one_eigendecomposition_solves_as_a_factorisation_does() -> None:
    x = torch.randn(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram, right = Gram(x.T @ x), x.T @ x[:, :4]
    lams = torch.tensor([0.0, 1e-6, 1e-2, 10.0], dtype=torch.float64)
    found = gram.ridge_per_column(right, lams)
    for n, lam in enumerate(lams.tolist()):
        assert relative_error(found[:, n], gram.ridge(right[:, [n]], lam)[0][:, 0]) < 1e-9


def test_a_best_lam_at_the_grid_s_end_is_said_with_its_key(caplog: pytest.LogCaptureFixture) -> None:
    splits = make_splits(make_samples(BOTH))
    found = fit(splits)
    record = {**found.diagnostics[0], "at_grid_edge": True}
    with caplog.at_level("WARNING", logger="kvxfer"):
        _warn(replace(found, diagnostics=[record]), splits)
    assert "1 of 1 chosen λ lie on the edge of the grid: set penalty.lam" in caplog.text
