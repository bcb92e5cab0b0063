"""Moments: one pass, merged shards and selections agree with plain sums over the raw rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Features
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import TOKENS, Moments
from tests.samples import Samples, assert_same, make_samples, off, reference_r2, relative_error, rounding, tensors_of

WIDER = Features("wider", kinds="same", previous=2)
ALL = [*DESIGNS.values(), WIDER]


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("features", ALL, ids=lambda f: f.name)
def test_a_selection_of_blocks_equals_the_raw_rows(features: Features, mean: float) -> None:
    samples = make_samples(features, mean=mean)
    moments = samples.moments(batch=37)
    for kind in KINDS:
        blocks, outputs = features.blocks(kind, [2, 0]), [(1, kind), (0, kind)]
        x, y = samples.design(blocks), samples.targets(outputs)
        a, b = x - x.mean(0), y - y.mean(0)
        assert relative_error(moments.design(blocks), a.T @ a) < 1e-9
        assert relative_error(moments.targets(blocks, outputs), a.T @ b) < 1e-9
        assert relative_error(moments.mean_of(blocks), x.mean(0)) < 1e-12
        assert relative_error(moments.mean_target(outputs), y.mean(0)) < 1e-12
        assert relative_error(moments.variance_target(outputs), (b * b).sum(0)) < 1e-9


def test_blocks_keep_the_order_they_are_asked_in() -> None:
    samples = make_samples(DESIGNS["previous"])
    blocks = (Block(2, "values"), Block(0, "keys", -1), Block(2, "keys"))
    x = samples.design(blocks)
    a = x - x.mean(0)
    assert relative_error(samples.moments().design(blocks), a.T @ a) < 1e-9


@pytest.mark.parametrize("cuts", [[], [200], [1, 2, 399], list(range(40, 400, 40)), [0, 0, 150, 400]], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_merged_shares_equal_one_pass(cuts: list[int], mean: float) -> None:
    """Any number of shares, some of one token, some empty."""
    samples = make_samples(DESIGNS["both"], mean=mean)
    bounds = zip([0, *cuts], [*cuts, 400], strict=True)
    shares = [samples.part(start, stop).moments() for start, stop in bounds]
    merged = shares[0]
    for share in shares[1:]:
        merged = merged.merge(share)
    assert_same(merged, samples.moments())


def test_the_order_and_grouping_of_merges_do_not_matter() -> None:
    samples = make_samples(DESIGNS["same"], mean=50.0)
    a, b, c = (samples.part(start, stop).moments() for start, stop in ((0, 30), (30, 31), (31, 400)))
    assert_same(c.merge(b.merge(a)), a.merge(b).merge(c))


def test_empty_moments_merge_to_empty_ones_and_answer_without_nan() -> None:
    layout = make_samples(DESIGNS["same"]).layout
    merged = Moments(layout).merge(Moments(layout))
    merged.update(torch.zeros(0, layout.starts[-1]), torch.zeros(0, len(layout.outputs), layout.width))
    assert merged.count == 0
    assert all(torch.isfinite(tensor).all() for tensor in tensors_of(merged).values())


def test_one_token_has_no_variance() -> None:
    moments = make_samples(DESIGNS["same"], mean=1000.0).part(0, 1).moments()
    assert float(moments.design((Block(0, "keys"),)).abs().max()) == 0.0


def test_moments_go_on_after_a_merge() -> None:
    samples = make_samples(DESIGNS["same"])
    merged = samples.part(0, 100).moments().merge(samples.part(100, 200).moments())
    merged.update(samples.x[200:].double(), samples.y[200:].double())
    assert_same(merged, samples.moments())


def test_other_layouts_are_not_merged() -> None:
    with pytest.raises(KvxferError, match="cannot be merged"):
        make_samples(DESIGNS["same"]).moments().merge(make_samples(DESIGNS["both"]).moments())


@pytest.mark.parametrize("features", ALL, ids=lambda f: f.name)
def test_held_out_r2_from_moments_equals_that_from_samples(features: Features) -> None:
    samples = make_samples(features, mean=20.0)
    generator = torch.Generator().manual_seed(5)
    for kind in KINDS:
        blocks, outputs = features.blocks(kind, [0, 1]), [(0, kind), (1, kind)]
        x, y = samples.design(blocks), samples.targets(outputs)
        weight = torch.randn(x.shape[1], y.shape[1], generator=generator, dtype=torch.float64) * 0.1
        bias = torch.randn(y.shape[1], generator=generator, dtype=torch.float64)
        found = HeldOut(samples.moments(), blocks, outputs).r2(weight, bias)
        for n, score in enumerate(found):
            columns = slice(n * 6, (n + 1) * 6)
            expected = reference_r2(x, y[:, columns], weight[:, columns], bias[columns], heads=2)
            assert float((score - expected).abs() / expected.abs()) < 1e-8


@pytest.mark.parametrize("value", [0.0, 1.1, 1e4])
def test_a_head_that_does_not_vary_counts_as_zero(value: float) -> None:
    """And so does everything where there is one token only: no infinity gets into a report."""
    samples = make_samples(DESIGNS["same"], mean=5.0)
    samples.y[:, 0, :3] = value
    blocks, outputs = DESIGNS["same"].blocks("keys", [0]), [(0, "keys")]
    weight, bias = torch.full((6, 6), 0.1).double(), samples.targets(outputs).mean(0)
    score = HeldOut(samples.moments(), blocks, outputs).r2(weight, bias)
    varying = samples.y[:, 0, 3:].double()
    residual = (samples.design(blocks) @ weight[:, 3:] + bias[3:] - varying).square().sum()
    expected = (1 - residual / (varying - varying.mean(0)).square().sum()) / 2
    assert float(score) == pytest.approx(float(expected), rel=1e-8)
    assert float(HeldOut(samples.part(0, 1).moments(), blocks, outputs).r2(weight, bias)) == 0.0


def test_same_keeps_no_product_of_keys_with_values() -> None:
    layout = make_samples(DESIGNS["same"]).layout
    for i, block in enumerate(layout.blocks):
        assert {layout.blocks[j].kind for j in layout.products[i]} == {block.kind}
        assert {layout.outputs[o][1] for o in layout.targets[i]} == {block.kind}


def test_missing_products_and_blocks_are_refused_by_name() -> None:
    moments = make_samples(DESIGNS["same"]).moments()
    with pytest.raises(KvxferError, match=r"keys\.0, values\.1.*calibration\.features=both"):
        moments.design((Block(0, "keys"), Block(1, "values")))
    with pytest.raises(KvxferError, match=r"keys\.0 with the target's values.*calibration\.features=both"):
        moments.targets((Block(0, "keys"),), [(0, "values")])
    with pytest.raises(KvxferError, match=r"no block keys\.0@-1"):
        moments.design((Block(0, "keys", -1),))


@pytest.mark.parametrize("features", ALL, ids=lambda f: f.name)
def test_bytes_of_the_layout_are_those_of_the_tensors(features: Features) -> None:
    samples = make_samples(features)
    state = Moments(samples.layout).state()
    assert samples.layout.bytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def test_richer_designs_keep_more_and_serve_the_leaner() -> None:
    sizes = [make_samples(DESIGNS[name]).layout.bytes for name in ("same", "both", "previous")]
    assert sizes == sorted(sizes)
    assert DESIGNS["previous"].covers(DESIGNS["same"])
    assert not DESIGNS["same"].covers(DESIGNS["both"])
    samples = make_samples(DESIGNS["previous"])
    blocks = DESIGNS["same"].blocks("values", [0, 2])
    x = samples.design(blocks)
    a = x - x.mean(0)
    assert relative_error(samples.moments().design(blocks), a.T @ a) < 1e-9


def test_layout_and_moments_come_back_from_disk_bit_by_bit(tmp_path: Path) -> None:
    samples: Samples = make_samples(DESIGNS["previous"])
    assert Layout.from_dict(samples.layout.to_dict()) == samples.layout
    moments = samples.moments()
    moments.save(tmp_path / "fit.safetensors")
    loaded = Moments.load(tmp_path / "fit.safetensors")
    assert (loaded.count, loaded.layout) == (moments.count, moments.layout)
    assert all(torch.equal(loaded.state()[name], tensor) for name, tensor in moments.state().items())


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "gone"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.safetensors"
    make_samples(DESIGNS["same"]).moments().save(path)
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": path.read_bytes()[:-100], "empty": b"", "other": b"\x02" + b"\0" * 7 + b"{}"}[damage])
    with pytest.raises(KvxferError, match=r"fit\.safetensors.*force=true"):
        Moments.load(path)


def test_block_names_round_trip_and_wrong_ones_are_refused() -> None:
    for block in (Block(12, "keys"), Block(3, "values", -1)):
        assert Block.parse(block.name) == block
    for name in ("queries.1", "keys.x", "keys", ""):
        with pytest.raises(KvxferError, match="no block name"):
            Block.parse(name)


def hard_samples(tokens: int = 6000) -> Samples:
    """Means of 1,000 deviations, near-duplicate columns, and 10⁶ between the columns' scales."""
    samples = make_samples(DESIGNS["same"], tokens=tokens)
    generator = torch.Generator().manual_seed(3)
    scales = 10.0 ** torch.linspace(-3, 3, samples.x.shape[1])
    x = samples.x / samples.x.std(0)
    x[:, 1] = x[:, 0] + 1e-4 * torch.randn(tokens, generator=generator)
    return replace(samples, x=(x + 1000) * scales, y=samples.y * 1e-3 + 1)


