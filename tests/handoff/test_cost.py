"""What a whole handoff costs, against a count token by token."""

from __future__ import annotations

import pytest
import torch

from kvxfer.handoff.cost import handoff_flops, handoff_share
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.plan import Plan
from kvxfer.models.geometry import Geometry, Rotary
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import load_config
from kvxfer.models.spec import ModelSpec
from kvxfer.toy import TARGET_DIR

SHAPE = {"architecture": "Tiny", "hidden": 32, "vocabulary": 50, "window": None, "max_positions": 64}
TINY = Geometry(
    **SHAPE,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rotary=Rotary("default", 1e4, 8),
    attention=("full_attention",) * 2,
    body_parameters=1000,
)
TOY_PROMPT = 130
"""Tokens of the README's questions: stories of 128 and what asks about them."""


def map_of(target: Geometry, features: str, sources: int) -> CacheMap:
    """A map that reads all source layers, whose heads are the target's."""
    width = target.kv_width
    layers = {}
    for layer in range(target.layers):
        for kind in KINDS:
            blocks = DESIGNS[features].blocks(kind, range(sources))
            layers[layer, kind] = LinearLayer(blocks, torch.zeros(1, len(blocks) * width, width), torch.zeros(width))
    return CacheMap(layers, {})


def test_tokens_that_the_target_reads_cost_what_they_attend_to() -> None:
    """Of 20 tokens the 1st to 3rd, 19th and 20th are read: 2 for a weight, 2 x 2 x 2 x 4 x 8 for a token looked at.

    The other 15 are mapped, by four products of 16 with 16 and a bias each.
    """
    cache_map = map_of(TINY, "same", 1)
    assert cache_map.flops_per_token == 4 * (2 * 16 * 16 + 16)
    read = 5 * 2 * 1000 + 256 * (1 + 2 + 3 + 19 + 20)
    whole = 20 * 2 * 1000 + 256 * sum(range(1, 21))
    plan = Plan("sinks", exact_first=3, hold_back=2)
    assert handoff_flops(cache_map, TINY, plan, 20) == pytest.approx(read + 15 * 2112)
    assert handoff_share(cache_map, TINY, plan, 20) == pytest.approx((read + 15 * 2112) / whole)


def test_a_handoff_of_nothing_is_the_prefill() -> None:
    assert handoff_share(map_of(TINY, "both", 3), TINY, Plan("sinks", exact_first=9, hold_back=1), 8) == pytest.approx(
        1
    )


@pytest.mark.parametrize(
    ("features", "own", "whole"), [("same", 0.059, 0.094), ("both", 0.118, 0.150), ("previous", 0.235, 0.263)]
)
def test_the_toy_pair_s_shares(features: str, own: float, whole: float) -> None:
    target = read_geometry(load_config(ModelSpec(str(TARGET_DIR)), "pair.target"), "toy-target")
    cache_map = map_of(target, features, 3)
    assert cache_map.flops_per_token / target.prefill_flops(TOY_PROMPT) == pytest.approx(own, abs=5e-4)
    assert handoff_share(cache_map, target, Plan("sinks"), TOY_PROMPT) == pytest.approx(whole, abs=5e-4)
