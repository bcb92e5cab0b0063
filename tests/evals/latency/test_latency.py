"""``eval=latency``: its arithmetic against plain loops, what it times, and what it tells; never how long it took."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.clocks import Stopwatch, peak_bandwidth, peak_flops
from kvxfer.evals.latency.costs import GROUPS, Work, break_even, compare, prefill_work, savings
from kvxfer.evals.latency.latency import Latency, clock
from kvxfer.evals.specs import LatencySpec
from kvxfer.experiment.identity import identity
from kvxfer.experiment.runs import run_id
from kvxfer.fitting.random_maps import random_map
from kvxfer.handoff.transfer import STEPS, Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.report.kinds import REPORTS
from kvxfer.report.latency import outcome
from kvxfer.report.rendering import render
from tests.small_runs import results_of, run, settings_of, toy_models

pytestmark = pytest.mark.draws

LATENCY = ["eval=latency", "eval.lengths=[16,32]", "eval.batch_sizes=[1,2]", "eval.repeats=6", "eval.warmup=1"]


@pytest.fixture(scope="module")
def done(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("outputs")
    return run("evaluate", outputs, *toy_models(tiny_folders), *LATENCY, "plan.hold_back=2")


@pytest.fixture(scope="module")
def data(done: Path) -> dict[str, Any]:
    return results_of(done)["data"]


def test_every_part_of_every_length_and_batch_is_there(data):
    assert [(p["length"], p["batch"]) for p in data["points"]] == [(16, 1), (16, 2), (32, 1), (32, 2)]
    for point in data["points"]:
        assert set(point["parts"]) == set(STEPS)
        assert all(part["low"] <= part["median"] <= part["high"] for part in point["parts"].values())
        assert all(point[name]["median"] > 0 for name in ("handoff", "source", "target", "whole"))
        # A sum of medians is no median of sums, but the parts are what the handoff is made of.
        assert point["handoff"]["low"] >= sum(part["low"] for part in point["parts"].values()) * 0.5
        assert set(point["roofs"]) == {"map", "target", "source"}
    assert data["scaled"] is None
    assert data["random"] is False


def test_the_machine_is_recorded_and_decides_the_run(data, done, tiny_folders, monkeypatch):
    assert set(data["machine"]) >= {"device", "name", "threads", "dtype", "map_dtype", "peak_flops", "bandwidth"}
    results = results_of(done)
    assert results["provenance"]["config"]["machine"]["threads"] == torch.get_num_threads()
    assert "torch" in results["provenance"]["environment"]["packages"]
    again = [*toy_models(tiny_folders), *LATENCY, "plan.hold_back=2"]
    before = (done / "run.json").stat().st_mtime_ns
    assert run("evaluate", done.parents[1], *again) == done
    assert (done / "run.json").stat().st_mtime_ns == before

    def elsewhere(root: Path, stage: str, config: dict[str, Any], *rest: Any) -> Any:
        raise KvxferError(run_id(stage, config, {"train": results["map"]["sha256"]}))

    monkeypatch.setattr("kvxfer.experiment.stages.evaluate.open_run", elsewhere)
    for machine, same in ((results["provenance"]["config"]["machine"], True), ({"name": "another"}, False)):
        monkeypatch.setattr("kvxfer.experiment.stages.evaluate.machine", lambda device, found=machine: found)
        with pytest.raises(KvxferError) as asked:
            run("evaluate", done.parents[1], *again)
        assert (str(asked.value) == done.name) is same


def test_the_report_is_made_from_the_json_alone_and_has_every_table(done):
    text = (done / "report.md").read_text()
    assert text == render(results_of(done))
    for heading in ("To the target's first token", "From which length it pays", "The parts", "What a handoff saves"):
        assert f"### {heading}" in text
    assert re.search(r"\bnan\b", text) is None
    image = imread(done / "figures" / "latency_parts.png")
    assert image.shape[1] > 600


def test_metrics_are_flat_numbers(data):
    metrics = REPORTS["latency"].metrics(data)
    assert metrics["16/1/warm_ratio"] == data["points"][0]["warm"]["ratio"]
    assert all(isinstance(value, float) for value in metrics.values())


def test_the_cost_of_calibration_and_fit_comes_from_their_runs(data, done):
    results = results_of(done)
    seconds = 0.0
    for stage, name in (
        ("train", results["map"]["run_id"]),
        ("calibrate", results["provenance"]["inputs"]["calibrate"]),
    ):
        seconds += json.loads((done.parents[1] / stage / name / "run.json").read_text())["seconds"]
    assert data["fit_seconds"] == pytest.approx(seconds)


def test_what_is_timed_is_the_transfer_that_evaluations_use(tiny_pair, monkeypatch):
    called: list[str] = []
    handed = Transfer.handed

    def watched(self: Transfer, *given: object, **options: object) -> object:
        called.append("handed")
        return handed(self, *given, **options)

    monkeypatch.setattr(Transfer, "handed", watched)
    spec = settings_of("evaluate", Path("."), "pair=geometry", "solver.k=2", "plan.hold_back=3")
    mapper = Mapper(random_map(tiny_pair, spec.solver, {}), pair=tiny_pair)
    clocked = clock(Transfer(tiny_pair, mapper, spec.plan), 16, 2, 3, 1, 0, lambda n: None)
    assert len(called) == 2 * 4  # each round under every part's clock, and as a whole
    assert all(len(rounds) == 3 for rounds in (*clocked.parts.values(), clocked.whole, clocked.handoff))


SECONDS = {**{step: 1.0 + n for n, step in enumerate(STEPS)}, "target": 100.0}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("acceptance", "shadow"), [(1.0, 0.0), (0.7, 0.0), (0.5, 0.25)])
def test_the_formula_is_the_accounts_of_single_requests(batch, acceptance, shadow):
    """The same number from going through requests one by one."""
    rates = LatencySpec("latency", handoffs=50, handoffs_per_fit=200, shadow_rate=shadow)
    found = savings(SECONDS, batch, 4.0, load=5.0, fit=60.0, map_bytes=8.0, acceptance=acceptance, rates=rates)
    handoff = (sum(SECONDS[step] for step in STEPS) + 4) / batch + 5 / 50
    prefill = 100 / batch
    total, requests, accepted = 0.0, 1000, 0
    for request in range(requests):
        if request < shadow * requests:
            total += prefill + handoff
        elif request - shadow * requests < acceptance * (1 - shadow) * requests:
            total, accepted = total + handoff, accepted + 1
        else:
            total += handoff + prefill
    expected = (requests * prefill - total) / accepted - 60 / 200
    assert found["per_accepted"] == pytest.approx(expected)
    assert found["saving"] == pytest.approx(prefill - handoff - (1 - acceptance) * prefill)
    terms = ("mapping", "transport", "delivery", "own", "load", "fallback")
    assert found["saving"] == pytest.approx(found["prefill"] - sum(found[term] for term in terms))


def test_every_step_is_in_one_term_of_the_formula():
    assert sorted(step for steps in GROUPS.values() for step in steps) == sorted(STEPS)


def test_unknown_costs_are_left_out_not_guessed():
    rates = LatencySpec("latency", handoffs=1, handoffs_per_fit=1)
    found = savings(SECONDS, 1, 0.0, load=0.0, fit=None, map_bytes=8.0, acceptance=1.0, rates=rates)
    assert found["fit"] is None
    assert found["per_accepted"] == found["saving"] == pytest.approx(100 - 21)


@pytest.mark.parametrize(
    ("savings_at", "expected"),
    [
        ([1, 2, 3], 10.0),
        ([-1, 1, 3], 15.0),
        ([-3, 1, -1, 1], 35.0),
        ([-1, -2, -3], None),
        ([5, -1], None),
        ([0, 4], 10.0),
    ],
)
def test_break_even_is_the_last_crossing(savings_at, expected):
    assert break_even([10 * (n + 1) for n in range(len(savings_at))], list(map(float, savings_at))) == expected


def test_a_comparison_is_paired_and_says_nothing_of_few_rounds():
    drift = np.linspace(0, 100, 10)
    row = compare((1.0 + drift).tolist(), (2.0 + drift).tolist())
    assert row["saving"] == pytest.approx(1.0)
    assert row["ci"] == pytest.approx([1.0, 1.0])
    assert outcome(row) == 1
    assert outcome(compare((2.0 + drift).tolist(), (1.0 + drift).tolist())) == -1
    mixed = compare([1.0] * 10, [0.0, 2.0] * 5)
    assert mixed["ci"] == [-1.0, 1.0]
    assert outcome(mixed) == 0
    few = compare([1.0] * 5, [2.0] * 5)
    assert few["ci"] is None
    assert outcome(few) == 0
    assert compare([1.0] * 6, [2.0] * 6)["ci"] == [1.0, 1.0]


def test_roofs_are_what_binds():
    assert Work(8.0, 2.0).roof(2.0, 1.0) == {"flops": 8.0, "bytes": 2.0, "roof": 4.0, "bound": "compute"}
    assert Work(2.0, 8.0).roof(2.0, 1.0)["bound"] == "memory"


def test_the_work_of_a_prefill_is_its_matrices_attention_and_one_projection(tiny_pair):
    geometry, tokens = tiny_pair.target.geometry, 10
    matrices = sum(p.numel() for n, p in tiny_pair.target.body.named_parameters() if p.ndim == 2 and "embed" not in n)
    pairs = sum(range(1, tokens + 1))
    attention = 4 * pairs * geometry.layers * geometry.heads * geometry.head_dim
    head = 2 * geometry.hidden * geometry.vocabulary
    work = prefill_work(geometry, tokens, 3, 2, first_token=True)
    assert work.flops == pytest.approx(3 * (2 * matrices * tokens + attention + head))
    cache = 3 * tokens * 2 * geometry.layers * geometry.kv_width
    assert work.bytes == 2 * (matrices + head / 2 + cache)


def test_clocks_and_peaks():
    watch = Stopwatch(torch.device("cpu"))
    watch.start()
    watch.lap("a")
    watch.lap("b")
    watch.lap("a")
    assert list(watch.seconds) == ["a", "b"]
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e6
    assert peak_bandwidth(torch.device("cpu")) > 1e6


def told(rows: list[dict[str, int]], **changes: Any) -> Any:
    ci = {1: [1.0, 2.0], 0: [-1.0, 1.0], -1: [-2.0, -1.0]}
    points = [
        {
            "length": 100 * (n + 1),
            "batch": 1,
            **{way: {"ci": ci[sign], "saving": sign, "ratio": 2.0**sign} for way, sign in row.items()},
        }
        for n, row in enumerate(rows)
    ]
    return REPORTS["latency"].verdict({"points": points, "random": False, "scaled": None, **changes})


def test_the_verdict_names_the_lengths_at_which_it_does_not_pay():
    assert told([{"warm": 1, "cold": 1}] * 2).kind == "beats"
    assert told([{"warm": -1, "cold": -1}]).kind == "worse"
    assert told([{"warm": 0, "cold": -1}]).kind == "none"
    mixed = told([{"warm": -1, "cold": -1}, {"warm": 0, "cold": -1}, {"warm": 1, "cold": -1}])
    assert mixed.kind == "mixed"
    assert "2.00 times as fast as the target's prefill at 300 tokens" in mixed.sentence
    assert "takes 2.00 times as long at 100 tokens and shows no difference at 200 tokens;" in mixed.sentence
    assert "(cold), it takes 2.00 times as long at 100, 200 and 300 tokens." in mixed.sentence
    scaled = {"source": [4, 40], "target": [2, 64]}
    random = told([{"warm": 1, "cold": 1}], random=True, scaled=scaled).sentence
    assert random.endswith(
        "Weights are random, so this is about time alone; times are scaled from 4 of the source's 40 layers and 2 of "
        "the target's 64 layers."
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lengths", ()),
        ("lengths", (1,)),
        ("batch_sizes", (0,)),
        ("repeats", 5),
        ("warmup", -1),
        ("acceptance", (1.1,)),
        ("acceptance", (0.0,)),
        ("acceptance", ()),
        ("handoffs", 0),
        ("handoffs_per_fit", 0),
        ("shadow_rate", 1.0),
        ("bandwidth", 0.0),
        ("bandwidth", float("nan")),
        ("fit_seconds", -1.0),
    ],
)
def test_settings_that_make_no_sense_are_named(key, value):
    with pytest.raises(KvxferError, match=rf"eval\.{key}="):
        Latency("latency", **{key: value})


def test_a_prompt_longer_than_a_model_or_shorter_than_the_hold_back_is_refused(done, tiny_folders):
    outputs = done.parents[1]
    with pytest.raises(KvxferError, match=r"eval\.lengths: 9999999 tokens"):
        run("evaluate", outputs, *toy_models(tiny_folders), "eval=latency", "eval.lengths=[9999999]")
    with pytest.raises(KvxferError, match=r"plan\.hold_back=8 leaves nothing"):
        run("evaluate", outputs, *toy_models(tiny_folders), "eval=latency", "eval.lengths=[8]", "plan.hold_back=8")


def test_the_vllm_file_is_known_by_its_content(tmp_path):
    file = tmp_path / "vllm.json"
    file.write_text("{}")
    first = identity(Latency("latency", vllm=str(file)))["vllm"]
    moved = file.rename(tmp_path / "moved.json")
    assert identity(Latency("latency", vllm=str(moved)))["vllm"] == first
    moved.write_text("{ }")
    assert identity(Latency("latency", vllm=str(moved)))["vllm"] != first


def test_a_vllm_figure_stands_beside_the_target_s_own_prefill(done, data, tiny_pair, tiny_folders, tmp_path):
    target = tiny_pair.target
    file = tmp_path / "vllm.json"
    about = {"schema": 1, "model": "tiny", "revision": target.revision, "vllm": "0.33.0", "peak_flops": 1e12}
    about |= {"dtype": "float32", "device": data["machine"]["name"], "geometry": target.geometry.to_dict()}
    file.write_text(json.dumps({**about, "points": [{"tokens": 16, "median": 2.0}]}))
    given = [*toy_models(tiny_folders), "eval=latency", "eval.lengths=[16]", "eval.batch_sizes=[1,2]", "eval.repeats=6"]
    report = run("evaluate", done.parents[1], *given, f"eval.vllm={file}")
    assert [point["vllm"] for point in results_of(report)["data"]["points"]] == [2.0, None]
    assert "| vLLM prefill | against vLLM |" in (report / "report.md").read_text()
    file.write_text(json.dumps({**about, "points": [{"tokens": 16, "median": 1e-9}]}))
    with pytest.raises(KvxferError, match=r"1e-06 ms for 16 tokens is below the .* ms that the card's peak FLOP/s"):
        run("evaluate", done.parents[1], *given, f"eval.vllm={file}")
