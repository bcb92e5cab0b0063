"""Trunks as a part of the artifact: their shapes are checked, their cost is counted, they come back."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.artifact import TENSORS, CacheMap
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from tests.map_files import rewrite, rewrite_tensors

WIDTH, HIDDEN, EMBEDDING = 4, 5, 7
PAIR = {side: {"geometry": {"hidden": EMBEDDING}} for side in ("source", "target")}
READ = (Block(0, "keys"), Block(1, "values", -2), Block(0, "embedding"))
COLUMNS = 2 * WIDTH + EMBEDDING


def make_trunk(outputs: list[Output], depth: int = 1, seed: int = 0, **changes: Any) -> Trunk:
    draw = torch.Generator().manual_seed(seed)
    widths = [COLUMNS, *[HIDDEN + n for n in range(depth)]]
    parts = {
        "blocks": READ,
        "weights": tuple(torch.randn(a, b, generator=draw) for a, b in itertools.pairwise(widths)),
        "biases": tuple(torch.randn(width, generator=draw) for width in widths[1:]),
        "activation": "gelu",
        "readouts": {output: torch.randn(widths[-1], WIDTH, generator=draw) for output in outputs},
    }
    return Trunk(**{**parts, **changes})


def make_map() -> CacheMap:
    """Two target layers: keys with a linear part and a trunk each, values with one trunk between them and no more."""
    layers = {}
    for layer in range(2):
        layers[layer, "keys"] = LinearLayer((Block(layer, "keys"),), torch.randn(1, WIDTH, WIDTH), torch.randn(WIDTH))
        layers[layer, "values"] = LinearLayer((), torch.zeros(1, 0, WIDTH), torch.randn(WIDTH))
    trunks = [make_trunk([(layer, "keys")], seed=layer) for layer in range(2)]
    shared = make_trunk([(1, "values"), (0, "values")], depth=2, activation="relu")
    return CacheMap(layers, {"pair": PAIR}, None, (*trunks, shared))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CacheMap, Path]:
    torch.manual_seed(0)
    return make_map().save(tmp_path), tmp_path


def test_trunks_come_back_bit_by_bit(saved: tuple[CacheMap, Path], tmp_path_factory: Any) -> None:
    written, directory = saved
    loaded = CacheMap.load(directory)
    assert loaded.hash == written.hash
    assert loaded.manifest["schema"] == 3
    assert loaded.form == written.form == "full_head_trunks"
    assert all(loaded.layers[layer, "values"].weight.shape == (1, 0, WIDTH) for layer in range(2))
    for ours, theirs in zip(loaded.trunks, written.trunks, strict=True):
        assert (ours.blocks, ours.activation, list(ours.readouts)) == (
            theirs.blocks,
            theirs.activation,
            list(theirs.readouts),
        )
        assert all(torch.equal(a, b) for a, b in zip(_all(ours), _all(theirs), strict=True))
    folder = tmp_path_factory.mktemp("again")
    loaded.save(folder)
    assert CacheMap.load(folder).hash == written.hash
    bare = CacheMap(written.layers, {"pair": PAIR}).save(tmp_path_factory.mktemp("bare"))
    assert bare.hash != written.hash
    assert bare.form == "full_head"


def _all(trunk: Trunk) -> tuple[Tensor, ...]:
    return *trunk.weights, *trunk.biases, *trunk.readouts.values()


def test_size_and_cost_count_a_shared_trunk_once(saved: tuple[CacheMap, Path]) -> None:
    written, directory = saved
    tensors = load_file(directory / TENSORS)
    assert written.parameters == written.manifest["parameters"] == sum(t.numel() for t in tensors.values())
    assert written.bytes == 4 * written.parameters
    own = 2 * COLUMNS * HIDDEN + HIDDEN + 2 * HIDDEN * WIDTH
    shared = 2 * COLUMNS * HIDDEN + HIDDEN + 2 * HIDDEN * (HIDDEN + 1) + HIDDEN + 1 + 2 * 2 * (HIDDEN + 1) * WIDTH
    assert [trunk.flops for trunk in written.trunks] == [own, own, shared]
    assert written.flops_per_token == 2 * own + shared + 2 * 2 * WIDTH**2 + 4 * WIDTH
    # Source keys 0 and 1, values 1, which trunks alone read at an earlier token, and the target's embedding.
    assert written.extras == (Block(0, "embedding"),)
    assert written.bytes_from_source_per_token == 2 * 3 * WIDTH
    assert written.bytes_read_per_token == 2 * (3 * WIDTH + EMBEDDING)
    assert written.bytes_written_per_token == 2 * 4 * WIDTH


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_hidden_layers_are_the_formula(activation: str) -> None:
    trunk = make_trunk([(0, "keys")], depth=2, activation=activation)
    x = torch.randn(3, 2, COLUMNS)

    def act(value: float) -> float:
        return max(value, 0.0) if activation == "relu" else value * (1 + math.erf(value / math.sqrt(2))) / 2

    expected = x.double()
    for weight, bias in zip(trunk.weights, trunk.biases, strict=True):
        expected = (expected @ weight.double() + bias.double()).apply_(act)
    assert torch.allclose(trunk.hidden(x).double(), expected, atol=1e-5)
    assert torch.allclose(trunk.hidden(x.double()), expected, atol=1e-12)


MANIFESTS: dict[str, Any] = {
    "gone": lambda m: m.pop("trunks") and None,
    "none": lambda m: m | {"trunks": []},
    "null": lambda m: m | {"trunks": None},
    "a word": lambda m: m | {"trunks": "relu"},
    "numbers": lambda m: m | {"trunks": [1, 2, 3]},
    "one less": lambda m: m["trunks"].pop() and None,
    "one more": lambda m: m["trunks"].append(m["trunks"][0]),
    "no blocks": lambda m: m["trunks"][0].pop("blocks") and None,
    "empty blocks": lambda m: m["trunks"][0].update(blocks=[]),
    "fewer blocks": lambda m: m["trunks"][0]["blocks"].pop() and None,
    "no block name": lambda m: m["trunks"][0].update(blocks=["os.system"]),
    "random features that are not there": lambda m: m["trunks"][0].update(blocks=["random_relu.0"]),
    "unknown activation": lambda m: m["trunks"][0].update(activation="swish"),
    "no activation": lambda m: m["trunks"][0].update(activation=None),
    "an activation in a list": lambda m: m["trunks"][0].update(activation=["relu"]),
    "deeper": lambda m: m["trunks"][0]["hidden"].append(5),
    "shallower": lambda m: m["trunks"][2]["hidden"].pop() and None,
    "wider": lambda m: m["trunks"][0].update(hidden=[6]),
    "a readout of no output": lambda m: m["trunks"][0].update(readouts=["keys.2"]),
    "no readouts": lambda m: m["trunks"][0].update(readouts=[]),
    "a readout less": lambda m: m["trunks"][2]["readouts"].pop() and None,
    "a readout twice": lambda m: m["trunks"][2].update(readouts=["values.0", "values.0", "values.1"]),
    "a readout without a number": lambda m: m["trunks"][0].update(readouts=["keys"]),
}


@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_an_altered_description_is_refused(change: Any, saved: tuple[CacheMap, Path]) -> None:
    rewrite(saved[1], change)
    with pytest.raises(KvxferError, match=r"manifest\.json does not describe its tensors") as refusal:
        CacheMap.load(saved[1])
    assert "\n" not in str(refusal.value)


def _renamed(old: str, new: str) -> Any:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


TENSOR_CHANGES: dict[str, Any] = {
    "weight missing": lambda t: t.pop("trunk.0.0.weight"),
    "bias missing": lambda t: t.pop("trunk.2.1.bias"),
    "readout missing": lambda t: t.pop("trunk.1.readout.keys.1"),
    "another trunk's": lambda t: t.update({"trunk.7.0.bias": torch.zeros(1)}),
    "readout of no output": _renamed("trunk.0.readout.keys.0", "trunk.0.readout.keys.9"),
    "longer bias": lambda t: t.update({"trunk.0.0.bias": torch.zeros(HIDDEN + 1)}),
    "flat weight": lambda t: t.update({"trunk.0.0.weight": torch.zeros(HIDDEN)}),
    "other inputs": lambda t: t.update({"trunk.0.0.weight": torch.zeros(COLUMNS + 1, HIDDEN)}),
    "layers that do not chain": lambda t: t.update({"trunk.2.1.weight": torch.zeros(HIDDEN + 2, HIDDEN + 1)}),
    "other outputs": lambda t: t.update({"trunk.0.readout.keys.0": torch.zeros(HIDDEN, WIDTH + 1)}),
    "other hidden": lambda t: t.update({"trunk.0.readout.keys.0": torch.zeros(HIDDEN + 1, WIDTH)}),
    "integers": lambda t: t.update({"trunk.0.0.bias": torch.zeros(HIDDEN, dtype=torch.int64)}),
    "a linear part with rows but no blocks": lambda t: t.update({"values.0.weight": torch.zeros(1, 1, WIDTH)}),
    "heads without blocks": lambda t: t.update({"values.0.weight": torch.zeros(2, 0, WIDTH // 2)}),
}


@pytest.mark.parametrize("change", TENSOR_CHANGES.values(), ids=TENSOR_CHANGES.keys())
def test_tensors_that_do_not_fit_are_refused(change: Any, saved: tuple[CacheMap, Path]) -> None:
    rewrite_tensors(saved[1], change)
    with pytest.raises(KvxferError, match=r"manifest\.json does not describe its tensors") as refusal:
        CacheMap.load(saved[1])
    assert "\n" not in str(refusal.value)


def test_a_damaged_tensor_is_refused(saved: tuple[CacheMap, Path]) -> None:
    content = bytearray((saved[1] / TENSORS).read_bytes())
    content[-1] ^= 1
    (saved[1] / TENSORS).write_bytes(content)
    with pytest.raises(KvxferError, match="damaged or was altered"):
        CacheMap.load(saved[1])


WRONG: dict[str, dict[str, Any]] = {
    "activation is 'tanh'": {"activation": "tanh"},
    "has no blocks": {"blocks": ()},
    "no hidden layers": {"weights": (), "biases": ()},
    "no readouts": {"readouts": {}},
    "do not fit each other": {"biases": (torch.zeros(HIDDEN), torch.zeros(HIDDEN))},
    "or their biases": {"biases": (torch.zeros(HIDDEN + 1),)},
    r"readout of keys\.3, \(6, 4\), does not fit a trunk of 5": {"readouts": {(3, "keys"): torch.zeros(6, 4)}},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_trunk_that_is_none_cannot_be_made(message: str) -> None:
    with pytest.raises(KvxferError, match=message):
        make_trunk([(0, "keys")], **WRONG[message])


def test_a_readout_needs_its_output() -> None:
    layers = make_map().layers
    with pytest.raises(KvxferError, match=r"a readout of keys\.2, which the map has no layer for"):
        CacheMap(layers, {}, None, (make_trunk([(2, "keys")]),))
    wide = make_trunk([], readouts={(1, "keys"): torch.zeros(HIDDEN, 6)})
    with pytest.raises(KvxferError, match=r"readout of keys\.1 gives 6 columns, its layer 4"):
        CacheMap(layers, {}, None, (wide,))