@pytest.mark.parametrize("weighted", [False, True])
def test_float32_products_are_within_the_bound_of_the_text(weighted: bool, tmp_path: Path) -> None:
    """Of every entry by itself, on hard data, and from a finished split's file."""
    samples = hard_samples()
    weights = make_weights(len(samples.x)) if weighted else None
    samples.moments(4064, weights, torch.float32).finish(tmp_path / "fit.safetensors", torch.float32)
    found, exact = Moments.load(tmp_path / "fit.safetensors"), samples.moments(4064, weights)
    assert (found.dtype, exact.dtype) == (torch.float32, torch.float64)
    bound = rounding(TOKENS) / 10
    for kind in KINDS:
        blocks, outputs = DESIGNS["same"].blocks(kind, [0, 1, 2]), [(0, kind), (1, kind)]
        x, y = exact.design(blocks).diagonal().sqrt(), exact.variance_target(outputs).sqrt()
        assert 0 < off(found.design(blocks), exact.design(blocks)) < bound
        error = (found.targets(blocks, outputs) - exact.targets(blocks, outputs)).abs() / torch.outer(x, y)
        assert float(error.max()) < bound
        spread = (found.mean_of(blocks) - exact.mean_of(blocks)).abs() / (x / exact.count**0.5)
        assert float(spread.max()) < bound
        assert relative_error(found.variance_target(outputs), exact.variance_target(outputs)) < bound


