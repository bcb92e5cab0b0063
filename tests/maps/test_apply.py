"""Running a map: one grouped product per design equals a plain loop over layers, tokens and heads."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvxfer.maps import apply
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Features, Output
from kvxfer.maps.columns import columns
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.views import Views
from kvxfer.models.kv import KV

HEADS, DIM, WIDTH = 2, 3, 6
SOURCE_LAYERS, TARGET_LAYERS = 3, 12
SOURCE_DESIGNS = [design for design in DESIGNS.values() if not design.extras]
FORMS = {"full": (1, None), "low rank": (1, 2), "head-local": (HEADS, None), "head-local low rank": (HEADS, 2)}


def make_content(batch: int = 2, tokens: int = 7, seed: int = 0) -> KV:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, HEADS, tokens, DIM)
    keys, values = ([torch.randn(shape, generator=generator) for _ in range(SOURCE_LAYERS)] for _ in KINDS)
    return KV(keys, values)


def make_map(features: Features, seed: int = 1, form: str = "full") -> CacheMap:
    """Layers that read various source layers; some share a design, and they come in no order."""
    groups, rank = FORMS[form]
    generator = torch.Generator().manual_seed(seed)
    layers: dict[Output, LinearLayer] = {}
    for layer in torch.randperm(TARGET_LAYERS, generator=generator).tolist():
        for kind in KINDS:
            blocks = features.blocks(kind, {layer % SOURCE_LAYERS, layer // 6})
            columns = WIDTH // groups
            # Not every layer has the same rank.
            inner = columns if rank is None else rank - layer % 2
            weight = torch.randn(groups, len(blocks) * columns, inner, generator=generator)
            right = None if rank is None else torch.randn(groups, inner, columns, generator=generator)
            layers[layer, kind] = LinearLayer(blocks, weight, torch.randn(WIDTH, generator=generator), right)
    return CacheMap(layers, {})


def naive(cache_map: CacheMap, content: KV, layer: int, kind: str) -> Tensor:
    """One output in float64, token by token, straight from the meaning of its blocks."""
    part = cache_map.layers[layer, kind]
    rows = []
    for row in range(content.batch):
        for token in range(content.tokens):
            outputs = []
            for group in range(part.groups):
                heads = slice(None) if part.groups == 1 else slice(group, group + 1)
                features = torch.zeros(0, dtype=torch.float64)
                for block in part.blocks:
                    at = token + block.offset
                    tensor = (content.keys if block.kind == "keys" else content.values)[block.layer][row, heads]
                    read = tensor[:, at].flatten().double() if at >= 0 else torch.zeros(tensor[:, 0].numel()).double()
                    features = torch.cat([features, read])
                output = features @ part.weight[group].double()
                outputs.append(output if part.right is None else output @ part.right[group].double())
            rows.append(torch.cat(outputs) + part.bias.double())
    return torch.stack(rows).view(content.batch, content.tokens, HEADS, DIM).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [*SOURCE_DESIGNS, Features("far", previous=3)], ids=lambda f: f.name)
def test_equals_a_plain_loop(features: Features, dtype: torch.dtype, form: str) -> None:
    cache_map, content = make_map(features, form=form), make_content()
    mapped = Mapper(cache_map, dtype=dtype).map(content)
    assert (mapped.layers, mapped.batch, mapped.tokens) == (TARGET_LAYERS, 2, 7)
    tolerance = 2e-5 if dtype == torch.float32 and "low rank" in form else 1e-5 if dtype == torch.float32 else 1e-12
    for kind in KINDS:
        for layer, tensor in enumerate(getattr(mapped, kind)):
            assert tensor.dtype == dtype
            expected = naive(cache_map, content, layer, kind)
            assert torch.allclose(tensor.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", SOURCE_DESIGNS, ids=lambda f: f.name)
def test_grouped_equals_one_layer_at_a_time(features: Features, form: str) -> None:
    cache_map, content = make_map(features, form=form), make_content()
    mapper = Mapper(cache_map, dtype=torch.float64)
    assert len(mapper.products) < len(cache_map.layers)
    shared = {(product.blocks, product.weight.shape[-1] // len(product.outputs)) for product in mapper.products}
    assert len(shared) == len(mapper.products)
    if FORMS[form][1] is None:
        assert len({blocks for blocks, _ in shared}) == len(mapper.products)
    mapped = mapper.map(content)
    for (layer, kind), part in cache_map.layers.items():
        alone = {(0, k): part for k in KINDS}
        single = Mapper(CacheMap(alone, {}), dtype=torch.float64).map(content)
        assert torch.allclose(getattr(mapped, kind)[layer], getattr(single, kind)[0], rtol=1e-12, atol=1e-12)


def test_the_token_before_the_first_reads_as_zeros() -> None:
    content = make_content()
    now, before = (columns(content, Block(1, "values", offset)) for offset in (0, -1))
    assert torch.equal(before[:, 0], torch.zeros(2, WIDTH))
    assert torch.equal(before[:, 1:], now[:, :-1])


@pytest.mark.parametrize("tokens", [1, 2])
def test_rows_shorter_than_the_offset(tokens: int) -> None:
    content = make_content(tokens=tokens)
    assert torch.equal(columns(content, Block(0, "keys", -3)), torch.zeros(2, tokens, WIDTH))
    cache_map = make_map(DESIGNS["previous"])
    mapped = Mapper(cache_map, dtype=torch.float64).map(content)
    assert torch.allclose(mapped.keys[4], naive(cache_map, content, 4, "keys"))


@pytest.mark.parametrize("form", FORMS)
def test_the_dense_weight_is_the_map(form: str) -> None:
    cache_map, content = make_map(DESIGNS["previous"], form=form), make_content()
    mapped = Mapper(cache_map, dtype=torch.float64).map(content)
    for (layer, kind), part in cache_map.layers.items():
        x = torch.cat([columns(content, block) for block in part.blocks], dim=-1).double()
        y = (x @ part.dense().double() + part.bias.double()).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        assert torch.allclose(getattr(mapped, kind)[layer], y, atol=1e-5)


def test_columns_hold_the_heads_side_by_side() -> None:
    content = make_content()
    for head in range(HEADS):
        part = columns(content, Block(2, "keys"))[..., head * DIM : (head + 1) * DIM]
        assert torch.equal(part, content.keys[2][:, head])


def test_rows_and_later_tokens_do_not_touch_each_other() -> None:
    mapper, content = Mapper(make_map(DESIGNS["previous"])), make_content()
    whole = mapper.map(content)
    first = mapper.map(content.rows(slice(0, 1)).span(0, 4))
    assert torch.allclose(first.values[3], whole.values[3][:1, :, :4], atol=1e-5)


def test_the_content_is_left_as_it_was() -> None:
    content = make_content()
    before = content.apply(torch.clone)
    Mapper(make_map(DESIGNS["both"])).map(content)
    for kind in KINDS:
        assert all(torch.equal(a, b) for a, b in zip(getattr(content, kind), getattr(before, kind), strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("features", [DESIGNS["same"], Features("far", kinds="both", previous=3)], ids=lambda f: f.name)
@pytest.mark.parametrize("tokens", [1, 2, 5, 100])
def test_chunks_are_the_whole(features: Features, form: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapper, content = Mapper(make_map(features, form=form), dtype=torch.float64), make_content(batch=3)
    whole = mapper.map(content)
    monkeypatch.setattr(apply, "_TOKENS", {"cpu": tokens})
    chunks = list(mapper._chunks(3, 0, 7))
    assert len(chunks) == {1: 21, 2: 12, 5: 6, 100: 1}[tokens]
    parts = mapper.map(content)
    for kind in KINDS:
        for one, other in zip(getattr(parts, kind), getattr(whole, kind), strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_a_wide_map_takes_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    mapper = Mapper(make_map(DESIGNS["same"]))
    monkeypatch.setattr(apply, "_BYTES", {"cpu": 10 * 4 * WIDTH * (2 * SOURCE_LAYERS + 2 * TARGET_LAYERS)})
    assert [span.stop - span.start for _, span in mapper._chunks(1, 0, 40)] == [10] * 4
    monkeypatch.setattr(apply, "_BYTES", {"cpu": 1})
    assert len(list(mapper._chunks(2, 3, 7))) == 8


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_products_stay_within_their_rounding(form: str) -> None:
    """Twice a rounding of each product's factors, and one of what is written: 2^-9 each, and float32 in between."""
    unit = 2.0**-9
    cache_map, content = make_map(DESIGNS["previous"], form=form), make_content()
    mapped = Mapper(cache_map, dtype=torch.bfloat16).map(content)
    sizes = {
        output: LinearLayer(
            part.blocks, part.weight.abs(), part.bias.abs(), None if part.right is None else part.right.abs()
        )
        for output, part in cache_map.layers.items()
    }
    factors = 3 + 2 * (FORMS[form][1] is not None)  # x, W and the result; a second factor and what lies between
    for kind, layer in itertools.product(KINDS, range(TARGET_LAYERS)):
        exact = naive(cache_map, content, layer, kind)
        size = naive(CacheMap(sizes, {}), content.apply(torch.abs), layer, kind)
        error = (getattr(mapped, kind)[layer].double() - exact).abs()
        assert getattr(mapped, kind)[layer].dtype == torch.float32
        assert (error <= factors * unit * 1.02 * size).all()
        assert error.max() > 0


