"""Which source layers feed a target layer: scores of single layers, top k of them, ties the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import Ridge, Splits
from kvxfer.fitting.closed.engine import Engine, beyond_grid
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.closed.selection import Selection, check_k, choose_top_k, ranked, single_layer_scores
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Output
from tests.samples import Samples, make_samples, make_splits, reference_r2, reference_ridge

CANDIDATES = [0, 2, 5, 7]


def scores_of(keys: list[list[float]], values: list[list[float]]) -> dict[str, Tensor]:
    return {"keys": torch.tensor(keys, dtype=torch.float64), "values": torch.tensor(values, dtype=torch.float64)}


def top(scores: dict[str, Tensor], candidates: list[int], k: int, shared: bool) -> dict[Output, tuple[int, ...]]:
    """The choice of the best single layers, as a solver makes it."""
    check_k(k, candidates)
    return choose_top_k(ranked(scores, candidates, shared), k)


def single_scores(
    splits: Splits, features: Any, candidates: list[int], lam: float, advance: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Scores of ridge on each source layer alone."""
    engine = Engine(Ridge(k=1, selection_lam=lam, features=features), splits)
    return single_layer_scores(engine.quick_score, candidates, advance)


def test_each_kind_has_its_own_layers() -> None:
    scores = scores_of([[0.9, 0.1, 0.2, 0.8]], [[0.1, 0.9, 0.8, 0.2]])
    chosen = top(scores, CANDIDATES, 2, shared=False)
    assert chosen == {(0, "keys"): (0, 7), (0, "values"): (2, 5)}


def test_shared_layers_are_ranked_by_the_mean() -> None:
    scores = scores_of([[0.9, 0.1, 0.2, 0.8]], [[0.1, 0.95, 0.2, 0.8]])
    chosen = top(scores, CANDIDATES, 2, shared=True)
    assert chosen == {(0, "keys"): (2, 7), (0, "values"): (2, 7)}


@pytest.mark.parametrize("shared", [True, False])
def test_ties_go_to_the_earlier_layer(shared: bool) -> None:
    scores = scores_of([[0.5] * 4, [0.1, 0.5, 0.5, 0.5]], [[0.5] * 4, [0.1, 0.5, 0.5, 0.5]])
    chosen = top(scores, CANDIDATES, 2, shared)
    for kind in KINDS:
        assert chosen[0, kind] == (0, 2)
        assert chosen[1, kind] == (2, 5)


def test_all_layers_can_be_chosen() -> None:
    scores = scores_of([[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]])
    assert set(top(scores, CANDIDATES, 4, shared=True).values()) == {tuple(CANDIDATES)}


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range_is_named(k: int) -> None:
    scores = scores_of([[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]])
    with pytest.raises(KvxferError, match=rf"solver\.k={k} must be .*\b4\b"):
        top(scores, CANDIDATES, k, shared=True)


def test_the_outcome_is_plain_json() -> None:
    scores = scores_of([[0.9, 0.1, 0.2, 0.8]], [[0.1, 0.9, 0.8, 0.2]])
    plain = Selection(CANDIDATES, scores, top(scores, CANDIDATES, 1, shared=False)).to_dict()
    assert plain["candidates"] == CANDIDATES
    assert plain["r2_keys"] == [[0.9, 0.1, 0.2, 0.8]]
    assert (plain["chosen_keys"], plain["chosen_values"]) == ([[0]], [[2]])


@pytest.mark.parametrize("features", DESIGNS.values(), ids=lambda f: f.name)
def test_scores_are_held_out_r2_of_ridge_on_one_layer(features: Any) -> None:
    samples = make_samples(features, tokens=800)
    splits = make_splits(samples)
    fit, validation = samples.part(0, 400), samples.part(400, 600)
    scores = single_scores(splits, features, [0, 2], 1e-2)
    for kind in KINDS:
        for column, layer in enumerate([0, 2]):
            blocks = features.blocks(kind, [layer])
            for target in range(2):
                output = [(target, kind)]
                solution = reference_ridge(fit.design(blocks), fit.targets(output), 1e-2)
                expected = reference_r2(validation.design(blocks), validation.targets(output), *solution, heads=2)
                assert float(scores[kind][target, column]) == pytest.approx(float(expected), rel=1e-8)


def planted(samples: Samples, layer: int) -> Samples:
    """Outputs that copy one source layer, keys and values alike, and nothing else."""
    y = samples.y.clone()
    for i, (_, kind) in enumerate(samples.layout.outputs):
        y[:, i] = samples.block(Block(layer, kind))
    return replace(samples, y=y)


@pytest.mark.parametrize("features", DESIGNS.values(), ids=lambda f: f.name)
def test_the_layer_that_was_copied_is_found(features: Any) -> None:
    splits = make_splits(planted(make_samples(features), 1))
    scores = single_scores(splits, features, [0, 1, 2], 1e-6)
    assert set(top(scores, [0, 1, 2], 1, shared=False).values()) == {(1,)}
    assert all(float(scores[kind][:, 1].min()) > 0.999 for kind in KINDS)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """A record of every factorisation: features and lam."""
    calls: list[tuple[int, float]] = []
    solve = Gram.ridge

    def count(self: Gram, right: Tensor, lam: float) -> Any:
        calls.append((len(self.matrix), lam))
        return solve(self, right, lam)

    monkeypatch.setattr(Gram, "ridge", count)
    return calls


@pytest.mark.parametrize(("name", "factorisations"), [("same", 6), ("both", 3), ("previous", 3)])
def test_a_source_layer_is_factored_once(name: str, factorisations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    splits, advances = make_splits(make_samples(DESIGNS[name])), []
    calls = counted(monkeypatch)
    single_scores(splits, DESIGNS[name], [0, 1, 2], 1e-3, lambda: advances.append(1))
    assert len(calls) == factorisations
    assert len(advances) == 6


@pytest.mark.parametrize(
    ("scores", "beyond"),
    [
        ([0.5], False),
        ([0.9, 0.8, 0.1], True),
        ([0.9, 0.9 - 1e-6, 0.1], False),
        ([0.1, 0.9, 0.2], False),
        ([0.0, 0.5, 0.9], True),
    ],
)
def test_a_grid_is_too_short_where_its_last_step_still_gains(scores: list[float], beyond: bool) -> None:
    assert beyond_grid(scores) is beyond
