"""Networks: untrained they are the base, and what they export gives what they give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.networks import Network, make_network, trained_outputs
from kvxfer.fitting.trained.scales import Scales
from kvxfer.fitting.trained.specs import MLP, Corrected, Residual, Trained
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS, Block
from kvxfer.maps.columns import TargetTokens, read_source
from kvxfer.maps.linear import LinearLayer
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.random_maps import random_map

CPU = torch.device("cpu")
IDS = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(1))
SPECS = {
    "residual": Residual("residual", hidden=8),
    "full": Corrected("corrected"),
    "low_rank": Corrected("corrected", delta_rank=3),
    "mlp": MLP("mlp", hidden=12, depth=2),
    "shared": MLP("mlp_small", hidden=12, depth=3, share=True, activation="gelu"),
}


def low_rank(base: CacheMap) -> CacheMap:
    """The same map with a second factor in every layer."""
    layers = {}
    for output, layer in base.layers.items():
        left, singular, right = torch.linalg.svd(layer.weight[0], full_matrices=False)
        layers[output] = replace(layer, weight=(left * singular)[None, :, :5], right=right[None, :5])
    return replace(base, layers=layers)


def head_local(pair: Pair) -> CacheMap:
    """Random weights of a map whose heads read their own head."""
    base, geometry = random_map(pair, DESIGNS["same"]), pair.target.geometry
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for output, layer in base.layers.items():
        inputs = len(layer.blocks) * geometry.head_dim
        weight = torch.randn(geometry.kv_heads, inputs, geometry.head_dim, generator=generator) / inputs**0.5
        layers[output] = LinearLayer(layer.blocks, weight, layer.bias)
    return CacheMap(layers, {})


def make_base(pair: Pair, form: str) -> CacheMap:
    """A base of some form."""
    if form == "low_rank":
        return low_rank(random_map(pair, DESIGNS["same"]))
    return head_local(pair) if form == "head_local" else random_map(pair, DESIGNS[form])


def read(pair: Pair, base: CacheMap) -> tuple[KV, TargetTokens, KV]:
    """What a network reads of some tokens, and the target's own content of them."""
    source = pair.content("source", read_source(pair, IDS, base.extras))
    known = TargetTokens.of(pair, IDS, base.extras)
    target = pair.content("target", pair.target.prefill(IDS))
    clone = lambda x: None if x is None else x.clone()  # noqa: E731
    layer0 = None if known.layer0 is None else known.layer0.apply(torch.clone)
    return source.apply(torch.clone), TargetTokens(clone(known.embeddings), layer0), target.apply(torch.clone)


def build(pair: Pair, base: CacheMap, spec: Trained, seed: int = 0) -> tuple[Network, KV, TargetTokens]:
    """A network, and what it reads."""
    source, known, target = read(pair, base)
    scales = Scales(base.blocks, base.layers, 4, base.random)
    scales.add(source, known, target)
    return make_network(base, spec, scales, seed, CPU), source, known


