"""Properties of a handoff, whatever the prompt, the plan, the batch and the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from kvxfer.handoff.admission import Admission
from kvxfer.handoff.serving import Handoff
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.handoff.serving import ANY, plan, saved
from tests.random_maps import random_map

few = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
POLICY = replace(ANY, norms=1e9, failures=10**6)


@pytest.fixture(scope="module")
def exact(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, CacheMap]:
    pair = replace(tiny_pair, source=tiny_pair.target)
    return pair, saved(pair, tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="module")
def wrong(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Pair, CacheMap]:
    return tiny_pair, saved(tiny_pair, tmp_path_factory.mktemp("wrong"), random_map(tiny_pair, DESIGNS["previous"]))


def asked(seed: int, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(4, 60, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def answers(handoff: Handoff, cache: Any, ids: torch.Tensor) -> tuple[torch.Tensor, str]:
    """What the library's own generate writes on, and the status."""
    handed = handoff.transfer(cache, ids)
    lm = handoff.pair.target.lm
    found = lm.generate(**handed.inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)
    return found[:, ids.shape[1] :], handed.record.status


shapes = {
    "seed": draw.integers(0, 99),
    "rows": draw.integers(1, 3),
    "tokens": draw.integers(1, 40),
    "exact_first": draw.integers(4, 9),
    "hold_back": draw.integers(1, 6),
    "missing": draw.integers(0, 5),
}


@few
@given(**shapes)
def test_identity_map_under_any_plan_is_the_target(
    exact: tuple[Pair, CacheMap], seed: int, rows: int, tokens: int, exact_first: int, hold_back: int, missing: int
) -> None:
    """Of any prompt, and of a source's cache that ends anywhere in it."""
    pair, cache_map = exact
    handoff = Handoff(pair, cache_map, plan(exact_first, hold_back), Admission(), POLICY)
    ids = asked(seed, rows, tokens)
    cache = pair.source.prefill(ids[:, : max(tokens - missing, 1)])
    found, status = answers(handoff, cache, ids)
    assert found.equal(pair.target.generate(ids, None, 4))
    mapped = min(tokens - hold_back, cache.tokens) - exact_first
    assert status == ("applied" if mapped > 0 and tokens > exact_first + hold_back else "fallback")


def spoiled(kv: KV, layer: int, token: int, value: float) -> KV:
    keys = [part.clone() for part in kv.keys]
    keys[layer % len(keys)][:, :, token % kv.tokens] = value
    return replace(kv, keys=keys)


FAULTS: dict[str, Callable[[KV], Any]] = {
    "nan": lambda kv: spoiled(kv, 1, 20, float("nan")),
    "infinite": lambda kv: spoiled(kv, 0, 30, float("inf")),
    "fewer layers": lambda kv: KV(kv.keys[1:], kv.values[1:]),
    "another head size": lambda kv: kv.apply(lambda x: x[..., :-2]),
    "none": lambda kv: None,
}


@few
@given(fault=draw.sampled_from(sorted(FAULTS)), where=draw.sampled_from(["exact", "handed", None]), **shapes)
def test_fallback_is_the_target_whatever_the_fault_and_the_plan(
    wrong: tuple[Pair, CacheMap],
    fault: str,
    where: str | None,
    seed: int,
    rows: int,
    tokens: int,
    exact_first: int,
    hold_back: int,
    missing: int,
) -> None:
    """A damaged cache, or a step that fails: a map that changes every answer leaves no trace."""
    pair, cache_map = wrong
    handoff = Handoff(pair, cache_map, plan(exact_first, hold_back), Admission(), POLICY)
    ids = asked(seed, rows, tokens + 20)
    cache: Any = pair.source.prefill(ids[:, : max(tokens + 20 - missing, 1)])
    with pytest.MonkeyPatch.context() as patch:
        if where is None:
            cache = FAULTS[fault](cache)
        else:
            patch.setattr(Transfer, where, lambda *given: 1 / 0)
        handed = handoff.transfer(cache, ids)
    # A spoiled token that the plan does not map harms nothing; all else falls back.
    if handed.record.status == "applied":
        assert where is None
        assert fault in ("nan", "infinite")
    else:
        lm = pair.target.lm
        found = lm.generate(**handed.inputs, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert found[:, ids.shape[1] :].equal(pair.target.generate(ids, None, 4))
        assert handed.record.reason is not None
