"""Blocks that no source layer gives: calibration and the map see the same columns, and maps of them come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kvxfer.apply import Mapper
from kvxfer.calibration import CalibrationSpec, Extractor, layout_for
from kvxfer.errors import KvxferError
from kvxfer.extras import TargetTokens, relu_for
from kvxfer.features import DESIGNS, KINDS, Block, Features
from kvxfer.kv import KV
from kvxfer.maps import TENSORS, CacheMap
from kvxfer.pairs import Pair
from kvxfer.solvers import LinearLayer

EVERYTHING = Features("all", kinds="both", previous=1, target_embedding=2, target_layer0=True, random_relu=9)
LENGTH = 24


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(4, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def content_of(pair: Pair, ids: torch.Tensor) -> KV:
    return pair.content("source", pair.source.prefill(ids))


def make_map(pair: Pair, seed: int = 3) -> CacheMap:
    """A random map that reads every kind of block."""
    layout = layout_for(pair, CalibrationSpec(features=EVERYTHING))
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for layer, kind in layout.outputs:
        blocks = EVERYTHING.blocks(kind, [0, 1])
        weight = torch.randn(1, layout.width_of(blocks), layout.width, generator=generator) / 16
        layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(layout.width, generator=generator))
    return CacheMap(layers, {"pair": pair.describe()}, relu_for(layout), layout.source_layers)


@pytest.mark.parametrize("skip", [0, 5])
def test_calibration_and_the_map_read_the_same_columns(tiny_pair: Pair, ids: torch.Tensor, skip: int) -> None:
    layout = layout_for(tiny_pair, CalibrationSpec(features=EVERYTHING))
    extract = Extractor(tiny_pair, layout, LENGTH, skip, 1)
    x, _ = extract(tiny_pair.source.prefill(ids), tiny_pair.target.prefill(ids), ids)
    mapper, content = Mapper(make_map(tiny_pair), pair=tiny_pair), content_of(tiny_pair, ids)
    known = TargetTokens.of(tiny_pair, ids, layout.blocks)
    kinds = set()
    for n, block in enumerate(layout.blocks):
        read = mapper._columns(content, known, block)[:, skip:].flatten(0, 1)
        own = x[:, layout.starts[n] : layout.starts[n + 1]]
        assert read.shape == own.shape
        assert torch.allclose(read, own, atol=1e-5), block.name
        assert own.std() > 0
        kinds.add(block.kind)
    assert kinds == {*KINDS, "embedding", "layer0_keys", "layer0_values", "random_relu"}


def test_the_first_layer_is_that_of_a_full_prefill(tiny_pair: Pair, ids: torch.Tensor) -> None:
    """And needs no context: a token alone has the same content."""
    first, whole = tiny_pair.target.first_layer(ids), tiny_pair.target.prefill(ids)
    assert len(tiny_pair.target.body.layers) == whole.layers == 3
    assert first.layers == 1
    assert torch.allclose(first.keys[0], whole.keys[0], atol=1e-6)
    assert torch.allclose(first.values[0], whole.values[0], atol=1e-6)
    alone = tiny_pair.content("target", tiny_pair.target.first_layer(ids[:, 7:8]))
    content = tiny_pair.content("target", whole)
    assert torch.allclose(alone.keys[0], content.keys[0][:, :, 7:8], atol=1e-4)


def test_embeddings_are_the_target_s_and_those_before(tiny_pair: Pair, ids: torch.Tensor) -> None:
    table = tiny_pair.target.body.get_input_embeddings().weight.float()
    known = TargetTokens.of(tiny_pair, ids, (Block(0, "embedding"),))
    now, before = (known.columns(Block(0, "embedding", offset)) for offset in (0, -2))
    assert torch.equal(now, table[ids])
    assert torch.equal(before[:, 2:], table[ids[:, :-2]])
    assert not before[:, :2].any()


def test_random_features_are_the_same_in_every_process(tiny_pair: Pair) -> None:
    layout = layout_for(tiny_pair, CalibrationSpec(features=DESIGNS["relu"], layers=(1,)))
    one, two = relu_for(layout), relu_for(layout)
    assert one is not None
    assert two is not None
    assert torch.equal(one.weight, two.weight)
    assert one.weight.shape == (2 * layout.width, 1500)
    assert relu_for(layout_for(tiny_pair, CalibrationSpec())) is None
    part = torch.randn(3, layout.width)
    assert (one([part, part]) >= 0).all()
    # A layer's scale says nothing.
    assert torch.allclose(one([part * 100, part]), one([part, part]), atol=1e-4)


def test_a_map_of_everything_saves_loads_and_maps(tiny_pair: Pair, ids: torch.Tensor, tmp_path: Path) -> None:
    written = make_map(tiny_pair).save(tmp_path)
    loaded = CacheMap.load(tmp_path)
    assert loaded.hash == written.hash
    content = content_of(tiny_pair, ids)
    before, after = (Mapper(m, pair=tiny_pair).map(content, ids) for m in (written, loaded))
    for kind in KINDS:
        for a, b in zip(getattr(before, kind), getattr(after, kind), strict=True):
            assert torch.equal(a, b)
            assert a.shape == (2, 2, LENGTH, 32)
    tensors = load_file(tmp_path / TENSORS)
    assert loaded.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert loaded.bytes == 4 * loaded.parameters
    flops = sum(2 * t.numel() if name.endswith("weight") else t.numel() for name, t in tensors.items())
    # The target's first layer: two projections of the embedding.
    geometry = tiny_pair.target.geometry
    assert loaded.flops_per_token == flops + 2 * 2 * geometry.hidden * geometry.kv_width


def test_what_the_map_reads_decides_its_cost(tiny_pair: Pair) -> None:
    whole = make_map(tiny_pair)
    lean = {o: LinearLayer(part.blocks[:1], part.weight[:, :64], part.bias) for o, part in whole.layers.items()}
    layers = sum(part.flops for part in lean.values())
    assert CacheMap(lean, whole.manifest).flops_per_token == layers


def test_a_map_of_the_target_s_tokens_says_what_it_needs(tiny_pair: Pair, ids: torch.Tensor) -> None:
    content = content_of(tiny_pair, ids)
    for mapper in (Mapper(make_map(tiny_pair)), Mapper(make_map(tiny_pair), pair=tiny_pair)):
        with pytest.raises(KvxferError, match="needs the prompt's token ids and the target model"):
            mapper.map(content)


def broken(directory: Path, change: str) -> None:
    from tests.test_maps import rewrite

    def altered(manifest: dict) -> dict:
        layers = {"fewer": [0], "more": [0, 1, 1], "none": []}
        return {**manifest, "relu_layers": layers[change]}

    rewrite(directory, altered)


@pytest.mark.parametrize("change", ["fewer", "more", "none"])
def test_altered_random_features_are_refused(tiny_pair: Pair, tmp_path: Path, change: str) -> None:
    make_map(tiny_pair).save(tmp_path)
    broken(tmp_path, change)
    with pytest.raises(KvxferError, match=r"manifest\.json does not describe its tensors \(.*relu_layers"):
        CacheMap.load(tmp_path)


def test_designs_join_to_one_that_serves_both() -> None:
    both, previous, embedding = (DESIGNS[name] for name in ("both", "previous", "embedding"))
    joined = previous.joined(embedding)
    assert joined.covers(previous)
    assert joined.covers(embedding)
    assert both.joined(previous) == previous.joined(both) == previous
    with pytest.raises(KvxferError, match=r"features\.random_relu=20 is not the 10"):
        Features("a", random_relu=10).joined(Features("b", random_relu=20))
