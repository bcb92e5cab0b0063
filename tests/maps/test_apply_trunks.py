"""Running a map with trunks: batched products equal the formula, and a map without them is as it was, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Output
from kvxfer.maps.columns import TargetTokens, columns
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models.kv import KV
from tests.maps.test_apply import DIM, FORMS, HEADS, TARGET_LAYERS, WIDTH, make_content, make_map

EARLIER = (Block(2, "values"), Block(0, "keys", -2))


def make_trunk(blocks: tuple[Block, ...], outputs: list[Output], draw: torch.Generator, depth: int = 1) -> Trunk:
    widths = [WIDTH * len(blocks), *(5 + n for n in range(depth))]
    return Trunk(
        blocks,
        tuple(torch.randn(a, b, generator=draw) / a**0.5 for a, b in itertools.pairwise(widths)),
        tuple(torch.randn(b, generator=draw) for b in widths[1:]),
        "relu" if depth == 1 else "gelu",
        {output: torch.randn(widths[-1], WIDTH, generator=draw) for output in outputs},
    )


def own(cache_map: CacheMap, draw: torch.Generator) -> list[Trunk]:
    """One for every output, over what its linear part reads."""
    return [make_trunk(layer.blocks, [output], draw) for output, layer in cache_map.layers.items()]


def shared(cache_map: CacheMap, draw: torch.Generator) -> list[Trunk]:
    """One for the outputs of each design."""
    readers: dict[tuple[Block, ...], list[Output]] = {}
    for output, layer in cache_map.layers.items():
        readers.setdefault(layer.blocks, []).append(output)
    return [make_trunk(blocks, outputs, draw, depth=2) for blocks, outputs in readers.items()]


def mixed(cache_map: CacheMap, draw: torch.Generator) -> list[Trunk]:
    """Some outputs read two of different depths, most none; they read an earlier token, which no linear part does."""
    pairs: list[list[Output]] = [[(3, "values"), (0, "keys")], [(11, "keys"), (0, "values")]]
    deep = [make_trunk(EARLIER, outputs, draw, depth=3) for outputs in pairs]
    return [*deep, make_trunk(EARLIER, [(0, "keys")], draw), make_trunk(EARLIER[:1], [(3, "values")], draw)]


MAKE: dict[str, Callable[[CacheMap, torch.Generator], list[Trunk]]] = {"own": own, "shared": shared, "mixed": mixed}


def with_trunks(cache_map: CacheMap, how: str) -> CacheMap:
    trunks = MAKE[how](cache_map, torch.Generator().manual_seed(3))
    return CacheMap(cache_map.layers, {}, None, tuple(trunks))


def alone(cache_map: CacheMap) -> CacheMap:
    """The same trunks, with biases in place of linear parts."""
    nothing = torch.zeros(1, 0, WIDTH)
    layers = {output: LinearLayer((), nothing, layer.bias) for output, layer in cache_map.layers.items()}
    return CacheMap(layers, {}, None, cache_map.trunks)


def expected(cache_map: CacheMap, content: KV, output: Output) -> Tensor:
    """One output by the formula, in float64."""

    def read(blocks: tuple[Block, ...]) -> Tensor:
        return torch.cat([columns(content, block) for block in blocks], dim=-1).double()

    part = cache_map.layers[output]
    y = part.bias.double().expand(content.batch, content.tokens, -1)
    if part.blocks:
        y = y + read(part.blocks) @ part.dense().double()
    for trunk in cache_map.trunks:
        if output in trunk.readouts:
            y = y + trunk.hidden(read(trunk.blocks)) @ trunk.readouts[output].double()
    return y.unflatten(-1, (HEADS, DIM)).transpose(1, 2)


@pytest.mark.parametrize("form", ["full", "head-local", "none"])
@pytest.mark.parametrize("how", MAKE)
def test_equals_the_formula(how: str, form: str) -> None:
    plain = make_map(DESIGNS["previous"], form="full" if form == "none" else form)
    cache_map, content = with_trunks(plain, how), make_content()
    if form == "none":
        cache_map = alone(cache_map)
    mapped = {dtype: Mapper(cache_map, dtype=dtype).map(content) for dtype in (torch.float32, torch.float64)}
    for layer, kind in cache_map.layers:
        wanted = expected(cache_map, content, (layer, kind))
        for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-11)):
            found = getattr(mapped[dtype], kind)[layer]
            assert found.dtype == dtype
            assert found.is_contiguous()
            assert torch.allclose(found.double(), wanted, atol=tolerance)


def test_alike_trunks_are_one_product() -> None:
    plain = make_map(DESIGNS["both"])
    designs = {layer.blocks for layer in plain.layers.values()}
    assert len(designs) < len(plain.layers) / 2
    for how, products in (("own", len(designs)), ("shared", len(designs)), ("mixed", 3)):
        assert len(Mapper(with_trunks(plain, how)).trunks) == products


@pytest.mark.parametrize("how", MAKE)
def test_readouts_of_zeros_leave_the_base(how: str) -> None:
    cache_map, content = with_trunks(make_map(DESIGNS["previous"]), how), make_content()
    for trunk in cache_map.trunks:
        for readout in trunk.readouts.values():
            readout.zero_()
    with_them, without = (Mapper(m).map(content) for m in (cache_map, CacheMap(cache_map.layers, {})))
    for kind in KINDS:
        for ours, theirs in zip(getattr(with_them, kind), getattr(without, kind), strict=True):
            assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


@pytest.mark.parametrize("form", FORMS)
def test_without_trunks_the_bits_are_those_of_the_plain_products(form: str) -> None:
    """Columns side by side, one product, the bias: however they are laid out."""
    cache_map, content = make_map(DESIGNS["previous"], form=form), make_content(tokens=40)
    mapper = Mapper(cache_map)
    mapped = mapper.map(content)
    for product in mapper.products:
        parts = [columns(content, block) for block in product.blocks]
        x = torch.stack(parts, dim=2).unflatten(-1, (product.groups, -1)).permute(3, 0, 1, 2, 4).flatten(1, 2)
        y = product.run(x.flatten(2)).permute(1, 2, 0, 3).flatten(2)
        for n, (layer, kind) in enumerate(product.outputs):
            plain = y[:, n].view(2, 40, HEADS, DIM).transpose(1, 2)
            assert torch.equal(getattr(mapped, kind)[layer], plain)


def test_what_trunks_read_counts() -> None:
    plain = make_map(DESIGNS["same"])
    assert Mapper(plain).lookback == 0
    cache_map = with_trunks(plain, "mixed")
    assert Mapper(cache_map).lookback == 2
    assert cache_map.blocks == plain.blocks | set(EARLIER)
    hidden = Trunk(
        (Block(0, "source_hidden"),), (torch.zeros(4, 2),), (torch.zeros(2),), "relu", {(0, "keys"): torch.zeros(2, 6)}
    )
    reading = CacheMap(plain.layers, {}, None, (hidden,))
    assert Mapper(reading).extras == hidden.blocks
    with pytest.raises(KvxferError, match=r"this map reads source_hidden\.0"):
        Mapper(reading).map(make_content())


@torch.inference_mode()
def test_a_cache_belongs_to_its_holder() -> None:
    """What is mapped may be changed in place: the map's biases are not a part of it."""
    cache_map = alone(with_trunks(make_map(DESIGNS["same"]), "mixed"))
    mapper, content = Mapper(cache_map), make_content(batch=1, tokens=1)
    first = mapper.map(content)
    kept = first.apply(torch.clone)
    for tensor in (*first.keys, *first.values):
        tensor.zero_()
    again = mapper.map(content)
    assert all(torch.equal(a, b) for a, b in zip(again.keys + again.values, kept.keys + kept.values, strict=True))


def test_a_training_step_can_go_on_from_content() -> None:
    mapper, source = Mapper(with_trunks(make_map(DESIGNS["both"]), "own")), make_content()
    with torch.no_grad():
        base = mapper.content(source, TargetTokens(None, None))
    mapped = mapper.map(source)
    assert all(torch.equal(a, b) for a, b in zip(base.keys, mapped.keys, strict=True))
    assert mapped.keys[0].is_inference()
    assert not base.keys[TARGET_LAYERS - 1].is_inference()
    scale = torch.ones((), requires_grad=True)
    (base.keys[0] * scale).square().sum().backward()
    assert scale.grad is not None


@pytest.mark.parametrize(("batch", "tokens"), [(1, 0), (0, 3), (2, 1)])
def test_few_tokens_or_none(batch: int, tokens: int) -> None:
    cache_map = with_trunks(make_map(DESIGNS["previous"], form="head-local"), "mixed")
    mapped = Mapper(cache_map).map(make_content(batch=2, tokens=4).rows(slice(0, batch)).span(0, tokens))
    assert mapped.values[TARGET_LAYERS - 1].shape == (batch, HEADS, tokens, DIM)
