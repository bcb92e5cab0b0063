"""One suite for every solver: what a map must be whatever fitted it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed import SOLVERS, Fit, Splits, design
from kvxfer.fitting.closed.engine import EDGE_GAIN
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.dials import LAM_GRID
from kvxfer.maps.blocks import DESIGNS, KINDS, Features, Output
from tests.samples import Samples, make_samples, make_splits, reference_metric_r2, reference_r2, relative_error
from tests.solver_matrix import SOLVER_MATRIX, Case, pairwise

EVERY_SOLVER = pytest.mark.parametrize("case", SOLVER_MATRIX.values(), ids=SOLVER_MATRIX.keys())
EVERY_PAIR = [(case, DESIGNS[name]) for case in SOLVER_MATRIX.values() for name in case.designs]
PAIR_NAMES = [f"{case}-{name}" for case, each in SOLVER_MATRIX.items() for name in each.designs]
EVERY_SOLVER_AND_DESIGN = pytest.mark.parametrize(("case", "features"), EVERY_PAIR, ids=PAIR_NAMES)
DEGENERATE = (
    "duplicate columns",
    "equal layers",
    "a constant column",
    "all columns constant",
    "fewer tokens than features",
)

EVERY_DESIGN = pytest.mark.parametrize("features", DESIGNS.values(), ids=lambda f: f.name)
WIDTH, HEADS, TOKENS = 6, 2, 1200


@functools.cache
def known(features: Features, **options: Any) -> tuple[Samples, Splits]:
    """Samples of a design and their splits, made once for all solvers: none may change what it is given."""
    samples = make_samples(features, **options)
    return samples, make_splits(samples)


def fit_of(case: Case, splits: Splits, features: Features, lam: Any = 1e-3, k: int = 2, mode: str = "shared") -> Fit:
    """Fit, and check what holds of every fit."""
    advances: list[None] = []
    solver = case.build(features, lam, k, mode)
    fit = solver.fit(splits, lambda: advances.append(None))
    assert len(advances) == solver.steps(splits.fit)
    json.dumps([fit.diagnostics, fit.curves, fit.selection.to_dict()], allow_nan=False)
    for layer in fit.layers.values():
        assert layer.weight.dtype == layer.bias.dtype == torch.float32
        assert torch.isfinite(layer.weight).all()
        assert torch.isfinite(layer.bias).all()
    return fit


def raw(samples: Samples, fit: Fit) -> Iterator[tuple[Output, Any, Tensor, Tensor]]:
    """Every output with its layer, its design's raw columns and its own."""
    for output, layer in fit.layers.items():
        yield output, layer, samples.design(layer.blocks), samples.targets([output])


def test_every_solver_is_in_the_matrix() -> None:
    assert {case.solver for case in SOLVER_MATRIX.values()} == set(SOLVERS)


@EVERY_SOLVER_AND_DESIGN
@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_a_map_is_complete(case: Case, features: Features, mode: str) -> None:
    _, splits = known(features)
    fit = fit_of(case, splits, features, mode=mode)
    assert list(fit.layers) == [(layer, kind) for kind in KINDS for layer in range(2)]
    assert [(d["layer"], d["kind"]) for d in fit.diagnostics] == list(fit.layers)
    for output, layer in fit.layers.items():
        chosen = fit.selection.chosen[output]
        assert layer.blocks == features.blocks(output[1], chosen)
        features_read = splits.fit.layout.width_of(layer.blocks)
        assert layer.dense().shape == (features_read, WIDTH)
        solver = next(d.get("solver", case.solver) for d in fit.diagnostics if (d["layer"], d["kind"]) == output)
        assert layer.groups == (HEADS if solver == "head_local" else 1)
        assert layer.weight.shape[1] == features_read // layer.groups
        # Candidates of auto choose by themselves.
        if mode == "shared" and case.solver != "auto":
            assert chosen == fit.selection.chosen[output[0], "keys"]