@pytest.mark.parametrize("lam", [1e-6, 1e-4, 1e-2])
def test_float32_products_leave_what_ridge_predicts(lam: float) -> None:
    """On near-duplicate columns with large means, at every λ that rounding leaves to be chosen."""
    samples = hard_samples()
    samples = replace(samples, x=samples.x / samples.x.std(0))
    blocks, outputs = DESIGNS["same"].blocks("keys", [0, 1, 2]), [(0, "keys"), (1, "keys")]
    scores = []
    for dtype in (torch.float32, torch.float64):
        fit, held = (samples.part(*span).moments(dtype=dtype) for span in ((0, 4000), (4000, None)))
        weight, used = Gram(fit.design(blocks)).ridge(fit.targets(blocks, outputs), lam)
        assert used == lam
        bias = fit.mean_target(outputs) - fit.mean_of(blocks) @ weight
        scores.append(HeldOut(held, blocks, outputs).r2(weight, bias))
    assert float((scores[0] - scores[1]).abs().max()) < 1e-6


def test_columns_of_any_size_are_multiplied_without_overflow() -> None:
    samples = make_samples(DESIGNS["same"])
    scales = 2.0 ** torch.linspace(-80, 80, samples.x.shape[1]).round()
    sized = replace(samples, x=samples.x * scales).moments(dtype=torch.float32)
    blocks = DESIGNS["same"].blocks("keys", [0, 1, 2])
    columns = samples.layout.columns([samples.layout.blocks.index(block) for block in blocks])
    own = scales.double()[columns]
    plain = samples.moments(dtype=torch.float32).design(blocks)
    assert torch.equal(sized.design(blocks), plain * own[:, None] * own)


def make_weights(tokens: int, seed: int = 7) -> torch.Tensor:
    """Uneven weights, some of them 0."""
    drawn = torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn - 0.2).clamp_min(0) * 3


