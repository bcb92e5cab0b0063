"""Running a map: one grouped product per design equals a plain loop over layers, tokens and heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Features, Output
from kvxfer.maps.columns import columns
from kvxfer.maps.linear import LinearLayer
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
