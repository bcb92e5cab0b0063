"""Published shapes, and pairs of them with random weights: built, timed, and refused for anything else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.latency import clock
from kvxfer.experiment.config import compose, spelled_out
from kvxfer.fitting.closed import HeadLocal, Ridge
from kvxfer.fitting.dials import Reduced
from kvxfer.fitting.random_maps import random_map
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.blocks import DESIGNS
from kvxfer.maps.plan import Plan
from kvxfer.models.hf.published import PUBLISHED, Shape, published_geometry, random_model
from kvxfer.models.pair import load_pair
from kvxfer.moments.schedule import nearest
from tests.doubles import DOUBLES
from tests.small_runs import results_of, run, settings_of

ROTARY = {"rope_type": "default", "rope_theta": 1e6}
SMALL = {
    "small": Shape("qwen3", 6, 32, 4, 2, 64, 300, 4096, ROTARY, 0.0, True, head_dim=16),
    "large": Shape("qwen3", 8, 48, 8, 2, 96, 300, 4096, ROTARY, 0.0, head_dim=16),
}
GEOMETRY = ["pair=geometry", "pair.source=small", "pair.target=large", "solver.k=3", "eval=latency"]
FEW = ["eval.lengths=[16,24]", "eval.repeats=6", "eval.warmup=1"]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SMALL.items():
        monkeypatch.setitem(PUBLISHED, name, shape)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_parameters_as_its_publisher_says(name):
    model = random_model(name, None, "bfloat16", "meta", "sdpa", "pair.source")
    parameters = sum({id(p): p.numel() for p in model.lm.parameters()}.values())
    assert parameters / 1e9 == pytest.approx(PUBLISHED[name].billions, rel=0.015)
    assert model.geometry == model.whole
    assert model.geometry.head_dim == 128
    assert model.geometry.window is None
    assert model.geometry.rotary.theta == PUBLISHED[name].rope_parameters["rope_theta"]


@pytest.mark.parametrize("option", ["qwen3_0.6b_4b", "qwen3_14b_32b", "llama3.1_8b_70b", "ministral3_8b_14b"])
def test_the_table_has_the_depths_of_the_pair_options(option):
    family, source, target = option.split("_")
    name = {"llama3.1": "llama-3.1"}.get(family, family)
    layers = tuple(published_geometry(f"{name}-{size}", None, "x").layers for size in (source, target))
    assert layers == DOUBLES[option].depths


def test_a_slice_knows_the_whole_and_weights_are_seeded(shapes):
    model = random_model("large", 2, "bfloat16", "cpu", "sdpa", "pair.target")
    assert (model.geometry.layers, model.whole.layers, model.dtype) == (2, 8, torch.bfloat16)
    again = random_model("large", 2, "bfloat16", "cpu", "sdpa", "pair.target")
    assert all(torch.equal(a, b) for a, b in zip(model.lm.parameters(), again.lm.parameters(), strict=True))
    ids = torch.arange(8)[None]
    whole = model.next_token(model.inject(None), ids)
    with model.without_layers():
        assert model.next_token(model.inject(None), ids).shape == whole.shape
    assert torch.equal(model.next_token(model.inject(None), ids), whole)


def test_mistakes_are_named(shapes, tmp_path):
    with pytest.raises(KvxferError, match=r"pair\.source=nope: no published shape of that name; .*qwen3-14b"):
        run("evaluate", tmp_path, "pair=geometry", "pair.source=nope", "eval=latency")
    with pytest.raises(KvxferError, match=r"KV heads \(kv_heads\) differ: 8 in the source, 2 in the target"):
        run("evaluate", tmp_path, "pair=geometry", "pair.source=qwen3-8b", "pair.target=qwen2.5-3b", "eval=latency")
    with pytest.raises(KvxferError, match=r"pair\.layers=2 times a slice of random weights \(pair=geometry\)"):
        settings_of("evaluate", tmp_path, "pair.layers=2")
    with pytest.raises(KvxferError, match=r"pair\.layers=0 must be 1 or more"):
        settings_of("evaluate", tmp_path, "pair=geometry", "pair.layers=0")


@pytest.mark.parametrize(
    ("solver", "said"),
    [
        (Ridge(k=99), r"solver\.k=99 is more than the source's 2 layers"),
        (Ridge(k=1, method="all"), r"solver\.method=all reads .* set solver\.method=topk and solver\.k, at most 2"),
        (Ridge(k="auto"), r"solver\.k=auto leaves the map's form to data"),
        (Ridge(k=1, features=DESIGNS["relu"]), r"features=relu reads random features"),
        (Ridge(k=1, rank=Reduced("auto")), r"rank\.r=auto is chosen on data"),
        (HeadLocal(k=1, rank=Reduced(32)), r"rank\.r=32 must be below the 32 output columns"),
    ],
)
def test_a_form_that_only_data_decides_is_refused(tiny_pair, solver, said):
    with pytest.raises(KvxferError, match=said):
        random_map(tiny_pair, solver, {})


def test_a_share_of_the_rank_is_that_of_what_is_solved(tiny_pair):
    """As in a fit: a head's map of half the rank, where half of the whole output's would be all of a head's."""
    ranks = [
        random_map(tiny_pair, solver(k=1, rank=Reduced(0.5)), {}).layers[0, "keys"].weight.shape[2]
        for solver in (Ridge, HeadLocal)
    ]
    assert ranks == [32, 16]


