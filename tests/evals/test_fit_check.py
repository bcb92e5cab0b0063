"""R² over the mapped tokens, and what its drop against the fit's own says."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.fit_check import TOLERATED_DROP, check_fit, recorded_r2
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import Output
from kvxfer.maps.content_errors import ContentErrors, content_errors, mapped_content
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from tests.exact_maps import changed, exact_map, record_fit, with_itself

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
    whole = content_errors(pair, mapper, PLAN, ids).by_output[output]
    assert whole.r2() == pytest.approx(expected, abs=1e-6)
    assert 0 < expected < 0.95
    parts = ContentErrors()
    true, mapped = pair.content("target", pair.target.prefill(ids)), mapped_content(pair, mapper, ids)
    for rows in (slice(0, 1), slice(1, 4)):
        parts.add(*(getattr(kv, output[1])[output[0]][rows, :, 2:-3] for kv in (true, mapped)))
    assert parts.r2() == pytest.approx(whole.r2(), abs=1e-9)


def test_a_head_that_does_not_vary_counts_as_zero():
    errors = ContentErrors()
    true = torch.randn(2, 2, 40, 3)
    true[:, 1] = 1000.1
    errors.add(true, true)
    assert errors.r2() == pytest.approx(0.5)


def test_an_exact_map_passes_and_a_broken_layer_is_named(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    record_fit(tmp_path, cache_map)
    good = check_fit(pair, Mapper(cache_map), cache_map, tmp_path, PLAN, ids)
    assert good["passed"]
    assert good["tokens"] == 4 * (30 - 3 - 2)
    assert all(row["r2"] == pytest.approx(1, abs=1e-4) for row in good["outputs"])
    broken = changed(cache_map, 1, "keys", 0.0)
    bad = check_fit(pair, Mapper(broken), broken, tmp_path, PLAN, ids)
    assert [(row["layer"], row["kind"]) for row in bad["below"]] == [(1, "keys")]
    assert bad["worst"]["drop"] > TOLERATED_DROP
    json.dumps(bad, allow_nan=False)


def test_numbers_that_are_not_finite_are_the_worst(pair, ids, tmp_path):
    cache_map = changed(exact_map(pair), 2, "values", float("nan"))
    record_fit(tmp_path, cache_map)
    check = check_fit(pair, Mapper(cache_map), cache_map, tmp_path, PLAN, ids)
    assert (check["worst"]["layer"], check["worst"]["kind"], check["worst"]["r2"]) == (2, "values", None)
    json.dumps(check, allow_nan=False)


def test_without_a_record_there_is_nothing_to_compare(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    mapper = Mapper(cache_map)
    assert check_fit(pair, mapper, cache_map, tmp_path, PLAN, ids) is None
    record_fit(tmp_path, CacheMap({o: part for o, part in cache_map.layers.items() if o[0] < 2}, {}))
    with pytest.raises(KvxferError, match="record of another map"):
        check_fit(pair, mapper, cache_map, tmp_path, PLAN, ids)
    (tmp_path / DIAGNOSTICS).write_text("[]")
    with pytest.raises(KvxferError, match="no record of a fit"):
        recorded_r2(tmp_path)


def test_too_few_tokens_are_refused(pair, ids, tmp_path):
    cache_map = exact_map(pair)
    record_fit(tmp_path, cache_map)
    with pytest.raises(KvxferError, match="give 64 or more"):
        check_fit(pair, Mapper(cache_map), cache_map, tmp_path, PLAN, ids[:1])