def stir(network: Network) -> None:
    """Change all that is trained."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def tensors(kv: KV) -> list[torch.Tensor]:
    return [*kv.keys, *kv.values]


@pytest.mark.parametrize("form", ["same", "rich", "low_rank", "head_local"])
@pytest.mark.parametrize("name", ["residual", "full", "low_rank"])
def test_untrained_it_is_the_base_bit_for_bit(tiny_pair: Pair, form: str, name: str) -> None:
    base = make_base(tiny_pair, form)
    network, source, known = build(tiny_pair, base, SPECS[name])
    expected = tensors(Mapper(base).content(source, known))
    assert all(torch.equal(a, b) for a, b in zip(tensors(network(source, known)), expected, strict=True))
    layers, trunks = network.export()
    found = tensors(Mapper(replace(base, layers=layers, trunks=trunks)).content(source, known))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bool(trunks) == (name == "residual")


@pytest.mark.parametrize("form", ["same", "both", "relu", "low_rank", "head_local"])
@pytest.mark.parametrize("name", list(SPECS))
def test_what_it_exports_gives_what_it_gives(tiny_pair: Pair, form: str, name: str) -> None:
    base = make_base(tiny_pair, form)
    network, source, known = build(tiny_pair, base, SPECS[name])
    stir(network)
    with torch.no_grad():
        expected = tensors(network(source, known))
    layers, trunks = network.export()
    exported = replace(base, layers=layers, trunks=trunks)
    for a, b in zip(tensors(Mapper(exported).content(source, known)), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4), float((a - b).abs().max())
    forms = {layer.right is not None for layer in layers.values()}
    assert forms == {form == "low_rank" and name in ("residual", "low_rank")}
    read_out = [output for trunk in trunks for output in trunk.readouts]
    assert sorted(read_out) == (sorted(layers) if name in ("residual", "mlp", "shared") else [])


def test_a_shared_trunk_serves_all_that_read_the_same(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "both")
    shared, *_ = build(tiny_pair, base, SPECS["shared"])
    own, *_ = build(tiny_pair, base, SPECS["mlp"])
    assert [len(trunk.readouts) for trunk in shared.export()[1]] == [6]
    assert [len(trunk.readouts) for trunk in own.export()[1]] == [1] * 6


def test_only_some_layers(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "same")
    for name in SPECS:
        network, source, known = build(tiny_pair, base, replace(SPECS[name], layers=(1,)))
        stir(network)
        found, plain = network(source, known), Mapper(base).content(source, known)
        for layer in range(3):
            for kind in ("keys", "values"):
                same = torch.equal(getattr(found, kind)[layer], getattr(plain, kind)[layer])
                assert same == (layer != 1), (name, layer, kind)
        layers, trunks = network.export()
        assert all(layers[output] is base.layers[output] for output in layers if output[0] != 1)
        assert {output[0] for trunk in trunks for output in trunk.readouts} <= {1}
    with pytest.raises(KvxferError, match=r"solver\.layers=\[1, 3\]: the target has layers 0 to 2"):
        trained_outputs(base, Residual("residual", layers=(1, 3)))


def test_the_base_stands_in_no_state_and_the_seed_decides_the_rest(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "same")
    for spec in SPECS.values():
        network, *_ = build(tiny_pair, base, spec, seed=3)
        again, *_ = build(tiny_pair, base, spec, seed=3)
        state = network.state_dict()
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in state.items())
        assert not [name for name in state if not name.startswith("parts.")]
        assert network.trained == sum(p.numel() for p in network.parameters())
        assert all(p.requires_grad for p in network.parameters())


def test_gradients_reach_all_that_is_trained(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "embedding")
    for spec in SPECS.values():
        network, source, known = build(tiny_pair, base, spec)
        stir(network)
        sum(x.square().mean() for x in tensors(network(source, known))).backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in network.parameters())


def test_base_content_stays_float32_under_autocast(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "same")
    network, source, known = build(tiny_pair, base, SPECS["residual"])
    with torch.autocast("cpu", torch.bfloat16):
        found = network(source, known)
    expected = Mapper(base).content(source, known)
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(expected), strict=True))


def test_a_rank_that_no_weight_has(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "same")
    with pytest.raises(KvxferError, match=r"solver.delta_rank=1000 is more than a weight of 128 × 64 has"):
        build(tiny_pair, base, Corrected("corrected", delta_rank=1000))


def test_scales_are_of_the_tokens_that_a_map_gives(tiny_pair: Pair) -> None:
    base = make_base(tiny_pair, "previous")
    source, known, target = read(tiny_pair, base)
    scales = Scales(base.blocks, base.layers, 4)
    for row in range(2):
        scales.add(*(part.rows(slice(row, row + 1)) for part in (source,)), known, target.rows(slice(row, row + 1)))
    x = target.keys[2].transpose(1, 2).flatten(2)[:, 4:].flatten(0, 1).double()
    found = scales.of((2, "keys"))
    assert torch.allclose(found.mean, x.mean(0))
    assert torch.allclose(found.deviation, x.std(0, unbiased=False))
    x = source.values[1].transpose(1, 2).flatten(2)[:, 3:-1].flatten(0, 1).double()
    found = scales.of(Block(1, "values", -1))
    assert torch.allclose(found.mean, x.mean(0))
    assert torch.allclose(found.deviation, x.std(0, unbiased=False))
    target.keys[0][0, 0, 9, 0] = float("nan")
    scales.add(source, known, target)
    with pytest.raises(KvxferError, match="keys of layer 0 of the training rows holds numbers that are not finite"):
        scales.of((0, "keys"))
