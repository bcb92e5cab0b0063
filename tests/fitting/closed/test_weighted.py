"""Weighted ridge: what unequal weights change, and what they leave as it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import Ridge, Weighted
from kvxfer.fitting.dials import LAM_GRID, Isotropic
from kvxfer.maps.blocks import DESIGNS
from tests.samples import Samples, make_samples, make_splits, reference_r2, relative_error

TOKENS, LAM = 1200, 1e-2
FEATURES = DESIGNS["both"]


def make_weights(seed: int = 3) -> Tensor:
    """``[target layers, tokens]``, of mean about 1, most of it on a few tokens."""
    drawn = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 4 * drawn**3


def bent() -> Samples:
    """Outputs that no linear function gives, so that it matters which tokens count."""
    samples = make_samples(FEATURES, tokens=TOKENS, mean=2.0)
    return replace(samples, y=samples.y + samples.y**2)


def weighted_ridge(x: Tensor, y: Tensor, w: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Weight and bias by least squares on rows multiplied by the square roots of their weights."""
    w = w[:, None]
    mean_x, mean_y = (w * x).sum(0) / w.sum(), (w * y).sum(0) / w.sum()
    a, b = w.sqrt() * (x - mean_x), w.sqrt() * (y - mean_y)
    unit = (a * a).sum(0).mean()
    a = torch.cat([a, (lam * unit).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)])
    b = torch.cat([b, torch.zeros(x.shape[1], y.shape[1], dtype=b.dtype)])
    weight = torch.linalg.lstsq(a, b, driver="gelsd").solution
    return weight, mean_y - mean_x @ weight


def weighted_r2(x: Tensor, y: Tensor, w: Tensor, weight: Tensor, bias: Tensor) -> float:
    w = w[:, None]
    mean = (w * y).sum(0) / w.sum()
    squares = (w * (x @ weight + bias - y) ** 2).sum(0), (w * (y - mean) ** 2).sum(0)
    residual, total = (s.view(2, -1).sum(1) for s in squares)
    return float((1 - residual / total).mean())


def test_it_is_weighted_least_squares_of_each_target_layer() -> None:
    samples, weights = bent(), make_weights()
    fit = Weighted(k=2, features=FEATURES, penalty=Isotropic(LAM)).fit(make_splits(samples, weights))
    plain = Ridge(k=2, features=FEATURES, penalty=Isotropic(LAM)).fit(make_splits(samples))
    assert fit.selection.to_dict() == plain.selection.to_dict()
    records = {(d["layer"], d["kind"]): d for d in fit.diagnostics}
    for output, layer in fit.layers.items():
        x, y = samples.design(layer.blocks), samples.targets([output])
        own = weights[output[0]]
        half, rest = slice(0, 600), slice(900, None)
        weight, bias = weighted_ridge(x[half], y[half], own[half], LAM)
        assert relative_error(layer.dense(), weight) < 1e-6
        assert relative_error(layer.bias, bias) < 1e-6
        assert relative_error(plain.layers[output].dense(), weight) > 1e-2
        record, solution = records[output], (layer.dense().double(), layer.bias.double())
        chosen_on = slice(600, 900)
        for split, span in (("fit", half), ("validation", chosen_on), ("held_out", rest)):
            plainly = reference_r2(x[span], y[span], *solution, heads=2)
            assert record[f"r2_{split}"] == pytest.approx(float(plainly), rel=1e-5)
        (*_, score), *_ = fit.curves["penalty"][f"{output[1]}.{output[0]}"]
        assert score == pytest.approx(weighted_r2(x[chosen_on], y[chosen_on], own[chosen_on], *solution), rel=1e-5)
        effective = float(own[half].sum() ** 2 / own[half].square().sum())
        assert record["effective_tokens"] == pytest.approx(effective)
        assert record["few_tokens"] == (effective < 5 * len(weight))


def test_lam_is_the_best_on_the_weighted_validation_rows() -> None:
    """Validation tokens that weigh anything are noise in one target layer: its λ alone is the largest."""
    samples, weights = make_samples(FEATURES, tokens=TOKENS, noise=1e-3), torch.ones(2, TOKENS)
    y = samples.y.clone()
    y[600:700] = torch.randn(y[600:700].shape, generator=torch.Generator().manual_seed(3))
    weights[1, 700:900] = 0.0
    weights[0, 600:700] = 0.0
    fit = Weighted(k=3, features=FEATURES).fit(make_splits(replace(samples, y=y), weights))
    lam = {(d["layer"], d["kind"]): d["lam"] for d in fit.diagnostics}
    assert lam[1, "keys"] == lam[1, "values"] == LAM_GRID[-1]
    assert max(lam[0, "keys"], lam[0, "values"]) < 1e-2


def test_target_layers_that_share_a_design_have_solves_of_their_own() -> None:
    samples, weights = bent(), make_weights()
    fit = Weighted(k=3, features=FEATURES, penalty=Isotropic(LAM)).fit(make_splits(samples, weights))
    assert len({layer.blocks for layer in fit.layers.values()}) == 1
    assert Weighted(k=3, features=FEATURES).apart(list(fit.layers)) == [
        [(0, "keys"), (0, "values")],
        [(1, "keys"), (1, "values")],
    ]


def test_few_effective_tokens_are_said() -> None:
    weights = torch.full((2, TOKENS), 1e-3)
    weights[1] = 1.0
    weights[0, :30] = 1.0
    fit = Weighted(k=1, features=FEATURES).fit(make_splits(bent(), weights))
    assert {d["few_tokens"] for d in fit.diagnostics if d["layer"] == 0} == {True}
    assert {d["few_tokens"] for d in fit.diagnostics if d["layer"] == 1} == {False}


def test_a_calibration_without_weights_is_refused() -> None:
    splits = replace(make_splits(bent()), weighted=None)
    with pytest.raises(KvxferError, match=r"solver=weighted .*calibration\.weights=attention"):
        Weighted(k=1, features=FEATURES).fit(splits)
