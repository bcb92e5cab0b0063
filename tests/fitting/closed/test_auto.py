"""solver=auto keeps what attention's output on the probe says is best, and says why."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.files import read_json
from kvxfer.fitting.closed import Auto, Fit, HeadLocal, Ridge, Splits
from kvxfer.fitting.closed.attention import map_scores
from kvxfer.fitting.dials import Isotropic
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import MANIFEST, CacheMap
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.models.kv import KV
from kvxfer.report.fit_figures import tried
from tests.maps.test_artifact import PAIR
from tests.samples import make_samples, make_splits
from tests.small_runs import run, toy_models

BOTH = DESIGNS["both"]


def fit(splits: Splits, solver: Any = Auto, **options: Any) -> Fit:
    if solver is Auto:
        options = {"candidates": ("ridge", "head_local"), **options}
    return solver(**{"k": 2, "features": BOTH, "penalty": Isotropic(1e-9), **options}).fit(splits, lambda: None)


def two_kinds_of_heads() -> Splits:
    """Values read their own head alone, of which few rows let ridge overfit; keys read all heads."""
    local, across = (make_samples(BOTH, tokens=160, noise=1.0, local=local) for local in (True, False))
    y = across.y.clone()
    values = [n for n, (_, kind) in enumerate(across.layout.outputs) if kind == "values"]
    y[:, values] = local.y[:, values]
    return make_splits(replace(across, y=y))


def test_every_layer_has_the_best_of_the_candidates() -> None:
    splits = two_kinds_of_heads()
    found, ridge, local = fit(splits), fit(splits, Ridge), fit(splits, HeadLocal)
    for record, ours, theirs in zip(found.diagnostics, ridge.diagnostics, local.diagnostics, strict=True):
        scores = {"ridge": ours["attention_score"], "head_local": theirs["attention_score"]}
        assert {name: record[f"attention_score_{name}"] for name in scores} == scores
        assert record["solver"] == max(scores, key=lambda name: scores[name])
        assert record["attention_score"] == pytest.approx(max(scores.values()))
        output = record["layer"], record["kind"]
        winner = ridge if record["solver"] == "ridge" else local
        assert torch.equal(found.layers[output].weight, winner.layers[output].weight)
        assert found.selection.chosen[output] == winner.selection.chosen[output]
        assert (
            found.curves["penalty"][f"{output[1]}.{output[0]}"] == winner.curves["penalty"][f"{output[1]}.{output[0]}"]
        )
    assert {(d["kind"], d["solver"]) for d in found.diagnostics} == {("keys", "ridge"), ("values", "head_local")}
    assert splits.probe is not None
    for output, scores in map_scores(found.layers, splits.probe).items():
        record = next(d for d in found.diagnostics if (d["layer"], d["kind"]) == output)
        assert {key: record[key] for key in scores} == scores


def test_one_for_all_is_the_best_with_both_kinds_mapped() -> None:
    splits = two_kinds_of_heads()
    found = fit(splits, choose="one")
    joint = {name: scores["attention_joint"] for name, scores in found.candidates.items()}
    assert list(joint) == ["ridge", "head_local"]
    (winner,) = {record["solver"] for record in found.diagnostics}
    assert winner == max(joint, key=lambda name: joint[name])
    alone = fit(splits, {"ridge": Ridge, "head_local": HeadLocal}[winner])
    assert all(torch.equal(layer.weight, alone.layers[o].weight) for o, layer in found.layers.items())
    assert joint[winner] == pytest.approx(sum(d["attention_score_joint"] for d in alone.diagnostics) / 4)


@pytest.mark.parametrize("names", [("ridge", "head_local"), ("head_local", "ridge")])
@pytest.mark.parametrize("choose", ["layer", "one"])
def test_equal_scores_favour_the_earlier_candidate(names: tuple[str, ...], choose: str) -> None:
    """Constant outputs are mapped by the bias alone, whatever the solver."""
    samples = make_samples(BOTH)
    splits = make_splits(replace(samples, y=torch.ones_like(samples.y)))
    found = fit(splits, candidates=names, choose=choose)
    assert {record["solver"] for record in found.diagnostics} == {names[0]}


def test_a_candidate_that_does_not_apply_is_left_out_with_its_reason() -> None:
    design = DESIGNS["embedding"]
    solver = Auto(k=2, features=design, candidates=("head_local", "ridge"))
    splits, advances = make_splits(make_samples(design)), []
    found = solver.fit(splits, lambda: advances.append(None))
    assert list(found.candidates) == ["head_local", "ridge"]
    assert "features=embedding has embedding" in found.candidates["head_local"]["left_out"]
    assert {record["solver"] for record in found.diagnostics} == {"ridge"}
    assert len(advances) == solver.steps(splits.fit) == Ridge(k=2).steps(splits.fit)


def test_a_candidate_that_fails_is_left_out_and_counts_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Fit:
        raise KvxferError("no such moments")

    monkeypatch.setattr(HeadLocal, "fit", refuse)
    solver = Auto(k=2, features=BOTH, candidates=("ridge", "head_local"))
    splits, advances = make_splits(make_samples(BOTH)), []
    found = solver.fit(splits, lambda: advances.append(None))
    assert found.candidates["head_local"] == {"left_out": "no such moments"}
    assert len(advances) == solver.steps(splits.fit) == 2 * Ridge(k=2).steps(splits.fit)


def test_dials_are_passed_on() -> None:
    splits = make_splits(make_samples(BOTH, source_layers=4))
    options = {"k": "auto", "method": "greedy", "selection": "separate", "criterion": "attention", "k_per": "layer"}
    found, ridge = fit(splits, candidates=("ridge",), **options), fit(splits, Ridge, **options)
    assert found.selection.chosen == ridge.selection.chosen
    assert found.curves["k_outputs"] == ridge.curves["k_outputs"]
    pair = fit(splits, candidates=("ridge",), k="auto")
    assert pair.curves["k_candidates"] == {"ridge": fit(splits, Ridge, k="auto").curves["k"]}
    ridges = {"ridge": dict(pair.curves["k_candidates"]["ridge"])}
    assert tried(pair.curves)["k"] == ridges
    # Weighted rows are another scale, which the figure's legend says.
    both = pair.curves | {"k_candidates": pair.curves["k_candidates"] | {"weighted": [[1, 0.5], [2, 0.6]]}}
    assert tried(both)["k"] == ridges | {"weighted (tokens weighed)": {1: 0.5, 2: 0.6}}


def test_a_mixed_map_is_saved_and_runs(tmp_path: Path) -> None:
    found = fit(two_kinds_of_heads())
    saved = CacheMap(found.layers, {"pair": PAIR}).save(tmp_path)
    assert saved.manifest["form"] == "mixed"
    draw = torch.Generator().manual_seed(0)
    content = KV(*([torch.randn(2, 2, 5, 3, generator=draw) for _ in range(3)] for _ in KINDS))
    loaded = CacheMap.load(tmp_path)
    mapped = Mapper(loaded).map(content)
    for (layer, kind), part in found.layers.items():
        x = torch.cat([getattr(content, b.kind)[b.layer].transpose(1, 2).flatten(2) for b in part.blocks], dim=-1)
        expected = (x @ part.dense() + part.bias).unflatten(-1, (2, 3)).transpose(1, 2)
        assert torch.allclose(getattr(mapped, kind)[layer], expected, atol=1e-5)
        assert loaded.layers[layer, kind].groups == (1 if kind == "keys" else 2)


def test_it_needs_a_probe() -> None:
    with pytest.raises(KvxferError, match=r"solver=auto .*calibration\.probe_rows=16"):
        fit(replace(make_splits(make_samples(BOTH)), probe=None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": ()}, r"solver\.candidates=\[\] must name"),
        ({"candidates": ("ridge", "ridge")}, r"each once"),
        ({"candidates": ("ridge", "auto")}, r"'auto', which is none of ridge, head_local"),
        ({"candidates": ("luck",)}, "'luck', which is none of"),
        ({"choose": "best"}, r"solver\.choose='best' is none of layer, one"),
        ({"candidates": ("head_local",), "features": DESIGNS["layer0"]}, "features=layer0 has layer0_keys"),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvxferError, match=message) as refusal:
        Auto(k=1, **options)
    assert "\n" not in str(refusal.value)


def test_the_command_makes_the_probe_and_says_what_won(
    tiny_folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = [*toy_models(tiny_folders), "solver=auto", "features=layer0", "solver.candidates=[head_local,ridge]"]
    with caplog.at_level(logging.INFO, "kvxfer"):
        path = run("train", tmp_path, *options)
    manifest = read_json(path / MANIFEST)
    assert manifest["chosen"]["solver"] == {"head_local": 0, "ridge": 6}
    assert "layer0_keys" in manifest["candidates"]["head_local"]["left_out"]
    said = "\n".join(caplog.messages)
    assert "candidate head_local is left out: solver=head_local reads source heads only" in said
    assert "candidate ridge gives 6 of 6: attention-output score of keys " in said
    scores = manifest["candidates"]["ridge"]
    records = read_json(path / "diagnostics.json")["layers"]
    for kind in KINDS:
        own = [record["attention_score"] for record in records if record["kind"] == kind]
        assert scores[f"attention_{kind}"] == pytest.approx(sum(own) / 3)
        assert f"{kind} {scores[f'attention_{kind}']:.3f}" in said
    assert CacheMap.load(path).form == "full_head"
    # any other solver reports the same scores where the calibration has a probe
    plain = run("train", tmp_path, *options[:-3], "features=layer0", "calibration.probe_rows=16")
    assert read_json(plain / MANIFEST)["calibration"] == manifest["calibration"]
    assert "candidates" not in read_json(plain / MANIFEST)
    joint = [record["attention_score_joint"] for record in read_json(plain / "diagnostics.json")["layers"]]
    assert joint == pytest.approx([record["attention_score_joint"] for record in records])
