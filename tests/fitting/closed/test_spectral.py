"""A path of λ from one eigendecomposition scores what a factorisation per λ scores, or steps aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer.fitting.closed import HeadLocal, Ridge, Splits
from kvxfer.fitting.closed import design as design_module
from kvxfer.fitting.closed.design import Design
from kvxfer.fitting.closed.engine import Engine
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.closed.spectral import is_cheaper
from kvxfer.fitting.dials import LAM_GRID, Attention, Isotropic
from kvxfer.maps.blocks import DESIGNS, KINDS
from tests.samples import Samples, make_samples, make_splits, relative_error

BOTH = DESIGNS["both"]


def shifted(case: str) -> Samples:
    """Samples whose fit rows differ from the others, or whose outputs hardly vary."""
    samples = make_samples(BOTH, tokens=1200, mean=10.0, target_layers=5)
    x, y = samples.x.clone(), samples.y.clone()
    if case == "other means":
        x[600:] += 0.7
        y[600:] -= 0.4
    elif case == "a head that does not vary":
        y[:, :, 3:] = 2.5
    return replace(samples, x=x, y=y)


def design_of(splits: Splits, solver: Any, **penalty: Any) -> tuple[Engine, Design]:
    engine = Engine(solver(k=2, features=BOTH, penalty=Isotropic("auto", **penalty)), splits)
    keys = [output for output in splits.fit.layout.outputs if output[1] == "keys"]
    return engine, Design(engine.solver, engine.layout, BOTH.blocks("keys", [0, 2]), keys, engine.splits.moments)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is taken whatever it costs."""
    monkeypatch.setattr(design_module, "is_cheaper", lambda *sizes: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
@pytest.mark.parametrize("case", ["plain", "other means", "a head that does not vary"])
def test_scores_are_those_of_a_factorisation_per_lam(solver: Any, case: str, per_block: bool) -> None:
    engine, design = design_of(make_splits(shifted(case)), solver, per_block=per_block)
    path = design.path(LAM_GRID)
    assert list(path) == list(LAM_GRID)
    for lam, scores in path.items():
        weight, used = design.ridge(lam, list(range(5)))
        assert used == [lam] * 5
        expected = engine.judge(design.held["validation"], weight, design.bias(weight))
        assert torch.allclose(scores, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("always")
def test_many_features_are_done_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    _, design = design_of(make_splits(shifted("other means")), Ridge)
    whole = torch.stack(list(design.path(LAM_GRID).values()))
    for name, value in (("_ROWS", 7), ("_TILE", 300), ("_COLUMNS", 13)):
        monkeypatch.setattr(f"kvxfer.fitting.closed.spectral.{name}", value)
    assert torch.allclose(torch.stack(list(design.path(LAM_GRID).values())), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("always")
def test_a_lam_that_must_be_raised_is_left_to_the_factorisation() -> None:
    samples = make_samples(BOTH, tokens=1200)
    x = samples.x.clone()
    x[:, 4] = x[:, 3]
    splits = make_splits(replace(samples, x=x))
    _, design = design_of(splits, Ridge)
    assert list(design.path((0.0, 1e-14, 1e-3, 1.0))) == [1e-3, 1.0]
    assert design.ridge(0.0, [0])[1][0] > 0


def test_a_single_lam_is_one_factorisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gram, "eigen", property(lambda self: pytest.fail("an eigendecomposition")))
    Ridge(k=2, features=BOTH, penalty=Isotropic(1e-3)).fit(make_splits(make_samples(BOTH)))


@pytest.mark.usefixtures("always")
def test_the_query_criterion_is_judged_by_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gram, "eigen", property(lambda self: pytest.fail("an eigendecomposition")))
    splits = make_splits(make_samples(BOTH))
    Ridge(k=2, features=BOTH, criterion="query", selection_lam="auto").fit(splits)


@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
def test_both_ways_fit_the_same_map(solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    splits, fits = make_splits(shifted("other means")), []
    for cheaper in (True, False):
        monkeypatch.setattr(design_module, "is_cheaper", lambda *sizes, cheaper=cheaper: cheaper)
        fits.append(solver(k=2, features=BOTH, selection_lam="auto").fit(splits))
    assert fits[0].selection.chosen == fits[1].selection.chosen
    for output, layer in fits[0].layers.items():
        assert relative_error(layer.dense(), fits[1].layers[output].dense().double()) < 1e-6
    for ours, theirs in zip(fits[0].diagnostics, fits[1].diagnostics, strict=True):
        assert (ours["lam"], ours["lam_used"]) == (theirs["lam"], theirs["lam_used"])
        assert ours["r2_held_out"] == pytest.approx(theirs["r2_held_out"], rel=1e-9)


def test_the_cheaper_way_depends_on_how_many_share_a_design() -> None:
    assert is_cheaper(features=1024, outputs=28, columns=28 * 256, heads=28 * 4, lams=12)
    assert is_cheaper(features=256, outputs=28, columns=28 * 256, heads=28 * 4, lams=12)
    assert not is_cheaper(features=4096, outputs=1, columns=256, heads=4, lams=4)
    assert not is_cheaper(features=256, outputs=28, columns=28 * 256, heads=28 * 4, lams=1)


@pytest.mark.parametrize("solver", [Ridge, HeadLocal])
def test_selection_at_every_pairs_best_lam(solver: Any) -> None:
    splits = make_splits(make_samples(BOTH, tokens=60))
    scores = {
        lam: Engine(solver(k=1, features=BOTH, selection_lam=lam), splits).quick_score((1,))
        for lam in ("auto", *LAM_GRID)
    }
    for kind in KINDS:
        best = torch.stack([scores[lam][kind] for lam in LAM_GRID]).amax(0)
        assert torch.allclose(scores["auto"][kind], best, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [None, 1.0])
@pytest.mark.parametrize("design", ["same", "both"])
def test_a_penalty_per_block_does_not_see_the_scale_of_a_block(alpha: float | None, design: str) -> None:
    """A design of one block is as it was; of several, the map does not depend on the units of one of them."""
    features = DESIGNS[design]
    samples = make_samples(features, tokens=800)
    scaled = replace(samples, x=samples.x.clone())
    block = features.blocks("values", [0])[-1]
    scaled.block(block)[:] *= 1024

    def fit(data: Samples, per_block: bool) -> Any:
        penalty = Isotropic(0.1, None, per_block) if alpha is None else Attention(0.1, alpha, per_block)
        return Ridge(k=1, features=features, penalty=penalty).fit(make_splits(data)).layers

    ours, theirs, plain, changed = (fit(samples, True), fit(scaled, True), fit(samples, False), fit(scaled, False))
    for output, layer in ours.items():
        if layer.blocks != theirs[output].blocks:
            pytest.fail("a block's unit changed the selection")
        back = theirs[output].dense().double().clone()
        if block in layer.blocks:
            start = layer.blocks.index(block) * 6
            back[start : start + 6] *= 1024
        assert relative_error(layer.dense(), back) < 1e-5
        if design == "same":
            assert torch.equal(layer.dense(), plain[output].dense())
    if design == "both":
        apart = [relative_error(ours[o].dense(), plain[o].dense().double()) for o in ours]
        assert max(apart) > 1e-3
        assert any(
            changed[o].blocks != plain[o].blocks or not torch.equal(changed[o].dense(), plain[o].dense()) for o in plain
        )


def test_a_block_that_does_not_vary_keeps_the_common_penalty() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 3:] = 0
    gram = Gram(x.T @ x, torch.tensor([0, 0, 0, 1, 1, 1]))
    weight, used = gram.ridge(x.T @ x[:, :2], 1e-2)
    assert used == 1e-2
    assert torch.isfinite(weight).all()
    assert not weight[3:].any()


def test_manifests_say_what_lam_is_relative_to() -> None:
    for penalty in (Isotropic, Attention):
        assert penalty(1e-3, 0.0).convention == "relative to the mean diagonal of the centred Gram"
        assert penalty(1e-3, 0.0, True).convention.endswith("of each block of the centred Gram")
