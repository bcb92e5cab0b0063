"""A map's random twin: as large as the map, and worth nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvxfer.fitting.closed import HeadLocal
from kvxfer.fitting.dials import Reduced
from kvxfer.fitting.random_maps import random_map
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.random_weights import random_twin
from kvxfer.models.pair import Pair
from tests import random_maps
from tests.benchmark_scripts import load_benchmark
from tests.exact_maps import mapped_content

HEADS = 2
FORMS = ["full", "head_local", "low_rank", "trunks"]


def made(pair: Pair, form: str, monkeypatch: pytest.MonkeyPatch) -> CacheMap:
    if form == "full":
        return random_maps.random_map(pair, DESIGNS["previous"])
    rank = {"rank": Reduced(0.5)} if form == "low_rank" else {}
    drawn = random_map(pair, HeadLocal(k=2, features=DESIGNS["both"], **rank), {})
    biases = {output: replace(layer, bias=torch.arange(64.0)) for output, layer in drawn.layers.items()}
    drawn = CacheMap(biases, {})
    if form != "trunks":
        return drawn
    return load_benchmark("apply", monkeypatch).with_random_trunks(drawn, 24, 2, True, False)


@pytest.mark.parametrize("form", FORMS)
def test_every_key_and_value_is_as_long_as_the_map_s(
    tiny_pair: Pair, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_map, ids = made(tiny_pair, form, monkeypatch), torch.arange(5, 25).view(2, 10)
    twin = random_twin(cache_map, HEADS)
    assert (twin.form, twin.parameters, twin.blocks) == (cache_map.form, cache_map.parameters, cache_map.blocks)
    own, other = (mapped_content(tiny_pair, Mapper(each, pair=tiny_pair), ids) for each in (cache_map, twin))
    for kind in KINDS:
        for mine, theirs in zip(getattr(own, kind), getattr(other, kind), strict=True):
            assert torch.allclose(mine.norm(dim=-1), theirs.norm(dim=-1), rtol=1e-4, atol=1e-4)
            cosine = torch.nn.functional.cosine_similarity(mine, theirs, dim=-1)
            assert cosine.abs().mean() < 0.4


def test_the_seed_alone_decides_it_and_every_output_has_its_own(
    tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_map = made(tiny_pair, "full", monkeypatch)
    one, again, other = (random_twin(cache_map, HEADS, seed) for seed in (0, 0, 1))
    for output, layer in one.layers.items():
        assert torch.equal(layer.weight, again.layers[output].weight)
        assert not torch.allclose(layer.weight, other.layers[output].weight, atol=1e-3)
    same = replace(cache_map, layers=dict.fromkeys(cache_map.layers, cache_map.layers[0, "keys"]))
    weights = [layer.weight for layer in random_twin(same, HEADS).layers.values()]
    assert all(not torch.allclose(weights[0], weight, atol=1e-3) for weight in weights[1:])