@pytest.mark.parametrize(("case", "features", "lam", "mean"), pairwise((0.0, 1e-9, 1e-2, 10.0), (1000.0, 0.0)))
def test_equals_its_reference_on_the_raw_rows(case: Case, features: Features, lam: float, mean: float) -> None:
    """To 1e-6 as stored, where a column's mean is 1000 times its deviation too."""
    if case.reference is None:
        pytest.skip("this solver has no plain answer")
    samples, splits = known(features, tokens=TOKENS, mean=mean)
    fit = fit_of(case, splits, features, lam)
    assert splits.metrics is not None
    for output, layer, x, y in raw(samples.part(0, TOKENS // 2), fit):
        weight, bias = case.reference(x, y, lam, splits.metrics.by_output[output])
        assert relative_error(layer.dense(), weight) < case.tolerance, output
        assert relative_error(layer.bias, bias) < case.tolerance, output


@EVERY_SOLVER_AND_DESIGN
def test_diagnostics_are_those_of_the_raw_rows(case: Case, features: Features) -> None:
    samples, splits = known(features, tokens=TOKENS, mean=3.0)
    fit = fit_of(case, splits, features)
    assert splits.metrics is not None
    bounds = {"fit": (0, 600), "validation": (600, 900), "held_out": (900, None)}
    records = {(d["layer"], d["kind"]): d for d in fit.diagnostics}
    for split, (start, stop) in bounds.items():
        for output, layer, x, y in raw(samples.part(start, stop), fit):
            solution = layer.dense().double(), layer.bias.double()
            expected = reference_r2(x, y, *solution, HEADS)
            assert records[output][f"r2_{split}"] == pytest.approx(float(expected), rel=1e-5)
            expected = reference_metric_r2(x, y, *solution, splits.metrics.by_output[output])
            assert records[output][f"metric_r2_{split}"] == pytest.approx(float(expected), rel=1e-5)


@EVERY_SOLVER
def test_fits_are_deterministic_and_do_not_depend_on_how_rows_were_shared(case: Case) -> None:
    features = DESIGNS["previous"]
    samples, splits = known(features, mean=10.0)
    shares = [samples.part(start, stop).moments() for start, stop in ((0, 1), (1, 90), (90, 200))]
    merged = replace(splits, fit=shares[0].merge(shares[1]).merge(shares[2]))
    first, again, shared = (fit_of(case, s, features) for s in (splits, splits, merged))
    for output, layer in first.layers.items():
        assert torch.equal(layer.weight, again.layers[output].weight)
        assert torch.equal(layer.bias, again.layers[output].bias)
        assert relative_error(shared.layers[output].dense(), layer.dense().double()) < 1e-6


@functools.cache
def degenerate(name: str, features: Features) -> Splits:
    """Features that determine no unique map."""
    samples = make_samples(features, tokens=12 if name == "fewer tokens than features" else 400)
    samples = replace(samples, x=samples.x.clone())
    source = [block for block in samples.layout.blocks if block.is_source]
    for block in source:
        columns = samples.block(block)
        if name == "duplicate columns":
            # Of one head, so that heads by themselves are singular too.
            columns[:, 4] = columns[:, 3]
        elif name == "equal layers":
            columns[:] = samples.block(source[0])
        elif name == "a constant column":
            columns[:, 4] = 3.1
    if name == "all columns constant":
        samples.x[:] = 0.7
    return make_splits(samples)


@pytest.mark.parametrize(("case", "features", "name", "lam"), pairwise(DEGENERATE, (0.0, 1e-3, 0.0, "auto")))
def test_singular_moments_give_finite_maps_and_a_report(
    case: Case, features: Features, name: str, lam: float | str
) -> None:
    fit = fit_of(case, degenerate(name, features), features, lam)
    raised = [record["raised"] for record in fit.diagnostics]
    assert all(raised) if lam == 0.0 and case.raises else not any(raised)
    for record in fit.diagnostics:
        assert record["raised"] == (record["lam_used"] > record["lam"])
        assert math.isfinite(record["r2_held_out"])


@EVERY_SOLVER
@pytest.mark.parametrize("place", ["gram", "cross"])
def test_moments_that_are_not_finite_are_refused(case: Case, place: str) -> None:
    splits = make_splits(make_samples(DESIGNS["same"]))
    getattr(splits.fit, place)[0].view(-1)[0] = float("nan")
    with pytest.raises(KvxferError, match="not finite"):
        case.build(DESIGNS["same"], 1e-3, 2, "shared").fit(splits, lambda: None)


@EVERY_SOLVER
@pytest.mark.parametrize("k", [4, 99])
def test_more_layers_than_there_are_is_refused(case: Case, k: int) -> None:
    _, splits = known(DESIGNS["same"])
    with pytest.raises(KvxferError, match=rf"solver\.k={k} "):
        case.build(DESIGNS["same"], 1e-3, k, "shared").fit(splits, lambda: None)


@EVERY_SOLVER
def test_a_leaner_design_fits_from_richer_moments(case: Case) -> None:
    samples, rich = known(DESIGNS["previous"], tokens=TOKENS)
    lean = DESIGNS["same"]
    for output, layer, x, y in raw(samples.part(0, TOKENS // 2), fit_of(case, rich, lean)):
        assert {block.kind for block in layer.blocks} == {output[1]}
        if case.reference is not None and rich.metrics is not None:
            weight, _ = case.reference(x, y, 1e-3, rich.metrics.by_output[output])
            assert relative_error(layer.dense(), weight) < case.tolerance


@EVERY_SOLVER
def test_a_richer_design_than_the_moments_is_refused(case: Case) -> None:
    _, splits = known(DESIGNS["same"])
    for name in ("both", "previous"):
        with pytest.raises(KvxferError, match=r"calibration\.features"):
            case.build(DESIGNS[name], 1e-3, 1, "shared").fit(splits, lambda: None)


@functools.cache
def noisy(tokens: int) -> Splits:
    """Outputs that features say nothing about, so that any weight is overfitting."""
    samples = make_samples(DESIGNS["both"], tokens=tokens)
    noise = torch.randn(samples.y.shape, generator=torch.Generator().manual_seed(3))
    return make_splits(replace(samples, y=noise))


@pytest.mark.parametrize(
    ("case", "large"),
    [
        pytest.param(case, large, id=f"{name}-{'noise' if large else 'clean'}")
        for number, (name, case) in enumerate(SOLVER_MATRIX.items())
        # The plain forms meet both; of the others, what one solver meets of a form the next one does not.
        for large in ((True, False) if name in SOLVERS else (number % 2 == 0,))
        if case.automatic  # else λ is chosen before something else changes the map
    ],
)
def test_auto_lam_is_the_best_on_the_validation_split(case: Case, large: bool) -> None:
    """Noise wants the largest λ, which the fit split alone would never choose; clean data want a small one."""
    features = DESIGNS["both"]
    # what is clean for a solver is what it can express
    clean = {"tokens": 400, "noise": 1e-3, "local": case.solver == "head_local"}
    splits = noisy(200) if large else known(features, **clean)[1]
    fit = fit_of(case, splits, features, "auto", k=3)
    # The ends of the path, its middle, and what was chosen of it.
    tried = {*LAM_GRID[:2], LAM_GRID[5], *LAM_GRID[-2:], *(record["lam"] for record in fit.diagnostics)}
    fits = {lam: fit_of(case, splits, features, lam, k=3) for lam in sorted(tried)}
    for n, record in enumerate(fit.diagnostics):
        points = fit.curves["penalty"][f"{record['kind']}.{record['layer']}"]
        curve = [(lam, score) for lam, alpha, score in points if alpha == case.alpha]
        assert [lam for lam, _ in curve] == list(LAM_GRID)
        for lam, score in curve:
            assert lam not in fits or score == pytest.approx(fits[lam].diagnostics[n]["r2_validation"], rel=1e-9)
        assert record["lam"] == max(curve, key=lambda point: point[1])[0]
        # Stored and reported is that λ's own map (but for rounding, which differs with how many are solved at once).
        alone = fits[record["lam"]]
        assert record["r2_validation"] == pytest.approx(alone.diagnostics[n]["r2_validation"], rel=1e-12)
        stored, expected = (each.layers[record["layer"], record["kind"]] for each in (fit, alone))
        assert relative_error(stored.weight, expected.weight.double()) < 1e-6
        assert (record["lam"] == LAM_GRID[-1]) if large else (record["lam"] < 1e-2)
        gain = curve[-1][1] - curve[-2][1] if large else curve[0][1] - curve[1][1]
        assert record["at_grid_edge"] == (record["lam"] in (LAM_GRID[0], LAM_GRID[-1]) and gain > EDGE_GAIN)
        in_sample = [each.diagnostics[n]["r2_fit"] for each in fits.values()]
        assert in_sample == sorted(in_sample, reverse=True)


@EVERY_SOLVER
def test_each_output_has_its_own_lam(case: Case) -> None:
    """One target layer is noise and the other clean: they share a design, not λ."""
    if not case.automatic:
        pytest.skip("this solver takes a number")
    samples = make_samples(DESIGNS["both"], tokens=240, noise=1e-3, local=case.solver == "head_local")
    y = samples.y.clone()
    noise = torch.randn(y[:, 0].shape, generator=torch.Generator().manual_seed(3))
    y[:, samples.layout.outputs.index((1, "keys"))] = noise
    fit = fit_of(case, make_splits(replace(samples, y=y)), DESIGNS["both"], "auto", k=3)
    lam = {(d["layer"], d["kind"]): d["lam"] for d in fit.diagnostics}
    assert lam[1, "keys"] == LAM_GRID[-1]
    assert lam[0, "keys"] < 1e-2


@EVERY_DESIGN
@pytest.mark.parametrize("lam", [1e-3, "auto"])
def test_ridge_solves_identical_subproblems_once(
    features: Features, lam: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One factorisation for every distinct design and λ that some output has, whatever number of them read it."""
    splits, calls = make_splits(make_samples(features, target_layers=5)), []
    solve = Gram.ridge

    def counted(self: Gram, right: Tensor, value: float) -> Any:
        calls.append((len(self.matrix), value))
        return solve(self, right, value)

    monkeypatch.setattr(Gram, "ridge", counted)
    # Of designs this small an eigendecomposition may cost more than a factorisation for every λ.
    monkeypatch.setattr(design, "is_cheaper", lambda *_: True)
    fit = fit_of(SOLVER_MATRIX["ridge"], splits, features, lam)
    designs = {layer.blocks for layer in fit.layers.values()}
    assert len(designs) < len(fit.layers) == 10
    # Single layers, which selection scores, have fewer columns than the designs of two.
    (width,) = {splits.fit.layout.width_of(blocks) for blocks in designs}
    solved = [value for size, value in calls if size == width]
    used = {(layer.blocks, d["lam"]) for layer, d in zip(fit.layers.values(), fit.diagnostics, strict=True)}
    assert sorted(solved) == sorted(value for _, value in used)


def test_wrong_options_are_named() -> None:
    for options, key in (
        ({"k": 0}, r"solver\.k=0"),
        ({"k": 1.5}, r"solver\.k=1\.5"),
        ({"k": "most"}, r"solver\.k=most"),
        ({"k": 1, "selection": "best"}, r"solver\.selection='best'"),
        ({"k": 1, "selection_lam": -1.0}, r"solver\.selection_lam=-1\.0"),
        ({"k": 1, "selection_lam": float("nan")}, r"solver\.selection_lam=nan"),
        ({"k": 1, "selection_lam": "best"}, r"solver\.selection_lam=best must be a number of 0 or more, or auto"),
        ({"k": 1, "method": "random"}, r"solver\.method='random'"),
        ({"k": 1, "criterion": "luck"}, r"solver\.criterion='luck'"),
        ({"k": 1, "pool": 0}, r"solver\.pool=0"),
    ):
        for solver in SOLVERS.values():
            with pytest.raises(KvxferError, match=key):
                solver(**options)  # type: ignore[arg-type]