@pytest.mark.parametrize("features", ["same", "rich", "layer0", "hidden"])
def test_a_random_map_runs_whatever_it_reads(tiny_pair, features):
    made = random_map(tiny_pair, Ridge(k=2, features=DESIGNS[features]), {"pair": tiny_pair.describe()})
    transfer = Transfer(tiny_pair, Mapper(made, pair=tiny_pair), Plan())
    ids = torch.arange(5, 13)[None]
    mapped = transfer.span(transfer.prefill(ids), ids)
    assert (mapped.layers, mapped.tokens) == (3, 8)
    assert made.flops_per_token > 0


@pytest.mark.parametrize("asked", [["eval=standard"], ["eval=perplexity"]])
def test_no_other_evaluation_takes_random_weights(shapes, tmp_path, asked):
    with pytest.raises(KvxferError, match=rf"random weights, so {asked[0]} would tell nothing: .*eval=latency"):
        run("evaluate", tmp_path, *GEOMETRY[:4], *asked)
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize("stage", ["calibrate", "train"])
def test_nothing_is_learnt_from_random_weights(shapes, tmp_path, stage):
    with pytest.raises(KvxferError, match=r"pair=geometry has random weights, so calibration would tell nothing"):
        run(stage, tmp_path, *GEOMETRY[:3])


def test_a_whole_pair_is_timed_and_marked_as_random(shapes, tmp_path):
    done = run(
        "evaluate", tmp_path, *GEOMETRY, *FEW, "pair.dtype=float32", "solver=head_local", "rank=reduced", "rank.r=8"
    )
    results = results_of(done)
    assert results["pair"]["name"] == "small_large"
    assert results["data"]["random"] is True
    assert results["data"]["scaled"] is None
    assert results["data"]["fit_seconds"] is None
    made = CacheMap.load(tmp_path / "train" / results["map"]["run_id"])
    assert made.manifest["random"] is True
    assert made.form == "head_local_low_rank"
    text = (done / "report.md").read_text()
    assert "**Random weights**" in text
    assert "Weights are random, so this is about time alone." in text


