"""Which source layer a target layer came to, and the control that hands over those layers' caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvxfer.experiment.identity import identity
from kvxfer.models.ancestry import Ancestry, find_ancestry
from kvxfer.models.pair import Pair, load_pair
from kvxfer.models.spec import ModelSpec, PairSpec
from tests.doubles import make_double, save, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lm = tiny_model("qwen3-default", num_hidden_layers=6)
    return save(lm, tiny_tokenizer(), tmp_path_factory.mktemp("six"))


def spec_of(folder: Path, source: tuple[int, ...], target: tuple[int, ...] = (), **changes: object) -> PairSpec:
    sides = (ModelSpec(str(folder), drop_layers=drop) for drop in (source, target))
    return replace(PairSpec("pruned", *sides, dtype="float32", device="cpu"), **changes)


def pair_of(folder: Path, source: tuple[int, ...], target: tuple[int, ...] = (), **changes: object) -> Pair:
    return load_pair(spec_of(folder, source, target, **changes))


@pytest.mark.parametrize(
    ("source", "target", "layers", "dropped", "identical"),
    [
        ((1, 4), (), (0, 0, 1, 2, 2, 3), (1, 4), 1),
        ((0,), (), (0, 0, 1, 2, 3, 4), (0,), 0),
        ((1, 2, 3), (), (0, 0, 0, 1, 1, 2), (1, 2, 3), 1),
        ((2, 4), (4,), (0, 1, 1, 2, 3), (2,), 2),
    ],
)
def test_every_layer_has_an_ancestor(
    folder: Path,
    source: tuple[int, ...],
    target: tuple[int, ...],
    layers: tuple[int, ...],
    dropped: tuple[int, ...],
    identical: int,
) -> None:
    pair = pair_of(folder, source, target)
    ancestry = find_ancestry(pair)
    assert ancestry == Ancestry(layers, dropped)
    assert ancestry.identical == identical
    ids = torch.randint(3, 300, (2, 9))
    read, own = pair.source.prefill(ids), pair.target.prefill(ids)
    copied = ancestry.copy(read)
    equal = [torch.equal(copied.keys[i], own.keys[i]) for i in range(own.layers)]
    assert equal == [i < identical for i in range(own.layers)]


def test_other_pairs_have_none(folder: Path, tmp_path: Path) -> None:
    assert find_ancestry(pair_of(folder, ())) is None
    assert find_ancestry(pair_of(folder, (1,), (1,))) is None
    assert find_ancestry(pair_of(folder, (1,), (2,))) is None
    assert find_ancestry(pair_of(folder, (1,), reverse=True)) is None
    ours, theirs = make_double("qwen3_0.6b_4b", tmp_path)
    assert find_ancestry(load_pair(PairSpec("p", ModelSpec(str(ours)), ModelSpec(str(theirs), "main", (1,))))) is None


def test_dropped_layers_are_part_of_identity_and_description(folder: Path) -> None:
    whole = identity(spec_of(folder, ()))
    assert whole["source"]["drop_layers"] == []
    pruned = identity(spec_of(folder, (4, 1)))
    assert pruned["source"]["drop_layers"] == [1, 4]
    others = [identity(spec_of(folder, *drops)) for drops in (((1,),), ((1, 4), (1,)), ((), (1, 4)))]
    assert len({str(each) for each in (whole, pruned, *others)}) == 5
    assert identity(spec_of(folder, (1, 4, 4))) == pruned
    described = pair_of(folder, (1, 4)).describe()
    assert described["source"]["drop_layers"] == [1, 4]
    assert described["target"]["drop_layers"] == []
    assert (described["source"]["geometry"]["layers"], described["target"]["geometry"]["layers"]) == (4, 6)
