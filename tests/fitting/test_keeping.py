"""Two passes: the source layers that target layers keep, what is planned for them, and choices among them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.experiment.stages import calibrate as stage
from kvxfer.experiment.stages.calibrate import KEPT, REPORT, calibrate, calibration_id, load_splits
from kvxfer.files import read_json, read_sealed
from kvxfer.fitting import keeping
from kvxfer.fitting.closed import Ridge, Splits, Weighted
from kvxfer.fitting.closed.engine import Engine
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair
from kvxfer.moments import schedule as planning
from kvxfer.moments.calibration import Extractor, layout_for
from kvxfer.moments.checkpoints import weighted_file
from kvxfer.moments.moments import Moments
from kvxfer.moments.schedule import PassPlan
from kvxfer.moments.spec import CALIBRATION_SPLITS, WEIGHTED_SPLITS, CalibrationSpec
from kvxfer.moments.token_weights import attention_received, token_weights
from kvxfer.report.fit_figures import r2_heatmap
from kvxfer.text.corpus import load_rows
from tests.calibrations import LENGTH, ROWS, SPLIT_FILES, make_settings, remember_prefills
from tests.samples import assert_same, make_samples, make_splits

KEPT_OF = ((0, 2), (1, 2))
KEEP: dict[str, Any] = {"keep_layers": 1, "selection_rows": 4, "features": DESIGNS["previous"]}


@pytest.fixture(autouse=True)
def _loaded(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage run uses the pair that is loaded already."""
    monkeypatch.setattr(stage, "load_pair", lambda spec: tiny_pair)


def kept_splits(features: Any, **options: Any) -> tuple[Splits, Splits]:
    """The same tokens, with the source layers that each target layer keeps, and with all."""
    return tuple(make_splits(make_samples(features, kept=kept, **options)) for kept in (KEPT_OF, None))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("solver", "name", "options"),
    [
        (Ridge, "same", {"k": 1}),
        (Weighted, "previous", {"k": 1}),
        (Ridge, "embedding", {"k": 1, "selection": "separate"}),
        (Weighted, "same", {"k": 1, "selection": "separate"}),
        (Ridge, "previous", {"k": 2, "method": "greedy"}),
        (Weighted, "embedding", {"k": 2, "method": "greedy"}),
    ],
)
def test_solvers_choose_among_the_kept_layers(name: str, options: Any, solver: Any, tmp_path: Path) -> None:
    """What they score and fit there is what they score and fit with all layers kept."""
    some, everything = kept_splits(DESIGNS[name])
    solver = solver(features=DESIGNS[name], **options)
    fit, whole = solver.fit(some), solver.fit(everything)
    for (layer, kind), chosen in fit.selection.chosen.items():
        assert set(chosen) <= set(KEPT_OF[layer])
        for source in range(3):
            score = float(fit.selection.scores[kind][layer, source])
            expected = float(whole.selection.scores[kind][layer, source])
            assert score == (pytest.approx(expected) if source in KEPT_OF[layer] else -torch.inf)
        ours = Engine(solver, everything).solve(fit.layers[layer, kind].blocks, [(layer, kind)])[layer, kind][0]
        assert torch.allclose(fit.layers[layer, kind].weight, ours.weight, atol=1e-6)
    plain = json.loads(json.dumps(fit.selection.to_dict(), allow_nan=False))
    assert plain["r2_keys"][0][1] is None
    r2_heatmap(plain, tmp_path / "r2.png")
    assert (tmp_path / "r2.png").is_file()


def test_all_and_auto_are_about_the_kept_layers() -> None:
    some, _ = kept_splits(DESIGNS["both"])
    fit = Ridge(k=9, method="all", features=DESIGNS["both"]).fit(some)
    assert [fit.selection.chosen[layer, "keys"] for layer in range(2)] == list(KEPT_OF)
    fit = Ridge(k="auto", features=DESIGNS["both"]).fit(some)
    assert [k for k, _ in fit.curves["k"]] == [1, 2]


def test_more_layers_than_are_kept_is_refused() -> None:
    some, _ = kept_splits(DESIGNS["same"])
    with pytest.raises(KvxferError, match=r"solver\.k=3 .*\b2\b.*calibration\.keep_layers"):
        Ridge(k=3).fit(some)