def test_a_slice_is_timed_and_scaled_and_says_so(shapes, tmp_path):
    with pytest.raises(KvxferError, match=r"pair\.layers: the map reads source_hidden, .*pair\.layers=null"):
        run("evaluate", tmp_path, *GEOMETRY, *FEW, "pair.layers=2", "pair.dtype=float32", "features=hidden")
    results = results_of(done := run("evaluate", tmp_path, *GEOMETRY, *FEW, "pair.layers=2", "pair.dtype=float32"))
    data = results["data"]
    # A target layer reads three source layers, so the source has as many.
    assert data["scaled"] == {"source": [3, 6], "target": [2, 8]}
    assert all(point["whole"] is None for point in data["points"])
    text = (done / "report.md").read_text()
    assert "**Scaled**: timed were 3 of the source's 6 layers and 2 of the target's 8 layers" in text
    assert "| Target layers (a slice; what follows is of these alone) | 2 of 8 |" in text
    assert "| Weights | random |" in text
    assert "scaled from 3 of the source's 6 layers" in results["verdict"]["sentence"]
    whole = run("evaluate", tmp_path, *GEOMETRY, *FEW, "pair.dtype=float32")
    counted = results_of(whole)["data"]["points"]
    for sliced, full in zip(data["points"], counted, strict=True):
        for name in ("map", "target", "source"):
            assert sliced["roofs"][name]["flops"] == pytest.approx(full["roofs"][name]["flops"])
        assert sliced["roofs"]["map"]["bytes"] == pytest.approx(full["roofs"]["map"]["bytes"])
        assert sliced["source_bytes"] == full["source_bytes"]
        assert sliced["target_bytes"] == full["target_bytes"]
    assert data["load"]["bytes"] == results_of(whole)["data"]["load"]["bytes"]


def test_times_of_a_slice_are_those_of_its_layers_times_more(shapes, monkeypatch):
    """On a clock that counts: layers cost what they cost, embedding and projection are counted once."""
    spec = settings_of("evaluate", Path("."), *GEOMETRY, "pair.layers=2", "pair.dtype=float32", "plan.hold_back=3")
    pair = load_pair(spec.pair)
    mapper = Mapper(random_map(pair, spec.solver, {"pair": pair.describe()}), pair=pair)
    ticks = 0.0

    def costs(seconds: float):
        def hook(*_: object) -> None:
            nonlocal ticks
            ticks += seconds

        return hook

    monkeypatch.setattr("kvxfer.evals.latency.clocks.time.perf_counter", lambda: ticks)
    for model in (pair.source, pair.target):
        for layer in model.body.layers:
            layer.register_forward_hook(costs(1.0))
        model.body.norm.register_forward_hook(costs(10.0))
    pair.target.lm.lm_head.register_forward_hook(costs(100.0))
    clocked = clock(Transfer(pair, mapper, spec.plan), 16, 1, 2, 1, 0, lambda n: None)
    assert clocked.parts["source"] == [16.0] * 2
    assert clocked.parts["target"] == [118.0] * 2
    assert clocked.parts["exact"] == [18.0] * 2
    assert clocked.parts["held_back"] == [18.0] * 2
    assert clocked.parts["first_decode"] == [118.0] * 2
    assert clocked.parts["map"] == [0.0] * 2
    assert clocked.whole is None


def test_the_nearest_layers_lie_around_the_depth():
    assert nearest(0.0, 3, 10) == [0, 1, 2]
    assert nearest(9.0, 3, 10) == [7, 8, 9]
    assert nearest(4.5, 2, 10) == [4, 5]


def test_a_reversed_pair_of_shapes_swaps_the_slices_too(shapes, tmp_path):
    spec = settings_of("evaluate", tmp_path, *GEOMETRY, "pair.reverse=true", "pair.layers=2").pair
    pair = load_pair(replace(spec, dtype="float32"))
    assert (pair.source.name, pair.source.geometry.layers) == ("large", 3)
    assert (pair.target.name, pair.target.geometry.layers) == ("small", 2)
    assert pair.name == "small_large_reversed"


def test_a_model_s_name_alone_is_sugar_for_every_pair(tmp_path):
    given = ["-m", "pair.source=a/b,c/d", "pair.target=qwen3-32b", "pair.source.model=x", "pair.source={model: y}"]
    assert spelled_out(given) == [
        "-m",
        "pair.source.model=a/b,c/d",
        "pair.target.model=qwen3-32b",
        "pair.source.model=x",
        "pair.source={model: y}",
    ]
    pair = compose("evaluate", ["pair=custom", "pair.source=a/b", "pair.target=c/d"]).pair
    assert (pair.source.model, pair.source.revision, pair.target.model) == ("a/b", "main", "c/d")