def test_it_writes_into_a_part_of_a_larger_cache_and_nowhere_else() -> None:
    """Views of tokens, heads and dim, whatever holds them: here one tensor of all layers, tokens first."""
    mapper, content = Mapper(make_map(DESIGNS["previous"])), make_content(batch=1)
    pool = torch.full((30, 2 * TARGET_LAYERS, HEADS, DIM), 7.0)
    keys, values = ([pool[None, 11:18, n * TARGET_LAYERS + layer] for layer in range(TARGET_LAYERS)] for n in range(2))
    mapper.run(Views.of(content), Views(keys, values), mapper.known(None))
    wanted = mapper.map(content)
    for place, tensor in zip((*keys, *values), (*wanted.keys, *wanted.values), strict=True):
        assert torch.equal(place, tensor.transpose(1, 2))
    assert (pool[:11] == 7).all()
    assert (pool[18:] == 7).all()


def test_each_source_layer_is_read_once_and_tokens_before_the_first_are_only_looked_back_at() -> None:
    read: list[tuple[str, int, slice]] = []

    class Watched(Views):
        def copy(self, kind: str, layer: int, rows: slice, tokens: slice, *more: object) -> None:
            read.append((kind, layer, tokens))
            super().copy(kind, layer, rows, tokens, *more)

    mapper, content = Mapper(make_map(DESIGNS["previous"])), make_content()
    source, whole = Views.of(content), mapper.map(content)
    late = whole.span(4, 7).apply(torch.zeros_like)
    mapper.run(Watched(source.keys, source.values), Views.of(late), mapper.known(None), first=4)
    assert sorted(read, key=str) == sorted(((k, n, slice(3, 7)) for k in KINDS for n in range(SOURCE_LAYERS)), key=str)
    for one, other in zip((*late.keys, *late.values), (*whole.keys, *whole.values), strict=True):
        assert torch.allclose(one, other[:, :, 4:], atol=1e-5)


