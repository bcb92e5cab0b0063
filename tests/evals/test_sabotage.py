"""A map, or a cache, that is broken on purpose is caught: by the verdict, the check of its fit, or an error.

The embedded models have real weights, and the map beats the source before it is broken: otherwise nothing that is done
to it could be seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer import toy
from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import MARGIN
from kvxfer.experiment.runs import Run
from kvxfer.experiment.stages import evaluate as stage
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import TENSORS, CacheMap
from kvxfer.maps.blocks import KINDS, Block, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.maps.trunks import Trunk
from kvxfer.models import rope
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair, load_pair
from kvxfer.report.rendering import render
from kvxfer.report.verdict import fit_warning
from tests.small_runs import run, settings_of

FIT = ["corpus.rows={fit: 64, validation: 16, held_out: 16}", "penalty.lam=1e-3"]
ASKED = ["eval=mapped", "eval.stories=20", "eval.questions=3", "eval.batch_size=30"]
Layers = dict[Output, LinearLayer]


@dataclass(frozen=True)
class Scene:
    """The pair, a good map of it, and where both are."""

    outputs: Path
    directory: Path
    pair: Pair
    cache_map: CacheMap
    settings: Any

    def results(
        self,
        monkeypatch: pytest.MonkeyPatch,
        pair: Pair | None = None,
        layers: Layers | None = None,
        trunks: tuple[Trunk, ...] = (),
        spoil: Callable[..., None] | None = None,
    ) -> dict[str, Any]:
        """What the evaluation says where the pair, the map or the cache in memory are others than it believes."""
        if spoil is not None:
            handed, more = Transfer.handed, (self.pair.target.cos_sin,) if spoil is late_positions else ()

            def spoilt(transfer: Transfer, *args: Any) -> KV:
                cache = handed(transfer, *args)
                spoil(cache, *more)
                return cache

            monkeypatch.setattr(Transfer, "handed", spoilt)
        if layers is not None:
            broken = CacheMap(layers, self.cache_map.manifest, trunks=trunks)
            monkeypatch.setattr(stage, "Mapper", lambda _, *args, **options: Mapper(broken, *args, **options))
        record = {"config": {"eval": {}}, "inputs": {}, "started": "now"}
        here = Run("evaluate", "sabotage", self.outputs, self.outputs, record)
        scene = stage.Scene(self.settings, self.settings.eval, self.cache_map, self.directory, None)
        return stage.measure(scene, here, lambda _: pair or self.pair)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    outputs = tmp_path_factory.mktemp("sabotage")
    directory = run("train", outputs, *FIT)
    settings = settings_of("evaluate", outputs, *FIT, *ASKED)
    return Scene(outputs, directory, load_pair(settings.pair), CacheMap.load(directory), settings)


def angles(model: LoadedModel, change: Callable[[int, int], tuple[Tensor, Tensor]]) -> LoadedModel:
    """The same model, whose cos and sin are said to be others; it computes with its own."""
    other = copy.copy(model)
    other.cos_sin = lambda tokens, start=0: change(tokens, start)  # type: ignore[method-assign]
    return other


def wrong_theta(scene: Scene) -> Pair:
    """Angles of a base ten times as large as the source's."""
    true = scene.pair.source
    half = true.geometry.rotary.dim // 2

    def cos_sin(tokens: int, start: int) -> tuple[Tensor, Tensor]:
        base = 10 * true.geometry.rotary.theta
        turns = torch.arange(start, start + tokens)[:, None] * base ** (-torch.arange(half) / half)
        return torch.cat([turns, turns], dim=1).cos(), torch.cat([turns, turns], dim=1).sin()

    return replace(scene.pair, source=angles(true, cos_sin))


def not_stripped(scene: Scene) -> Pair:
    """No angles at all: rotated keys are read as content."""
    true = scene.pair.source

    def cos_sin(tokens: int, start: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.full_like(x, one) for x, one in zip(true.cos_sin(tokens, start), (1, 0), strict=True))

    return replace(scene.pair, source=angles(true, cos_sin))


def shifted(scene: Scene) -> Pair:
    """Mapped keys are put one position later than they stand."""
    true = scene.pair.target
    return replace(scene.pair, target=angles(true, lambda tokens, start: true.cos_sin(tokens, start + 1)))


def swapped_heads(layers: Layers, heads: int = 2) -> Layers:
    def swap(columns: Tensor) -> Tensor:
        return columns.unflatten(-1, (heads, -1)).flip(-2).flatten(-2)

    return {output: replace(part, weight=swap(part.weight), bias=swap(part.bias)) for output, part in layers.items()}


