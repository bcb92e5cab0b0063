"""What a handoff sends, and the costs that settings give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.latency import Latency
from kvxfer.fitting.closed import Ridge
from kvxfer.fitting.random_maps import random_map
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.random_features import RandomFeatures, RandomRelu
from kvxfer.models.pair import Pair


def map_of(pair: Pair, features: str) -> CacheMap:
    return random_map(pair, Ridge(k=1, features=DESIGNS[features]), {"pair": pair.describe()})


def test_what_travels_is_what_the_source_has(tiny_pair: Pair) -> None:
    width, hidden = tiny_pair.source.geometry.kv_width, tiny_pair.source.geometry.hidden
    both = map_of(tiny_pair, "both")
    layers = {block.layer for block in both.blocks}
    assert both.bytes_from_source_per_token == both.bytes_read_per_token == 2 * 2 * len(layers) * width
    for features in ("embedding", "layer0"):
        # The target looks its own embedding up.
        found = map_of(tiny_pair, features)
        assert found.bytes_from_source_per_token == both.bytes_from_source_per_token < found.bytes_read_per_token
    found = map_of(tiny_pair, "hidden")
    assert found.bytes_from_source_per_token == both.bytes_from_source_per_token + 2 * hidden


def test_random_features_need_all_layers_that_they_read(tiny_pair: Pair) -> None:
    one = map_of(tiny_pair, "same")
    every = range(tiny_pair.source.geometry.layers)
    relu = RandomRelu.draw(2 * len(every) * one.width, 5)
    layers = {output: replace(layer, blocks=layer.blocks[:1]) for output, layer in one.layers.items()}
    found = CacheMap(layers, one.manifest, RandomFeatures(tuple(every), {"random_relu": relu}))
    assert found.bytes_from_source_per_token == 2 * 2 * len(every) * one.width


@pytest.mark.parametrize("key", ["bandwidth", "fit_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0])
def test_a_cost_is_a_finite_number_above_nothing(key: str, value: float) -> None:
    with pytest.raises(KvxferError, match=rf"eval\.{key}=.* must be above 0 and finite"):
        Latency("latency", **{key: value})  # type: ignore[arg-type]
