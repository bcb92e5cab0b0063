"""The map artifact: what is written comes back, what was altered is refused, and it belongs to one pair."""

from __future__ import annotations

import ast
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import kvxfer
from kvxfer.errors import KvxferError
from kvxfer.files import file_sha256
from kvxfer.maps.artifact import EVIDENCE, MANIFEST, TENSORS, CacheMap
from kvxfer.maps.blocks import KINDS, Block
from kvxfer.maps.linear import LinearLayer
from tests.map_files import rewrite, rewrite_tensors

WIDTH = 4
PAIR = {
    "source": {"sha256": "aa", "geometry": {"layers": 12, "rotary": {"theta": 10000.0, "dim": 4}}},
    "target": {"model": "some/model", "revision": "bb", "geometry": {"layers": 12}},
    "tokenizer": "cc",
    "dtype": "float32",
    "direction": "forward",
}


def make_map(layers: int = 12, seed: int = 0) -> CacheMap:
    """A random map of many layers, put together in no order."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [(layer, kind) for layer in range(layers) for kind in KINDS]
    parts = {}
    for i in torch.randperm(len(outputs), generator=generator).tolist():
        layer, kind = outputs[i]
        blocks = tuple(Block(n, kind, -back) for n in range(layer % 2 + 1) for back in range(2))
        weight = torch.randn(1, len(blocks) * WIDTH, WIDTH, generator=generator)
        parts[layer, kind] = LinearLayer(blocks, weight, torch.randn(WIDTH, generator=generator))
    return CacheMap(parts, {"pair": copy.deepcopy(PAIR), "solver": {"name": "ridge", "k": 2}})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[CacheMap, Path]:
    """A map as it lies on disk."""
    return make_map().save(tmp_path), tmp_path


@pytest.mark.parametrize("key", ["longest_context", "blocks", "pair"])
def test_a_manifest_that_was_changed_alone_is_refused(saved: tuple[CacheMap, Path], key: str) -> None:
    _, directory = saved
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest[key] = {"keys.0": ["values.0"]} if key == "blocks" else "another"
    (directory / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(KvxferError, match="altered after"):
        CacheMap.load(directory)


def test_a_map_comes_back_bit_by_bit(saved: tuple[CacheMap, Path]) -> None:
    written, directory = saved
    loaded = CacheMap.load(directory)
    assert set(loaded.layers) == set(written.layers)
    for output, layer in written.layers.items():
        assert loaded.layers[output].blocks == layer.blocks
        assert torch.equal(loaded.layers[output].weight, layer.weight)
        assert torch.equal(loaded.layers[output].bias, layer.bias)
    assert loaded.manifest == written.manifest
    assert loaded.hash == written.hash


def test_the_hash_is_stable_and_names_content(saved: tuple[CacheMap, Path], tmp_path_factory: Any) -> None:
    written, _ = saved
    again, other = (make_map(seed=seed).save(tmp_path_factory.mktemp("map")) for seed in (0, 1))
    assert again.hash == written.hash
    assert other.hash != written.hash
    renamed = CacheMap(written.layers, {**written.manifest, "solver": {"name": "ridge", "k": 3}})
    assert renamed.hash != written.hash
    shuffled = dict(reversed(written.manifest.items()))
    assert CacheMap(written.layers, shuffled).hash == written.hash


def test_a_map_s_name_is_pinned(tmp_path: Path) -> None:
    """What their tensors vouch for is pinned: evidence and results name maps by it."""
    layers = {
        (0, kind): LinearLayer((Block(0, kind),), torch.arange(16.0).view(1, 4, 4), torch.zeros(4)) for kind in KINDS
    }
    written = CacheMap(layers, {"pair": PAIR}).save(tmp_path)
    assert written.manifest["schema"] == 3
    assert written.manifest["trunks"] == written.manifest["random_layers"] == []
    with safe_open(tmp_path / TENSORS, framework="pt") as file:
        assert file.metadata() == {"manifest": "8569198e796e2da6c552758cac41befa86cbc8ef596d57b4e3227c27b45e3b92"}


def test_size_and_cost_are_those_of_the_tensors(saved: tuple[CacheMap, Path]) -> None:
    written, directory = saved
    tensors = load_file(directory / TENSORS)
    assert written.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert written.bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    flops = sum(2 * t.numel() if name.endswith("weight") else t.numel() for name, t in tensors.items())
    assert written.flops_per_token == flops


def test_views_of_a_larger_matrix_are_saved(tmp_path: Path) -> None:
    """Solvers cut layers out of one solution: such columns are not contiguous."""
    whole = torch.randn(1, WIDTH, 2 * WIDTH)
    block = (Block(0, "keys"),)
    parts = {
        (0, "keys"): LinearLayer(block, whole[..., :WIDTH], torch.zeros(WIDTH)),
        (0, "values"): LinearLayer(block, whole[..., WIDTH:], torch.zeros(WIDTH)),
    }
    CacheMap(parts, {"pair": PAIR}).save(tmp_path)
    assert torch.equal(CacheMap.load(tmp_path).layers[0, "values"].weight, whole[..., WIDTH:])


def test_altered_tensors_are_refused(saved: tuple[CacheMap, Path]) -> None:
    _, directory = saved
    content = bytearray((directory / TENSORS).read_bytes())
    content[-1] ^= 1
    (directory / TENSORS).write_bytes(content)
    with pytest.raises(KvxferError, match=r"map\.safetensors: SHA-256 .* damaged or was altered"):
        CacheMap.load(directory)


def test_tensors_that_are_none_are_refused_even_with_their_digest(saved: tuple[CacheMap, Path]) -> None:
    _, directory = saved
    (directory / TENSORS).write_bytes(b"nothing of the kind")
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps({**manifest, "sha256": file_sha256(directory / TENSORS)}))
    with pytest.raises(KvxferError, match="does not describe its tensors"):
        CacheMap.load(directory)


def test_a_missing_tensor_is_refused(saved: tuple[CacheMap, Path]) -> None:
    _, directory = saved
    rewrite_tensors(directory, lambda tensors: tensors.pop("values.10.bias"))
    with pytest.raises(KvxferError, match=r"values\.10\.bias"):
        CacheMap.load(directory)


BLOCKS: dict[str, Any] = {
    "gone": lambda m: m.pop("blocks") and None,
    "a list": lambda m: m | {"blocks": ["keys.0"]},
    "nothing": lambda m: m | {"blocks": {}},
    "no layer": lambda m: m["blocks"].pop("keys.11") and None,
    "fewer": lambda m: m["blocks"]["keys.3"].pop() and None,
    "more": lambda m: m["blocks"]["keys.3"].append("keys.0"),
    "another layer's": lambda m: m["blocks"].update({"keys.3": m["blocks"]["keys.2"]}),
    "a new layer": lambda m: m["blocks"].update({"keys.12": ["keys.0", "keys.0@-1"]}),
    "no number": lambda m: m["blocks"].update({"keys.x": m["blocks"].pop("keys.3")}),
    "an unknown kind": lambda m: m["blocks"].update({"queries.3": m["blocks"].pop("keys.3")}),
    "no block name": lambda m: m["blocks"].update({"keys.3": ["os.system"]}),
    "a wild offset": lambda m: m["blocks"].update({"keys.2": ["keys.0", "keys.0@-x"]}),
    "numbers": lambda m: m["blocks"].update({"keys.2": [1, 2]}),
    "null": lambda m: m["blocks"].update({"keys.2": None}),
}


@pytest.mark.parametrize("change", BLOCKS.values(), ids=BLOCKS.keys())
def test_altered_blocks_are_refused(change: Any, saved: tuple[CacheMap, Path]) -> None:
    _, directory = saved
    rewrite(directory, change)
    with pytest.raises(KvxferError, match=r"manifest\.json does not describe its tensors") as refusal:
        CacheMap.load(directory)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("schema", [0, 2, "3", None])
def test_another_schema_is_refused(schema: Any, saved: tuple[CacheMap, Path]) -> None:
    rewrite(saved[1], lambda m: {**m, "schema": schema})
    with pytest.raises(KvxferError, match=f"map schema {schema} is not 3"):
        CacheMap.load(saved[1])


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_a_missing_file_is_named(name: str, saved: tuple[CacheMap, Path]) -> None:
    (saved[1] / name).unlink()
    with pytest.raises(KvxferError, match="holds no map"):
        CacheMap.load(saved[1])


@pytest.mark.parametrize("text", ["", "{", "[1]", "null"])
def test_a_broken_manifest_is_named(text: str, saved: tuple[CacheMap, Path]) -> None:
    (saved[1] / MANIFEST).write_text(text)
    with pytest.raises(KvxferError, match=r"manifest\.json"):
        CacheMap.load(saved[1])


FIELDS = [
    (("dtype",), "bfloat16", r"pair\.dtype = float32 but this pair has bfloat16"),
    (("direction",), "reversed", r"pair\.direction = forward but this pair has reversed"),
    (("tokenizer",), "dd", r"pair\.tokenizer = cc but this pair has dd"),
    (("target", "revision"), "ee", r"pair\.target\.revision = bb but this pair has ee"),
    (("source", "geometry", "rotary", "theta"), 1.0, r"pair\.source\.geometry\.rotary\.theta = 10000\.0 .* has 1\.0"),
    (("source", "geometry", "extra"), 1, r"pair\.source\.geometry\.extra = None but this pair has 1"),
]


@pytest.mark.parametrize(("path", "value", "message"), FIELDS, ids=lambda x: x[-1] if isinstance(x, tuple) else None)
def test_another_pair_is_refused_by_its_first_differing_field(path: Any, value: Any, message: str) -> None:
    other = copy.deepcopy(PAIR)
    place: Any = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(KvxferError, match=message):
        make_map(2).require(other)


def test_its_own_pair_is_accepted_and_a_manifest_without_one_refused(saved: tuple[CacheMap, Path]) -> None:
    CacheMap.load(saved[1]).require(PAIR)
    rewrite(saved[1], lambda m: m.pop("pair") and None)
    with pytest.raises(KvxferError, match="pair = None"):
        CacheMap.load(saved[1]).require(PAIR)


def test_evidence_lies_beside_the_map_and_leaves_its_hash(saved: tuple[CacheMap, Path]) -> None:
    written, directory = saved
    written.add_evidence(directory, "abc", {"accuracy": 0.5})
    assert json.loads((directory / EVIDENCE / "abc.json").read_text()) == {"map": written.hash, "accuracy": 0.5}
    assert CacheMap.load(directory).hash == written.hash


def test_nothing_in_the_package_unpickles() -> None:
    """No pickle in any form: files of others are read by safetensors and JSON alone.

    A training's own checkpoint is Lightning's, and read as weights alone: torch then makes nothing but plain types.
    """
    banned_modules = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    loads = []
    for path in Path(kvxfer.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & banned_modules, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in banned_modules, path
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                loads.append((path.name, node.attr))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in [ast.unparse(keyword) for keyword in node.keywords]
    assert set(loads) <= {("resuming.py", "load"), ("resuming.py", "save")}
