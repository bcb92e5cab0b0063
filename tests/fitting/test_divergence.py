"""Next-token KL of a map's layers: against the definition, and as the train stage chooses by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages import fit as stage
from kvxfer.files import read_json
from kvxfer.fitting.divergence import TOKENS, Divergence
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import DIAGNOSTICS, CacheMap
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from tests.random_maps import random_map
from tests.small_runs import run, toy_models

LENGTH, EXACT = 40, 3


def rows(count: int = 5, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 90, (count, length), generator=torch.Generator().manual_seed(0))


def reference(pair: Pair, cache_map: CacheMap, tokens: Tensor) -> float:
    """Through the handoff that serves, one token's distribution after the other, in float64."""
    transfer = Transfer(pair, Mapper(cache_map, pair=pair), Plan(exact_first=EXACT, hold_back=LENGTH // 2))
    head, tail = transfer.split(tokens)
    handed = transfer.handed(transfer.prefill(head), head, transfer.exact(head))
    p = torch.log_softmax(pair.target.logits(tokens, keep=tail.shape[1]).double(), -1)
    q = torch.log_softmax(pair.target.logits(tail, handed).double(), -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("design", ["same", "previous", "embedding", "hidden"])
def test_it_is_the_kl_of_what_is_served(tiny_pair: Pair, design: str) -> None:
    cache_map = random_map(tiny_pair, DESIGNS[design])
    found = Divergence(tiny_pair, cache_map.blocks, rows(), EXACT, batch_size=2)(cache_map.layers)
    assert found == pytest.approx(reference(tiny_pair, cache_map, rows()), rel=1e-4)
    assert found > 0.01


def test_few_rows_and_tokens_are_read(tiny_pair: Pair) -> None:
    divergence = Divergence(tiny_pair, (), rows(40, 300), 0)
    assert sum(len(read.ids) for read in divergence._read) == 16
    assert {read.true.shape[1] for read in divergence._read} == {TOKENS}


@pytest.mark.parametrize(("count", "exact"), [(0, 0), (2, LENGTH // 2)])
def test_rows_that_map_nothing_are_refused(tiny_pair: Pair, count: int, exact: int) -> None:
    with pytest.raises(
        KvxferError, match=rf"solver\.criterion=kl .*{count} of corpus\.length={LENGTH}.*skip_first={exact}"
    ):
        Divergence(tiny_pair, (), rows(count), exact)


def test_train_loads_the_pair_where_the_choice_needs_it(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = toy_models(tiny_folders)
    run("calibrate", tmp_path, *[each for each in models if not each.startswith("solver")])
    loaded, load = [], stage.load_pair
    monkeypatch.setattr(stage, "load_pair", lambda spec: loaded.append(spec) or load(spec))
    run("train", tmp_path, *models, "solver.criterion=kl", "penalty.lam=0.1")
    assert not loaded
    path = run("train", tmp_path, *models, "solver.criterion=kl", "corpus.rows.training=5")
    assert len(loaded) == 1
    curve = read_json(path / DIAGNOSTICS)["curves"]["kl"]["lam"]
    best = min(curve, key=lambda point: point[1])[0]
    assert read_json(path / "manifest.json")["chosen"]["lam"] == [best]
    fixed = CacheMap.load(run("train", tmp_path, *models, f"penalty.lam={best}"))
    for output, layer in CacheMap.load(path).layers.items():
        assert torch.equal(layer.weight, fixed.layers[output].weight)