def test_the_best_single_layers_are_kept(tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scores are those of full moments over the same rows; the second pass keeps what they say and nothing else."""
    settings = make_settings(tiny_pair.spec, tmp_path, calibration=KEEP)
    with caplog.at_level(logging.INFO, "kvxfer"):
        path = calibrate(settings)
    report, splits = read_json(path / REPORT), load_splits(path)
    moments = {}
    for split in ("fit", "validation"):
        ids = load_rows(settings.corpus, tiny_pair.tokenizer, split).tokens[:4]
        layout = layout_for(tiny_pair, CalibrationSpec(features=DESIGNS["both"]))
        moments[split] = Moments(layout)
        extract = Extractor(tiny_pair, layout, range(4, LENGTH))
        moments[split].update(*extract(tiny_pair.source.prefill(ids), tiny_pair.target.prefill(ids), ids))
    engine = Engine(Ridge(k=1, features=DESIGNS["both"]), Splits(**moments, held_out=moments["validation"]))
    for source in range(2):
        scores = torch.stack(list(engine.quick_score((source,)).values())).mean(0)
        found = torch.tensor([row[source] for row in report["kept"]["r2"]], dtype=torch.float64)
        assert torch.allclose(found, scores, atol=1e-9)
    assert report["kept"]["candidates"] == [0, 1]
    assert report["kept"]["layers"] == [[max((0, 1), key=lambda n: row[n])] for row in report["kept"]["r2"]]
    assert splits.fit.layout.kept == tuple(tuple(own) for own in report["kept"]["layers"])
    everything = load_splits(
        calibrate(make_settings(tiny_pair.spec, tmp_path, calibration={**KEEP, "keep_layers": None}))
    )
    assert splits.fit.layout.bytes < everything.fit.layout.bytes
    for layer, layers in enumerate(report["kept"]["layers"]):
        for kind in KINDS:
            blocks = DESIGNS["previous"].blocks(kind, layers)
            assert torch.equal(splits.fit.design(blocks), everything.fit.design(blocks))
            output = [(layer, kind)]
            assert torch.equal(splits.fit.targets(blocks, output), everything.fit.targets(blocks, output))
    said = "\n".join(caplog.messages)
    assert "two passes: " in said
    counted = f"{splits.fit.layout.pairs} of {everything.fit.layout.pairs} block pairs"
    assert f"each target layer keeps 1 source layers: {counted}" in said


def test_scores_do_not_depend_on_how_many_layers_fit_into_memory(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = remember_prefills(monkeypatch)
    whole = read_json(calibrate(make_settings(tiny_pair.spec, tmp_path / "a", calibration=KEEP)) / REPORT)
    monkeypatch.setattr(keeping, "first_pass", lambda pair, one_layer: ("cpu", 1))
    single = read_json(calibrate(make_settings(tiny_pair.spec, tmp_path / "b", calibration=KEEP)) / REPORT)
    assert single == whole
    assert reads == [*reads[: len(reads) // 2]] * 2, "the models read rows of the first pass again"
    assert not list((tmp_path / "b").rglob("first-pass-*"))


def test_as_many_layers_at_once_as_fit(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_available_bytes", lambda: 1000)
    assert planning.first_pass(tiny_pair, 120) == ("cpu", 4)
    assert planning.first_pass(tiny_pair, 10_000) == ("cpu", 1)


def test_a_killed_run_does_not_choose_again(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(tiny_pair.spec, tmp_path, calibration=KEEP)
    accumulate = stage.accumulate
    monkeypatch.setattr(stage, "accumulate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(settings)
    (left,) = (tmp_path / "calibrate").glob(f".*.partial/{KEPT}")
    kept = read_sealed(left)
    # What a run that was killed within its first pass leaves.
    (left.parent / f"{keeping.SPOOL}x").mkdir()
    (left.parent / f"{keeping.SPOOL}x" / "fit.0.safetensors").write_text("half a cache")
    monkeypatch.setattr(stage, "accumulate", accumulate)
    monkeypatch.setattr(stage, "choose_kept", lambda *_: 1 / 0)
    path = calibrate(settings)
    assert read_json(path / REPORT)["kept"] == kept
    assert not list(path.glob(f"{keeping.SPOOL}*"))
    assert not (path / KEPT).exists()


def test_shares_keep_the_same_layers_and_merge(tiny_pair: Pair, tmp_path: Path) -> None:
    options = {**KEEP, "weights": "attention", "batch_size": 3}
    single = calibrate(make_settings(tiny_pair.spec, tmp_path / "single", calibration=options))
    for index in (1, 0):
        corpus = {"num_shards": 2, "shard_index": index}
        path = calibrate(make_settings(tiny_pair.spec, tmp_path / "shared", corpus, options))
    assert path.name == single.name
    ours, theirs = read_json(path / REPORT), read_json(single / REPORT)
    assert ours["kept"] == theirs["kept"]
    assert ours["weights"]["effective_tokens"] == pytest.approx(theirs["weights"]["effective_tokens"])
    names = [*SPLIT_FILES, *(weighted_file(split, layer) for split in WEIGHTED_SPLITS for layer in range(3))]
    assert {file.name for file in path.glob("*.safetensors")} == {*names, "metrics.safetensors"}
    for name in SPLIT_FILES:
        assert_same(Moments.load(path / name), Moments.load(single / name), 1e-9)
    for name in names[len(SPLIT_FILES) :]:
        a, b = Moments.load(path / name), Moments.load(single / name)
        assert a.layout == b.layout
        assert (a.count, a.squares) == pytest.approx((b.count, b.squares))
        for kind in KINDS:
            blocks = tuple(block for block in a.layout.blocks if block.kind == kind)
            assert torch.allclose(a.design(blocks), b.design(blocks), rtol=1e-9)


@pytest.mark.parametrize("keep", [None, 1])
def test_weighted_moments_are_those_of_the_targets_attention(keep: int | None, tiny_pair: Pair, tmp_path: Path) -> None:
    options = {"keep_layers": keep, "selection_rows": 2, "weights": "attention", "weight_clip": 2.0, "stride": 3}
    settings = make_settings(tiny_pair.spec, tmp_path, calibration=options)
    path = calibrate(settings)
    splits = load_splits(path)
    assert splits.weighted is not None
    scales, kept = tiny_pair.target.softmax_scales(), torch.arange(4, LENGTH, 3)
    extract = Extractor(tiny_pair, splits.fit.layout, range(4, LENGTH, 3))
    for split in WEIGHTED_SPLITS:
        ids = load_rows(settings.corpus, tiny_pair.tokenizer, split).tokens
        target, queries = tiny_pair.target.queries(ids)
        x, y = extract(tiny_pair.source.prefill(ids), target, ids)
        for layer in range(3):
            found = splits.weighted(split, layer)
            received = attention_received(queries[layer], target.keys[layer], scales[layer])
            weights = token_weights(received, kept, 2.0)
            assert torch.allclose(weights.mean(1), torch.ones(len(ids)).double())
            blocks = DESIGNS["same"].blocks("keys", splits.fit.layout.candidates(layer))
            places = [splits.fit.layout.blocks.index(block) for block in blocks]
            w, columns = weights.flatten()[:, None], x[:, splits.fit.layout.columns(places)].double()
            centred = columns - (w * columns).sum(0) / w.sum()
            assert torch.allclose(found.design(blocks), centred.T @ (w * centred), atol=1e-6)
            assert found.count == pytest.approx(len(ids) * len(kept))
            assert found.effective < found.count
            outputs = y[:, splits.fit.layout.outputs.index((layer, "keys"))].double()
            assert torch.allclose(found.mean_target([(layer, "keys")]), (w * outputs).sum(0) / w.sum(), atol=1e-6)
    effective = [splits.weighted("fit", layer).effective for layer in range(3)]
    about = {"by": "attention", "clip": 2.0, "effective_tokens": effective}
    assert read_json(path / REPORT)["weights"] == about
    plain = calibrate(make_settings(tiny_pair.spec, tmp_path, calibration={**options, "weights": "none"}))
    for name in [*SPLIT_FILES, "metrics.safetensors"]:
        assert (plain / name).read_bytes() == (path / name).read_bytes(), name
    assert "weights" not in read_json(plain / REPORT)


@pytest.mark.parametrize("keep", [None, 1])
def test_the_plan_counts_the_weighted_bytes(keep: int | None, tiny_pair: Pair, tmp_path: Path) -> None:
    options = {"keep_layers": keep, "selection_rows": 2, "weights": "attention"}
    settings = make_settings(tiny_pair.spec, tmp_path, calibration=options)
    path = calibrate(settings)
    kept = load_splits(path).fit.layout.kept
    counts = {split: ROWS.of(split) for split in CALIBRATION_SPLITS}
    plan = PassPlan(tiny_pair, settings.calibration, counts, LENGTH, 4, kept)
    files = [load_file(path / weighted_file("fit", layer)) for layer in range(3)]
    weighted = sum(t.numel() * t.element_size() for file in files for t in file.values())
    stored = sum(t.numel() * t.element_size() for t in load_file(path / "fit.safetensors").values())
    assert (plan.layout.bytes, plan.weighted_bytes) == (stored, weighted)
    assert plan.disk_bytes == 3 * stored + 2 * weighted
    estimate = PassPlan(tiny_pair, settings.calibration, counts, LENGTH, 4)
    assert estimate.weighted_bytes == plan.weighted_bytes
    assert (estimate.first is None) == (keep is None)


@pytest.mark.parametrize("weights", ["none", "attention"])
def test_a_pass_that_does_not_fit_names_the_keep_layers_that_would(
    weights: str, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(keep: int | None, room: int) -> PassPlan:
        monkeypatch.setattr(planning, "_available_bytes", lambda: room)
        spec = CalibrationSpec(features=DESIGNS["both"], keep_layers=keep, weights=weights)
        return PassPlan(tiny_pair, spec, {"fit": 4, "validation": 4, "held_out": 4}, LENGTH, 4)

    whole, half = plan(None, 10**9), plan(1, 10**9)
    needs = [p.layout.bytes + p.weighted_bytes + p.working_bytes for p in (whole, half)]
    assert needs[1] < needs[0]
    with pytest.raises(
        KvxferError, match=r"calibration\.keep_layers=1, whose moments need about .* or keep"
    ) as refusal:
        plan(None, needs[0] - 1)
    assert "\n" not in str(refusal.value)
    with pytest.raises(KvxferError) as refusal:
        plan(None, 1000)
    assert "keep_layers" not in str(refusal.value)


def test_more_layers_than_candidates_are_refused_before_any_pass(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "prefill", lambda *_, **__: 1 / 0)
    with pytest.raises(KvxferError, match=r"calibration\.keep_layers=3 must be from 1 to 2"):
        calibrate(make_settings(tiny_pair.spec, tmp_path, calibration={"keep_layers": 3}))


@pytest.mark.parametrize(
    "options",
    [
        {"keep_layers": 0},
        {"selection_rows": 0},
        {"weights": "luck"},
        {"weight_clip": 0.5},
        {"weight_clip": float("nan")},
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(KvxferError, match=rf"calibration\.{next(iter(options))}="):
        CalibrationSpec(**options)


def test_ids_know_what_was_asked_and_nothing_else(tiny_pair: Pair, tmp_path: Path) -> None:
    def name(**options: Any) -> str:
        return calibration_id(make_settings(tiny_pair.spec, tmp_path, calibration=options))

    plain = identity(make_settings(tiny_pair.spec, tmp_path).calibration)
    unread = {"layers", "keep_layers", "probe_tokens", "selection_rows", "weight_clip"}
    assert {key for key, value in plain.items() if value is None} == unread
    assert "checkpoint_minutes" not in plain
    assert name() == name(selection_rows=3) == name(weight_clip=3.0)
    asked = [{"keep_layers": 1}, {"keep_layers": 2}, {"keep_layers": 1, "selection_rows": 3}, {"weights": "attention"}]
    asked.append({"weights": "attention", "weight_clip": 3.0})
    assert len({name(), *(name(**options) for options in asked)}) == 6