@pytest.mark.parametrize("cuts", [[], [1, 150, 399]], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_weighted_moments_equal_weighted_sums_over_the_raw_rows(cuts: list[int], mean: float, tmp_path: Path) -> None:
    """In one pass, in merged shares, and from disk."""
    samples, weights = make_samples(DESIGNS["both"], mean=mean), make_weights(400)
    bounds = list(zip([0, *cuts], [*cuts, 400], strict=True))
    shares = [samples.part(start, stop).moments(37, weights[start:stop]) for start, stop in bounds]
    moments = shares[0]
    for share in shares[1:]:
        moments = moments.merge(share)
    moments.save(tmp_path / "fit.safetensors")
    moments = Moments.load(tmp_path / "fit.safetensors")
    blocks, outputs = DESIGNS["both"].blocks("keys", [0, 2]), [(1, "keys")]
    x, y, w = samples.design(blocks), samples.targets(outputs), weights[:, None]
    mean_x, mean_y = (w * x).sum(0) / w.sum(), (w * y).sum(0) / w.sum()
    a, b = x - mean_x, y - mean_y
    assert relative_error(moments.mean_of(blocks), mean_x) < 1e-12
    assert relative_error(moments.mean_target(outputs), mean_y) < 1e-12
    assert relative_error(moments.design(blocks), a.T @ (w * a)) < 1e-9
    assert relative_error(moments.targets(blocks, outputs), a.T @ (w * b)) < 1e-9
    assert relative_error(moments.variance_target(outputs), (w * b * b).sum(0)) < 1e-9
    assert moments.count == pytest.approx(float(w.sum()))
    assert moments.effective == pytest.approx(float(w.sum() ** 2 / (w * w).sum()))
    held = HeldOut(moments, blocks, outputs)
    weight, bias = torch.full((24, 6), 0.1).double(), torch.ones(6).double()
    residual = (w * (x @ weight + bias - y) ** 2).sum(0)
    assert relative_error(held.residual(weight, bias), residual) < 1e-9


def test_equal_weights_change_nothing() -> None:
    samples = make_samples(DESIGNS["same"], mean=5.0)
    plain, weighted = samples.moments(), samples.moments(weights=torch.full((400,), 2.0))
    blocks = DESIGNS["same"].blocks("keys", [0, 1])
    assert relative_error(weighted.design(blocks), 2 * plain.design(blocks)) < 1e-12
    assert weighted.effective == plain.effective == 400
    assert Moments(samples.layout).effective == 0


KEPT = ((0, 2), (1, 2))


@pytest.mark.parametrize("features", ALL, ids=lambda f: f.name)
def test_moments_of_kept_layers_are_those_that_target_layers_read(features: Features) -> None:
    samples = make_samples(features, tokens=256, mean=3.0).whole()
    kept = replace(samples, layout=make_samples(features, kept=KEPT).layout)
    assert kept.layout.blocks == samples.layout.blocks
    assert kept.layout.pairs < samples.layout.pairs
    assert kept.layout.bytes < samples.layout.bytes
    assert [kept.layout.candidates(layer) for layer in range(2)] == list(KEPT)
    assert Layout.from_dict(kept.layout.to_dict()) == kept.layout
    some, everything = kept.moments(), samples.moments()
    for kind in KINDS:
        for layer, layers in enumerate(KEPT):
            blocks, output = features.blocks(kind, layers), [(layer, kind)]
            assert torch.equal(some.design(blocks), everything.design(blocks))
            assert torch.equal(some.targets(blocks, output), everything.targets(blocks, output))
        with pytest.raises(KvxferError, match="hold no product"):
            some.targets(features.blocks(kind, [1]), [(0, kind)])
        with pytest.raises(KvxferError, match="hold no product"):
            some.design(features.blocks(kind, [0, 1]))


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "kept"])
@pytest.mark.parametrize("features", ALL, ids=lambda f: f.name)
def test_what_one_target_layer_reads(features: Features, kept: Any) -> None:
    samples = make_samples(features, tokens=256, kept=kept).whole()
    everything = samples.moments()
    for layer in range(2):
        own = samples.only(layer).moments()
        assert own.layout.outputs == ((layer, "keys"), (layer, "values"))
        for kind in KINDS:
            blocks = features.blocks(kind, samples.layout.candidates(layer))
            assert torch.equal(own.design(blocks), everything.design(blocks))
            assert torch.equal(own.targets(blocks, [(layer, kind)]), everything.targets(blocks, [(layer, kind)]))
            assert torch.equal(own.variance_target([(layer, kind)]), everything.variance_target([(layer, kind)]))


def test_single_source_layers_need_no_products_with_others() -> None:
    samples = make_samples(DESIGNS["both"], tokens=256).whole()
    single = replace(samples, layout=samples.layout.singles()).moments()
    blocks = DESIGNS["both"].blocks("keys", [1])
    assert torch.equal(single.design(blocks), samples.moments().design(blocks))
    with pytest.raises(KvxferError, match="hold no product"):
        single.design(DESIGNS["both"].blocks("keys", [0, 1]))
