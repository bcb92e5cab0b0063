"""Which source layers, and how many: choices made out of sample, where the answer is planted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvxfer.fitting.closed import Fit, Ridge, Splits
from kvxfer.fitting.closed.engine import AUTO_LOSS
from kvxfer.fitting.dials import LAM_GRID, Isotropic, Reduced
from kvxfer.maps.blocks import DESIGNS, KINDS, Block
from kvxfer.report.fit_figures import tried
from tests.samples import Samples, make_samples, make_splits

BOTH = DESIGNS["both"]


def fit(splits: Splits, solver: Any = Ridge, **options: Any) -> Fit:
    return solver(**{"k": 2, "features": BOTH, "penalty": Isotropic(1e-3), **options}).fit(splits)


def complementary(tokens: int = 800) -> Samples:
    """Layer 0 is the best single layer and layer 1 nearly a copy of it; layer 2 alone knows the rest."""
    samples = make_samples(BOTH, tokens=tokens)
    samples = replace(samples, x=samples.x.clone(), y=samples.y.clone())
    draw = torch.Generator().manual_seed(8)
    for kind in KINDS:
        first, second, third = (torch.randn(tokens, 6, generator=draw) for _ in range(3))
        samples.block(Block(0, kind))[:] = first
        samples.block(Block(1, kind))[:] = first + 0.1 * second
        samples.block(Block(2, kind))[:] = third
        for target in range(2):
            samples.y[:, samples.layout.outputs.index((target, kind))] = first + 0.7 * third
    return samples


@pytest.mark.parametrize("criterion", ["r2", "query", "attention"])
@pytest.mark.parametrize("selection", ["shared", "separate"])
def test_greedy_selection_sees_what_single_scores_miss(criterion: str, selection: str) -> None:
    splits = make_splits(complementary())
    found = {m: fit(splits, method=m, criterion=criterion, selection=selection) for m in ("topk", "greedy")}
    assert set(found["topk"].selection.chosen.values()) == {(0, 1)}
    assert all(2 in layers for layers in found["greedy"].selection.chosen.values())
    for ours, theirs in zip(found["greedy"].diagnostics, found["topk"].diagnostics, strict=True):
        assert ours["validation"] >= theirs["validation"]


def test_all_layers_need_no_k() -> None:
    found = fit(make_splits(complementary()), k=1, method="all")
    assert set(found.selection.chosen.values()) == {(0, 1, 2)}


@pytest.mark.parametrize("planted", [1, 2, 4])
def test_auto_k_finds_what_is_there(planted: int) -> None:
    """The other layers are noise, of which few rows make overfitting."""
    samples = make_samples(BOTH, tokens=240, source_layers=4)
    y = samples.y.clone()
    for i, (_, kind) in enumerate(samples.layout.outputs):
        y[:, i] = sum(samples.block(Block(layer, kind)) for layer in range(planted))
    y += 0.5 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    found = fit(make_splits(replace(samples, y=y)), k="auto", penalty=Isotropic(1e-9))
    assert [k for k, _ in found.curves["k"]] == [1, 2, 4]
    assert {len(layers) for layers in found.selection.chosen.values()} == {planted}


@pytest.mark.parametrize("selection", ["shared", "separate"])
def test_auto_k_may_differ_between_target_layers(selection: str) -> None:
    """Target layer 0 is a function of one source layer and layer 1 of all four; only its values, if separate."""
    samples = make_samples(BOTH, tokens=240, source_layers=4)
    y = samples.y.clone()
    for i, (target, kind) in enumerate(samples.layout.outputs):
        many = target == 1 and (selection == "shared" or kind == "values")
        y[:, i] = sum(samples.block(Block(layer, kind)) for layer in range(4 if many else 1))
    y += 0.5 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    splits = make_splits(replace(samples, y=y))
    options = {"k": "auto", "selection": selection, "penalty": Isotropic(1e-9)}
    found, one = (fit(splits, k_per=k_per, **options) for k_per in ("layer", "pair"))
    k = {output: len(layers) for output, layers in found.selection.chosen.items()}
    many = {(1, kind) for kind in KINDS if selection == "shared" or kind == "values"}
    assert k == {output: 4 if output in many else 1 for output in k}
    assert len({len(layers) for layers in one.selection.chosen.values()}) == 1
    for (layer, kind), best in k.items():
        curve = found.curves["k_outputs"][f"{kind}.{layer}"]
        assert [tried for tried, _ in curve] == [1, 2, 4]
        assert max(curve, key=lambda point: point[1])[0] == best
    # the mean of the single curves is the pair's
    mean = [sum(curve[n][1] for curve in found.curves["k_outputs"].values()) / 4 for n in range(3)]
    assert mean == pytest.approx([score for _, score in one.curves["k"]])
    assert set(tried(found.curves)["k"]) == set(found.curves["k_outputs"])


def test_the_attention_criterion_chooses_lam_by_the_probe() -> None:
    """What each fixed λ scores on the probe is the curve that the choice is made on."""
    splits = make_splits(make_samples(BOTH, tokens=200))
    found = fit(splits, criterion="attention", penalty=Isotropic("auto"))
    fixed = {lam: fit(splits, criterion="attention", penalty=Isotropic(lam)).diagnostics for lam in (1e-3, 1.0)}
    for n, record in enumerate(found.diagnostics):
        curve = {lam: score for lam, _, score in found.curves["penalty"][f"{record['kind']}.{record['layer']}"]}
        for lam, records in fixed.items():
            assert curve[lam] == pytest.approx(records[n]["attention_score"], abs=1e-5)
        assert record["validation"] == pytest.approx(max(curve.values()), abs=1e-6)
        assert record["attention_score"] == pytest.approx(record["validation"], abs=1e-5)


@pytest.mark.parametrize("criterion", ["r2", "query", "attention"])
def test_lam_k_and_rank_all_follow_the_criterion(criterion: str) -> None:
    """What was chosen does best, or well enough, by the score that the criterion gives to fits at each value."""
    splits = make_splits(make_samples(BOTH, tokens=120, mean=3.0))

    def scores(**options: Any) -> dict[tuple[int, str], float]:
        return {
            (d["layer"], d["kind"]): d["validation"] for d in fit(splits, criterion=criterion, **options).diagnostics
        }

    by_lam = {lam: scores(penalty=Isotropic(lam)) for lam in LAM_GRID}
    for record in fit(splits, criterion=criterion, penalty=Isotropic("auto")).diagnostics:
        own = {lam: found[record["layer"], record["kind"]] for lam, found in by_lam.items()}
        assert own[record["lam"]] == pytest.approx(max(own.values()), abs=1e-6)
    by_k = {k: sum(scores(k=k).values()) for k in (1, 2, 3)}
    chosen = fit(splits, criterion=criterion, k="auto").selection.chosen
    assert {len(layers) for layers in chosen.values()} == {max(by_k, key=lambda k: by_k[k])}
    by_rank = {r: scores(rank=Reduced(r)) for r in (1, 2, 3, 4)} | {6: scores()}
    for record in fit(splits, criterion=criterion, rank=Reduced("auto")).diagnostics:
        own = {r: found[record["layer"], record["kind"]] for r, found in by_rank.items()}
        assert record["rank"] == next(r for r, score in own.items() if score >= own[6] - AUTO_LOSS)