def permuted_layers(layers: Layers) -> Layers:
    last = max(layer for layer, _ in layers)
    return {(layer, kind): layers[last - layer, kind] for layer, kind in layers}


def a_neighbours_map(layers: Layers) -> Layers:
    """One target layer is given what was fitted for the next."""
    return {**layers, **{(1, kind): layers[2, kind] for kind in ("keys", "values")}}


def half_the_rank(layers: Layers) -> Layers:
    def cut(weight: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
        rank = s.shape[-1] // 2
        return ((u[..., :rank] * s[..., None, :rank]) @ v[..., :rank, :]).float()

    return {output: replace(part, weight=cut(part.weight)) for output, part in layers.items()}


def swapped_kinds(layers: Layers) -> Layers:
    return {(layer, kind): layers[layer, "values" if kind == "keys" else "keys"] for layer, kind in layers}


def a_layer_of_zeros(layers: Layers) -> Layers:
    zeros = {
        (5, kind): replace(layers[5, kind], weight=0 * layers[5, kind].weight, bias=0 * layers[5, kind].bias)
        for kind in ("keys", "values")
    }
    return {**layers, **zeros}


def in_trunks(layers: Layers) -> tuple[Layers, tuple[Trunk, ...]]:
    """The same map as biases and hidden layers: x = relu(x / 10) * 10 - relu(-10 x) / 10.

    The two sides have scales of their own, since gelu(x) - gelu(-x) = x as well.
    """
    readers: dict[tuple[Block, ...], list[Output]] = {}
    for output, part in layers.items():
        readers.setdefault(part.blocks, []).append(output)
    trunks = []
    for blocks, outputs in readers.items():
        columns = layers[outputs[0]].weight.shape[1]
        signs = torch.cat([torch.eye(columns) / 10, -10 * torch.eye(columns)], dim=1)
        dense = {output: layers[output].dense() for output in outputs}
        readouts = {output: torch.cat([10 * weight, -weight / 10]) for output, weight in dense.items()}
        trunks.append(Trunk(blocks, (signs,), (torch.zeros(2 * columns),), "relu", readouts))
    nothing = {output: LinearLayer((), part.weight[:, :0], part.bias) for output, part in layers.items()}
    return nothing, tuple(trunks)


def swapped_readouts(trunk: Trunk) -> Trunk:
    """Two layers read what was trained for each other."""
    read = trunk.readouts
    swapped = {(1, kind): read[2, kind] for kind in KINDS} | {(2, kind): read[1, kind] for kind in KINDS}
    return replace(trunk, readouts={**read, **swapped})


def zeroed(trunk: Trunk) -> Trunk:
    return replace(trunk, weights=(0 * trunk.weights[0],))


def wrong_activation(trunk: Trunk) -> Trunk:
    return replace(trunk, activation="gelu")


def scaled(kind: str, factor: float) -> Callable[[Layers], Layers]:
    """All outputs of a kind a little too small."""

    def scale(layers: Layers) -> Layers:
        return {
            output: replace(part, weight=factor * part.weight, bias=factor * part.bias) if output[1] == kind else part
            for output, part in layers.items()
        }

    return scale


def half_the_rank_of_one(layers: Layers) -> Layers:
    return {**layers, (3, "values"): half_the_rank({(3, "values"): layers[3, "values"]})[3, "values"]}


def swapped_tokens(cache: KV) -> None:
    """Two tokens in each other's place."""
    for tensor in (*cache.keys, *cache.values):
        tensor[:, :, [20, 60]] = tensor[:, :, [60, 20]]


def stale_tokens(cache: KV) -> None:
    """The last eight are still what stood in memory: those eight before."""
    for tensor in (*cache.keys, *cache.values):
        tensor[:, :, -8:] = tensor[:, :, -16:-8].clone()


def late_positions(cache: KV, angles: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
    """From token 100 on every key is rotated by one position more."""
    late = cache.tokens - 100
    cos, sin = (x.expand(late, -1) for x in angles(1, 1))
    for keys in cache.keys:
        keys[:, :, 100:] = rope.restore(keys[:, :, 100:], cos, sin)


PAIRS = {"wrong theta": wrong_theta, "shifted positions": shifted, "source keys not stripped": not_stripped}
MAPS = {
    "swapped heads": swapped_heads,
    "permuted layers": permuted_layers,
    "a neighbour's map": a_neighbours_map,
    "half the rank": half_the_rank,
    "values and keys swapped": swapped_kinds,
    "one layer zeroed": a_layer_of_zeros,
    "keys a tenth too small": scaled("keys", 0.9),
    "values a fifth too small": scaled("values", 0.8),
    "half the rank of one output": half_the_rank_of_one,
}
TRUNKS = {"swapped readouts": swapped_readouts, "a zeroed trunk": zeroed, "wrong activation": wrong_activation}
CACHES = {"two tokens swapped": swapped_tokens, "stale last tokens": stale_tokens, "late positions": late_positions}
SEEN_BY_THE_FIT_ALONE = ("half the rank", "keys a tenth too small", "values a fifth too small", "two tokens swapped")
WITHIN_THE_MARGIN = ("half the rank of one output",)
"""What changes no number by more than a margin within which caches count as equally good."""


def test_the_map_that_is_not_sabotaged_is_worth_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    results = scene.results(monkeypatch)
    assert results["verdict"]["kind"] == "beats"
    assert results["data"]["fit_check"]["passed"]
    assert results["data"]["fit_check"]["worst"]["ratio"] < 1.3
    report = render(results)
    assert "**Worth it: the mapped cache beats the source" in report
    assert "On this text layer" not in report
    assert "| fit: largest ratio of unexplained variance |" in report


def test_the_same_map_in_trunks_is_worth_as_much(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, trunks = in_trunks(scene.cache_map.layers)
    results = scene.results(monkeypatch, layers=layers, trunks=trunks)
    assert results["verdict"]["kind"] == "beats"
    assert results["data"]["fit_check"]["passed"]
    assert results["data"]["fit_check"]["worst"]["ratio"] < 1.3


@pytest.mark.parametrize("name", WITHIN_THE_MARGIN)
def test_sabotage_that_is_not_seen_changes_nothing(name: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (
        scene.results(monkeypatch, layers=layers)["data"] for layers in (None, MAPS[name](scene.cache_map.layers))
    )
    assert fit_warning(bad) is None
    assert abs(bad["conditions"]["mapped"]["nats"] - good["conditions"]["mapped"]["nats"]) < MARGIN
    assert bad["conditions"]["mapped"]["accuracy"] == pytest.approx(good["conditions"]["mapped"]["accuracy"], abs=0.02)


@pytest.mark.parametrize("name", [name for name in (*PAIRS, *MAPS, *TRUNKS, *CACHES) if name not in WITHIN_THE_MARGIN])
def test_sabotage_is_seen(name: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PAIRS:
        results = scene.results(monkeypatch, pair=PAIRS[name](scene))
    elif name in TRUNKS:
        layers, trunks = in_trunks(scene.cache_map.layers)
        results = scene.results(monkeypatch, layers=layers, trunks=tuple(map(TRUNKS[name], trunks)))
    elif name in CACHES:
        results = scene.results(monkeypatch, spoil=CACHES[name])
    else:
        results = scene.results(monkeypatch, layers=MAPS[name](scene.cache_map.layers))
    said = results["verdict"]
    assert (said["kind"] == "beats") == (name in SEEN_BY_THE_FIT_ALONE), said["sentence"]
    warning = fit_warning(results["data"])
    assert warning is not None
    report = render(results)
    # Before everything else, so that it cannot be overlooked.
    assert report.index(said["sentence"]) < report.index(f"**{warning}**") < report.index("## Headline")
    assert "the map is damaged, or this text is far from its calibration" in warning
    assert "| **failed** |" in report


def test_sabotage_by_a_stale_revision_is_refused(scene: Scene, tmp_path: Path) -> None:
    """The target's checkpoint was trained on: a little in one tensor."""
    for file in toy.TARGET_DIR.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("v_proj.weight"))
    weights[name][0, 0] += 1e-3
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    asked = [*FIT, *ASKED, f"pair.target.model={tmp_path}", f"map={scene.directory}"]
    with pytest.raises(KvxferError, match=r"^the map was fitted with pair\.target\.sha256 = .* but this"):
        run("evaluate", scene.outputs, *asked)


def test_sabotage_by_another_pairs_map_is_refused(scene: Scene, tiny_folders: tuple[Path, Path]) -> None:
    models = [f"pair.{side}.model={folder}" for side, folder in zip(("source", "target"), tiny_folders, strict=True)]
    with pytest.raises(KvxferError, match=r"^the map was fitted with pair\.source\."):
        run("evaluate", scene.outputs, *FIT, *ASKED, *models, f"map={scene.directory}")


def test_sabotage_of_the_file_is_refused(scene: Scene, tmp_path: Path) -> None:
    """What cannot be told from the scores of a few questions is told by the hash."""
    for file in scene.directory.glob("m*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / TENSORS)
    tensors["values.0.weight"] *= 1.001
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(KvxferError, match="the map is damaged or was altered"):
        run("evaluate", scene.outputs, *FIT, *ASKED, f"map={tmp_path}")
