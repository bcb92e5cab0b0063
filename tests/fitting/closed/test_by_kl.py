"""Choices for a whole map by a number that only models can give: here a number that is planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import Auto, Fit, HeadLocal, Ridge, Splits
from kvxfer.fitting.closed.by_kl import LOSS
from kvxfer.fitting.dials import LAM_GRID, Attention, Isotropic, Reduced
from kvxfer.maps.blocks import DESIGNS, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.report.fit_figures import tried
from tests.samples import make_samples, make_splits

BOTH = DESIGNS["both"]
Layers = dict[Output, LinearLayer]


def fit(splits: Splits, divergence: Callable[[Layers], float] | None, solver: Any = Ridge, **options: Any) -> Fit:
    made = solver(**{"k": 2, "features": BOTH, "penalty": Isotropic(1e-3), "criterion": "kl", **options})
    steps: list[None] = []
    found = made.fit(replace(splits, divergence=divergence), lambda: steps.append(None))
    assert len(steps) == made.steps(splits.fit)
    return found


def same(found: Fit, expected: Fit) -> bool:
    """Whether two fits are the same map."""
    return all(torch.equal(found.layers[o].dense(), layer.dense()) for o, layer in expected.layers.items())


def size(layers: Layers) -> float:
    return sum(float(layer.dense().square().sum()) for layer in layers.values())


@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
@pytest.mark.parametrize("penalty", [Isotropic("auto"), Attention("auto", "auto"), Isotropic("auto", per_block=True)])
def test_lam_is_that_of_the_lowest_kl(solver: Any, penalty: Any) -> None:
    """Heavier penalties give smaller weights: the number is lowest at one λ of the grid, whatever R² says."""
    splits = make_splits(make_samples(BOTH))
    wanted = LAM_GRID[-2]
    map_there = fit(splits, None, solver, penalty=replace(penalty, lam=wanted), criterion="r2")
    goal = size(map_there.layers)
    found = fit(splits, lambda layers: abs(size(layers) - goal), solver, penalty=penalty)
    assert same(found, map_there)
    assert {record["lam"] for record in found.diagnostics} == {wanted}
    assert [lam for lam, _ in found.curves["kl"]["lam"]] == list(LAM_GRID)
    assert dict(found.curves["kl"]["lam"])[wanted] == 0
    assert list(tried(found.curves)["lam"]) == ["KL, the less the better"]


def test_k_is_that_of_the_lowest_kl() -> None:
    splits = make_splits(make_samples(BOTH))
    for wanted in (1, 2, 3):

        def blocks_off(layers: Layers, wanted: int = wanted) -> float:
            return float(abs(len(layers[0, "keys"].blocks) - 2 * wanted))

        found = fit(splits, blocks_off, k="auto")
        assert {len(layers) for layers in found.selection.chosen.values()} == {wanted}
        assert [k for k, _ in found.curves["kl"]["k"]] == [1, 2, 3]


@pytest.mark.parametrize("harm", [0.0, LOSS / 10, LOSS / 2.5, LOSS * 10])
def test_the_rank_is_the_lowest_that_costs_little(harm: float) -> None:
    """Every direction less costs as much: as many may go as cost less than what is allowed."""
    splits = make_splits(make_samples(BOTH))

    def lacking(layers: Layers) -> float:
        return harm * (6 - int(torch.linalg.matrix_rank(layers[0, "keys"].dense())))

    found = fit(splits, lacking, rank=Reduced("auto"))
    # Four blocks of six columns: the factors of rank 5 are as large as the dense map of 24 by 6.
    lowest = next(r for r in (1, 2, 3, 4, 6) if harm * (6 - r) <= LOSS)
    assert {record["rank"] for record in found.diagnostics} == {lowest}
    assert all((layer.right is None) == (lowest == 6) for layer in found.layers.values())


def test_one_after_the_other() -> None:
    splits = make_splits(make_samples(BOTH))
    found = fit(splits, lambda layers: size(layers), k="auto", penalty=Isotropic("auto"), rank=Reduced("auto"))
    assert list(found.curves["kl"]) == ["k", "lam", "rank"]
    assert {record["lam"] for record in found.diagnostics} == {LAM_GRID[-1]}
    # The dials that R² would have chosen per output are one for all.
    assert len({record["rank"] for record in found.diagnostics}) == 1


def test_without_a_choice_it_is_ridge_and_reads_no_model() -> None:
    splits = make_splits(make_samples(BOTH))
    assert not Ridge(k=2, criterion="kl", penalty=Isotropic(1.0)).needs_models
    assert not Ridge(k=2, criterion="attention").needs_models
    assert Ridge(k=2, criterion="kl").needs_models
    assert same(fit(splits, None), fit(splits, None, criterion="r2"))


def test_without_models_it_says_so() -> None:
    with pytest.raises(KvxferError, match=r"solver\.criterion=kl reads both models.*solver\.criterion=attention"):
        fit(make_splits(make_samples(BOTH)), None, penalty=Isotropic("auto"))


def test_auto_s_candidates_choose_by_it_each() -> None:
    splits = make_splits(make_samples(BOTH))
    found = fit(splits, lambda layers: -size(layers), Auto, penalty=Isotropic("auto"))
    assert {record["lam"] for record in found.diagnostics} == {LAM_GRID[0]}