def peak_bytes(tokens: int) -> int:
    """The most that a map of a toy geometry holds at once beside both caches, by torch's profiler."""
    content = KV(*([torch.zeros(1, 2, tokens, 32) for _ in range(4)] for _ in KINDS))
    draw = torch.Generator().manual_seed(0)
    layers = {
        (layer, kind): LinearLayer(blocks, torch.randn(1, 64 * len(blocks), 64, generator=draw), torch.zeros(64))
        for kind in KINDS
        for layer in range(6)
        if (blocks := DESIGNS["previous"].blocks(kind, [layer % 4, 3]))
    }
    mapper, found = (
        Mapper(CacheMap(layers, {})),
        KV(*([torch.zeros(1, 2, tokens, 32) for _ in range(6)] for _ in KINDS)),
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        mapper.run(Views.of(content), Views.of(found), mapper.known(None))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_memory_does_not_grow_with_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for tokens in (4096, 32768):
        monkeypatch.setattr(apply, "_memory", apply._Memory())
        peaks.append(peak_bytes(tokens))
    chunk = 2048 * 4 * 64 * (8 + 12 + 8)  # columns, a design and products of 2,048 tokens
    assert peaks[1] < 1.05 * peaks[0] < 1.5 * chunk
    assert peaks[1] < 32768 * 4 * 64 * 2 * (4 + 6) / 3, "a third of the two caches themselves"
