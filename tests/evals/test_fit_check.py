"""R² over the tokens that are handed over, and what is left unexplained against the fit's own."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.fit_check import LEAST, TOLERATED, TOLERATED_MEAN, check_fit, handed_errors, recorded_r2
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.content_errors import ContentErrors
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from tests.exact_maps import changed, exact_map, mapped_content, record_fit, with_itself

PLAN = Plan("sinks", exact_first=2, hold_back=3)


@pytest.fixture(scope="module")
def pair(tiny_pair: Pair) -> Pair:
    return with_itself(tiny_pair)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(5, 100, (4, 30), generator=torch.Generator().manual_seed(3))


def direct_r2(pair: Pair, mapper: Mapper, ids: Tensor, layer: int, kind: str) -> float:
    """The definition: heads' R² over the tokens from ``exact_first`` to the hold-back, averaged."""
    true = getattr(pair.content("target", pair.target.prefill(ids)), kind)[layer].double()[:, :, 2:-3]
    mapped = getattr(mapped_content(pair, mapper, ids), kind)[layer].double()[:, :, 2:-3]
    scores = []
    for head in range(true.shape[1]):
        y, z = true[:, head].flatten(0, 1), mapped[:, head].flatten(0, 1)
        scores.append(1 - (y - z).square().sum() / (y - y.mean(0)).square().sum())
    return float(torch.stack(scores).mean())


@pytest.mark.parametrize("output", [(0, "keys"), (1, "values"), (2, "keys")])
def test_r2_is_the_definition_in_batches_too(pair, ids, output: Output):
    cache_map = changed(exact_map(pair), *output, 0.7)
    mapper = Mapper(cache_map)
    expected = direct_r2(pair, mapper, ids, *output)
    whole = handed_errors(Transfer(pair, mapper, PLAN), ids).by_output[output]
    assert whole.r2() == pytest.approx(expected, abs=1e-6)
    assert 0 < expected < 0.95
    parts, together = ContentErrors(), ContentErrors()
    true, mapped = pair.content("target", pair.target.prefill(ids)), mapped_content(pair, mapper, ids)
    for rows in (slice(0, 1), slice(1, 4)):
        parts.add(*(getattr(kv, output[1])[output[0]][rows, :, 2:-3] for kv in (true, mapped)))
    together.add(*(getattr(kv, output[1])[output[0]][:, :, 2:-3] for kv in (true, mapped)))
    assert parts.r2() == pytest.approx(together.r2(), abs=1e-12)


def test_a_head_that_does_not_vary_counts_as_zero():
    errors = ContentErrors()
    true = torch.randn(2, 2, 40, 3)
    true[:, 1] = 1000.1
    errors.add(true, true)
    assert errors.r2() == pytest.approx(0.5)


def test_an_exact_map_passes_and_a_broken_layer_is_named(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    record_fit(tmp_path, cache_map)
    good = check_fit(Transfer(pair, Mapper(cache_map), PLAN), cache_map, tmp_path, ids)
    assert good["passed"]
    assert good["tokens"] == 4 * (30 - 3 - 2)
    assert all(row["r2"] == pytest.approx(1, abs=1e-4) for row in good["outputs"])
    broken = changed(cache_map, 1, "keys", 0.0)
    bad = check_fit(Transfer(pair, Mapper(broken), PLAN), broken, tmp_path, ids)
    assert [(row["layer"], row["kind"]) for row in bad["beyond"]] == [(1, "keys")]
    assert bad["worst"]["ratio"] > TOLERATED
    json.dumps(bad, allow_nan=False)


def test_a_little_everywhere_is_seen_in_the_mean(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    record_fit(tmp_path, cache_map, r2=1 - 0.01)
    scaled = cache_map
    for layer, kind in cache_map.layers:
        scaled = changed(scaled, layer, kind, 1 - 0.01**0.5 * 1.15)
    check = check_fit(Transfer(pair, Mapper(scaled), PLAN), scaled, tmp_path, ids)
    for row in check["outputs"]:
        assert row["ratio"] == pytest.approx(max(1 - row["r2"], LEAST) / 0.01, rel=1e-6)
    ratios = torch.tensor([row["ratio"] for row in check["outputs"]])
    assert check["mean"] == pytest.approx(float(ratios.log().mean().exp()), rel=1e-5)
    assert check["mean"] > TOLERATED_MEAN
    assert not check["passed"]


def test_numbers_that_are_not_finite_are_the_worst(pair, ids, tmp_path):
    cache_map = changed(exact_map(pair), 2, "values", float("nan"))
    record_fit(tmp_path, cache_map)
    check = check_fit(Transfer(pair, Mapper(cache_map), PLAN), cache_map, tmp_path, ids)
    assert (check["worst"]["layer"], check["worst"]["kind"], check["worst"]["r2"]) == (2, "values", None)
    json.dumps(check, allow_nan=False)


def test_without_a_record_there_is_nothing_to_compare(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    transfer = Transfer(pair, Mapper(cache_map), PLAN)
    assert check_fit(transfer, cache_map, tmp_path, ids) is None
    record_fit(tmp_path, CacheMap({o: part for o, part in cache_map.layers.items() if o[0] < 2}, {}))
    with pytest.raises(KvxferError, match="record of another map"):
        check_fit(transfer, cache_map, tmp_path, ids)
    (tmp_path / DIAGNOSTICS).write_text("[]")
    with pytest.raises(KvxferError, match="no record of a fit"):
        recorded_r2(tmp_path)


def test_too_few_tokens_are_refused(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    record_fit(tmp_path, cache_map)
    with pytest.raises(KvxferError, match="give 64 or more"):
        check_fit(Transfer(pair, Mapper(cache_map), PLAN), cache_map, tmp_path, ids[:1])
