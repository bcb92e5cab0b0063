"""Blocks that no source layer gives: calibration and the map see the same columns, and maps of them come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvxfer.errors import KvxferError
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import TENSORS, CacheMap
from kvxfer.maps.blocks import DESIGNS, EXTRAS, KINDS, Block, Features
from kvxfer.maps.columns import TargetTokens, block_columns, read_source
from kvxfer.maps.linear import LinearLayer
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments.calibration import Extractor, finite_rows, layout_for
from kvxfer.moments.random_file import draw_random
from kvxfer.moments.spec import CalibrationSpec
from tests.map_files import rewrite

EVERYTHING = Features("all", "both", 1, 2, target_layer0=True, random_relu=9, random_products=5, source_hidden=True)
LENGTH = 24


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(4, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def content_of(pair: Pair, ids: torch.Tensor) -> KV:
    return pair.content("source", pair.source.prefill(ids, hidden=True))


def make_map(pair: Pair, seed: int = 3) -> CacheMap:
    """A random map that reads every kind of block."""
    layout = layout_for(pair, CalibrationSpec(features=EVERYTHING))
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for layer, kind in layout.outputs:
        blocks = EVERYTHING.blocks(kind, [0, 1])
        weight = torch.randn(1, layout.width_of(blocks), layout.width, generator=generator) / 16
        layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(layout.width, generator=generator))
    return CacheMap(layers, {"pair": pair.describe()}, draw_random(layout))


@pytest.mark.parametrize("skip", [0, 5])
def test_calibration_and_the_map_read_the_same_columns(tiny_pair: Pair, ids: torch.Tensor, skip: int) -> None:
    layout = layout_for(tiny_pair, CalibrationSpec(features=EVERYTHING))
    random = draw_random(layout)
    extract = Extractor(tiny_pair, layout, range(skip, LENGTH), random)
    x, _ = extract(tiny_pair.source.prefill(ids, hidden=True), tiny_pair.target.prefill(ids), ids)
    content = content_of(tiny_pair, ids)
    known = TargetTokens.of(tiny_pair, ids, layout.blocks)
    kinds = set()
    for n, block in enumerate(layout.blocks):
        read = block_columns(content, known, random, block)[:, skip:].flatten(0, 1).double()
        own = x[:, layout.starts[n] : layout.starts[n + 1]]
        assert read.shape == own.shape
        assert torch.allclose(read, own, atol=1e-5), block.name
        assert own.std() > 0
        kinds.add(block.kind)
    assert kinds == {*KINDS, *EXTRAS}


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


def test_the_hidden_state_is_what_the_vocabulary_projection_reads(tiny_pair: Pair, ids: torch.Tensor) -> None:
    source = tiny_pair.source
    read = read_source(tiny_pair, ids, (Block(0, "source_hidden"),))
    assert read.hidden is not None
    assert torch.allclose(source.lm.lm_head(read.hidden), source.logits(ids), atol=1e-5)
    assert torch.equal(read.keys[1], source.prefill(ids).keys[1])
    assert read_source(tiny_pair, ids, (Block(0, "keys"),)).hidden is None
    # A handoff may cut, pick and join caches.
    parts = KV.join([read.span(0, 5), read.span(5, LENGTH)])
    assert torch.equal(parts.rows(slice(1, 2)).hidden, read.hidden[1:])  # type: ignore[arg-type]
    assert KV.join([read.span(0, 5), source.prefill(ids).span(5, LENGTH)]).hidden is None


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
    flops = sum(t.numel() if name.endswith("bias") else 2 * t.numel() for name, t in tensors.items())
    flops += 5  # one multiplication for each random product
    # The target's first layer: two projections of the embedding.
    geometry = tiny_pair.target.geometry
    assert loaded.flops_per_token == flops + 2 * 2 * geometry.hidden * geometry.kv_width


def test_what_the_map_reads_decides_its_cost(tiny_pair: Pair) -> None:
    whole = make_map(tiny_pair)
    lean = {o: LinearLayer(part.blocks[:1], part.weight[:, :64], part.bias) for o, part in whole.layers.items()}
    layers = sum(part.flops for part in lean.values())
    assert CacheMap(lean, whole.manifest).flops_per_token == layers


READS = [
    # Keys of layer 0 alone, 64 columns; each model's hidden size is 64 too, so the cases tell them apart by count.
    (Features("lean"), [0], 1),
    (Features("far", previous=3), [0], 1),
    (Features("both", kinds="both"), [0, 1], 4),
    (Features("embedding", target_embedding=2), [0], 2),
    (Features("layer0", target_embedding=0, target_layer0=True), [0], 2),
    (Features("hidden", source_hidden=True), [0], 2),
    (Features("random", random_relu=3, random_products=2), [0], 4),
]


@pytest.mark.parametrize(("features", "layers", "tensors"), READS, ids=lambda x: getattr(x, "name", None))
def test_the_bytes_that_a_map_reads(tiny_pair: Pair, features: Features, layers: list[int], tensors: int) -> None:
    """Every tensor is read once a token, whatever the offsets and however many target layers read it."""
    layout = layout_for(tiny_pair, CalibrationSpec(features=features))
    blocks = features.blocks("keys", layers)
    part = LinearLayer(blocks, torch.zeros(1, layout.width_of(blocks), 64), torch.zeros(64))
    parts = {(layer, kind): part for layer in range(3) for kind in KINDS}
    fitted = CacheMap(parts, {"pair": tiny_pair.describe()}, draw_random(layout))
    assert fitted.bytes_read_per_token == 2 * 64 * tensors
    # Three target layers, keys and values, two bytes a number.
    assert fitted.bytes_written_per_token == 768


def test_both_models_hidden_sizes_are_counted_as_their_own() -> None:
    manifest = {"pair": {"source": {"geometry": {"hidden": 10}}, "target": {"geometry": {"hidden": 300}}}}
    kinds = ("embedding", "source_hidden")
    blocks = (Block(1, "values"), *(Block(0, kind) for kind in kinds))
    part = LinearLayer(blocks, torch.zeros(1, 314, 4), torch.zeros(4))
    fitted = CacheMap({(0, kind): part for kind in KINDS}, manifest)
    assert fitted.bytes_read_per_token == 2 * (4 + 300 + 10)
    assert fitted.bytes_written_per_token == 2 * 2 * 4


def test_a_map_of_the_target_s_tokens_says_what_it_needs(tiny_pair: Pair, ids: torch.Tensor) -> None:
    content = content_of(tiny_pair, ids)
    for mapper in (Mapper(make_map(tiny_pair)), Mapper(make_map(tiny_pair), pair=tiny_pair)):
        with pytest.raises(KvxferError, match="needs the prompt's token ids and the target model"):
            mapper.map(content)


def test_a_map_of_hidden_states_says_what_it_needs(tiny_pair: Pair, ids: torch.Tensor) -> None:
    content = tiny_pair.content("source", tiny_pair.source.prefill(ids))
    with pytest.raises(KvxferError, match="needs the source's final hidden states"):
        Mapper(make_map(tiny_pair), pair=tiny_pair).map(content, ids)


def test_a_random_block_without_weights_is_no_other_block(tiny_pair: Pair, ids: torch.Tensor) -> None:
    known = TargetTokens.of(tiny_pair, ids, (Block(0, "layer0_keys"),))
    for kind in ("random_relu", "random_products"):
        with pytest.raises(KvxferError, match=rf"weights of {kind}\.0 are missing"):
            block_columns(content_of(tiny_pair, ids), known, None, Block(0, kind))
    with pytest.raises(KvxferError, match=r"reads embedding\.0"):
        block_columns(content_of(tiny_pair, ids), known, None, Block(0, "embedding"))


def test_rows_whose_hidden_state_is_not_finite_are_found(tiny_pair: Pair, ids: torch.Tensor) -> None:
    read = tiny_pair.source.prefill(ids, hidden=True).apply(torch.clone)
    assert finite_rows(read).tolist() == [True, True]
    assert read.hidden is not None
    read.hidden[1, 3, 5] = float("nan")
    assert finite_rows(read).tolist() == [True, False]


@pytest.mark.parametrize("layers", [[0], [0, 1, 1], []], ids=str)
def test_altered_random_features_are_refused(tiny_pair: Pair, tmp_path: Path, layers: list[int]) -> None:
    make_map(tiny_pair).save(tmp_path)
    rewrite(tmp_path, lambda manifest: {**manifest, "random_layers": layers})
    with pytest.raises(KvxferError, match=r"manifest\.json does not describe its tensors \(.*random_layers"):
        CacheMap.load(tmp_path)


@pytest.mark.parametrize("name", ["relu.weight", "relu.bias", "products.left", "products.right"])
def test_missing_random_weights_are_refused(tiny_pair: Pair, tmp_path: Path, name: str) -> None:
    make_map(tiny_pair).save(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    del tensors[name]
    save_file(tensors, tmp_path / TENSORS)
    rewrite(tmp_path, lambda manifest: manifest)
    with pytest.raises(KvxferError, match="does not describe its tensors"):
        CacheMap.load(tmp_path)


def test_designs_join_to_one_that_serves_both() -> None:
    both, previous, embedding = (DESIGNS[name] for name in ("both", "previous", "embedding"))
    joined = previous.joined(embedding)
    assert joined.covers(previous)
    assert joined.covers(embedding)
    assert both.joined(previous) == previous.joined(both) == previous
    for kind in ("random_relu", "random_products"):
        with pytest.raises(KvxferError, match=rf"features\.{kind}=20 is not the 10 of pair\.features=a"):
            Features("a", **{kind: 10}).joined(Features("b", **{kind: 20}))


@pytest.mark.parametrize("name", ["products", "hidden", "rich"])
def test_newer_designs_cover_and_join(name: str) -> None:
    design, both = DESIGNS[name], DESIGNS["both"]
    assert design.covers(both)
    assert not both.covers(design)
    joined = DESIGNS["layer0"].joined(design)
    assert joined.covers(design)
    assert joined.covers(DESIGNS["layer0"])
    assert not design.covers(joined)
    assert not Features("other", kinds="both", random_products=3).covers(DESIGNS["products"])
