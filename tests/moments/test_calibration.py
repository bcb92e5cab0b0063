"""The calibration pass: the right tokens of both models, planned before it starts, shared among processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages import calibrate as stage
from kvxfer.experiment.stages.calibrate import REPORT, calibrate, calibration_id, load_splits
from kvxfer.files import RECORD, read_json
from kvxfer.maps.blocks import DESIGNS, KINDS
from kvxfer.maps.columns import columns
from kvxfer.models import rope
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from kvxfer.moments import schedule as planning
from kvxfer.moments.calibration import Extractor, layout_for
from kvxfer.moments.moments import Moments
from kvxfer.moments.probe import PROBE
from kvxfer.moments.query_metric import METRICS
from kvxfer.moments.schedule import PassPlan
from kvxfer.moments.spec import CALIBRATION_SPLITS, CalibrationSpec
from kvxfer.text.corpus import load_rows
from tests.calibrations import LENGTH, ROWS, SPLIT_FILES, make_settings, remember_prefills, spoil_prefills
from tests.samples import Samples, assert_same, relative_error


@pytest.fixture(autouse=True)
def _loaded(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage run uses the pair that is loaded already."""
    monkeypatch.setattr(stage, "load_pair", lambda spec: tiny_pair)


def expected_samples(pair: Pair, ids: torch.Tensor, spec: CalibrationSpec, positions: list[int]) -> Samples:
    """The kept tokens by way of whole caches in content space, row by row."""
    layout = layout_for(pair, spec)
    source, target = (pair.content(w, pair.side(w).prefill(ids)) for w in ("source", "target"))  # type: ignore[arg-type]
    x = torch.cat([columns(source, block)[:, positions].flatten(0, 1) for block in layout.blocks], dim=1)
    outputs = [getattr(target, kind)[layer][:, :, positions] for layer, kind in layout.outputs]
    y = torch.stack([tensor.transpose(1, 2).flatten(2).flatten(0, 1) for tensor in outputs], dim=1)
    return Samples(layout, x, y)


@pytest.mark.parametrize(("skip", "stride"), [(0, 1), (4, 1), (0, 3), (5, 7), (63, 1)])
@pytest.mark.parametrize("name", ["same", "previous"])
def test_the_extractor_takes_the_right_tokens(tiny_pair: Pair, name: str, skip: int, stride: int) -> None:
    """Both models, all layers; the token before the first reads as zeros, that before a kept one is its own."""
    spec = CalibrationSpec(features=DESIGNS[name], stride=stride)
    ids = torch.randint(4, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    extract = Extractor(tiny_pair, layout_for(tiny_pair, spec), spec.kept(LENGTH, skip))
    x, y = extract(tiny_pair.source.prefill(ids), tiny_pair.target.prefill(ids), ids)
    expected = expected_samples(tiny_pair, ids, spec, list(range(skip, LENGTH, stride)))
    assert x.shape == expected.x.shape
    assert torch.allclose(x, expected.x.double(), atol=1e-6)
    assert torch.allclose(y, expected.y.double(), atol=1e-6)
    for n, block in enumerate(extract.layout.blocks):
        if block.offset and not skip:
            own = slice(extract.layout.starts[n], extract.layout.starts[n + 1])
            assert not x[:: len(extract.kept), own].any()


def test_the_stage_keeps_the_moments_of_all_rows(tiny_pair: Pair, tmp_path: Path) -> None:
    settings = make_settings(tiny_pair.spec, tmp_path, calibration={"features": DESIGNS["both"], "stride": 3})
    path = calibrate(settings)
    assert path == tmp_path / "calibrate" / calibration_id(settings)
    splits, report = load_splits(path), read_json(path / REPORT)
    for split in CALIBRATION_SPLITS:
        rows = load_rows(settings.corpus, tiny_pair.tokenizer, split)
        positions = list(range(settings.corpus.skip_first, LENGTH, 3))
        expected = expected_samples(tiny_pair, rows.tokens, settings.calibration, positions).moments()
        assert_same(getattr(splits, split), expected, 1e-7)
        assert report["kept_tokens"][split] == len(rows) * len(positions)
        assert report["rows_sha256"][split] == rows.digest
    assert report["rows"] == {"fit": 10, "validation": 5, "held_out": 3}
    assert report["pair"] == tiny_pair.describe()
    assert report["skipped_rows"] == []


def test_a_done_calibration_is_found(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(tiny_pair.spec, tmp_path, calibration={"layers": (0,)})
    path, calls = calibrate(settings), remember_prefills(monkeypatch)
    assert calibrate(settings) == path
    assert calls == []
    other = make_settings(tiny_pair.spec, tmp_path, calibration={"layers": (0,), "checkpoint_minutes": 9.0})
    assert calibration_id(other) == path.name
    for change in ({"stride": 2}, {"batch_size": 5}, {"features": DESIGNS["both"]}, {"layers": (1,)}):
        changed = make_settings(tiny_pair.spec, tmp_path, calibration={"layers": (0,), **change})
        assert calibration_id(changed) != path.name


@pytest.mark.parametrize("shares", [2, 3])
def test_shares_merge_to_the_calibration_of_all_rows(
    shares: int, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"features": DESIGNS["previous"], "probe_rows": 4, "probe_tokens": 16, "stride": 2}
    single = calibrate(make_settings(tiny_pair.spec, tmp_path / "single", calibration=options))
    for index in reversed(range(shares)):
        corpus = {"num_shards": shares, "shard_index": index}
        path = calibrate(make_settings(tiny_pair.spec, tmp_path / "shared", corpus, options))
        assert (path.name == single.name) == (index == 0)
    for name in SPLIT_FILES:
        assert_same(Moments.load(path / name), Moments.load(single / name), 1e-9)
    ours, theirs = read_json(path / REPORT), read_json(single / REPORT)
    assert all(ours[key] == theirs[key] for key in ("pair", "rows", "kept_tokens", "skip_first"))
    assert len(read_json(path / RECORD)["merged_from"]) == shares
    probe, whole = load_file(path / PROBE), load_file(single / PROBE)
    assert set(probe) == set(whole)
    assert all(torch.equal(probe[name], whole[name]) for name in whole)
    calls = remember_prefills(monkeypatch)
    assert calibrate(make_settings(tiny_pair.spec, tmp_path / "shared", calibration=options)) == path
    assert calls == []


@pytest.mark.parametrize(
    ("side", "batch_size", "value"),
    [("source", 1, float("nan")), ("source", 4, float("-inf")), ("target", 4, float("nan"))],
)
def test_a_row_that_is_not_finite_is_skipped_and_reported(
    side: Any, batch_size: int, value: float, tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = {"batch_size": batch_size, "max_bad_rows": 0.1, "layers": (0,)}
    settings = make_settings(tiny_pair.spec, tmp_path, calibration=spec)
    rows = load_rows(settings.corpus, tiny_pair.tokenizer, "fit").tokens
    spoil_prefills(monkeypatch, tiny_pair.side(side), rows[6], value)
    path = calibrate(settings)
    report = read_json(path / REPORT)
    assert report["skipped_rows"] == [["fit", 6]]
    others = torch.cat([rows[:6], rows[7:]])
    expected = expected_samples(tiny_pair, others, settings.calibration, list(range(4, LENGTH)))
    assert report["kept_tokens"]["fit"] == 9 * (LENGTH - 4) == len(expected.x)
    assert_same(load_splits(path).fit, expected.moments(), 1e-6)
    queries = load_file(path / METRICS)
    assert float(queries["count"]) == 3 * len(expected.x)
    assert all(tensor.isfinite().all() for tensor in queries.values())


def test_too_many_rows_that_are_not_finite_end_the_pass(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(tiny_pair.spec, tmp_path, calibration={"max_bad_rows": 0.01})
    row = load_rows(settings.corpus, tiny_pair.tokenizer, "validation").tokens[2]
    spoil_prefills(monkeypatch, tiny_pair.target, row, float("nan"))
    with pytest.raises(KvxferError, match=r"1 of 18 rows .*calibration\.max_bad_rows=0\.01") as refusal:
        calibrate(settings)
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "calibrate").glob("[!.]*"))


def stopped(self: LoadedModel, ids: torch.Tensor, past: KV | None = None, hidden: bool = False) -> KV:
    """In the place of a model's prefill, where none may be made."""
    raise ZeroDivisionError


def test_the_plan_is_said_before_the_pass(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LoadedModel, "prefill", stopped)
    with caplog.at_level(logging.INFO, "kvxfer"), pytest.raises(ZeroDivisionError):
        calibrate(make_settings(tiny_pair.spec, tmp_path, calibration={"probe_rows": 2}))
    said = "\n".join(caplog.messages)
    assert "18 of 64 tokens (10 fit, 5 validation, 3 held_out); 1,080 tokens kept" in said
    for word in ("memory: ", "probe: ", "time: about "):
        assert word in said


def test_a_pass_that_cannot_fit_is_refused_before_it_starts(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "prefill", stopped)
    monkeypatch.setattr(planning, "_available_bytes", lambda: 100_000)
    with pytest.raises(KvxferError, match=r"100 KB .*calibration\.layers") as refusal:
        calibrate(make_settings(tiny_pair.spec, tmp_path))
    assert "\n" not in str(refusal.value)


def test_the_plan_counts_the_bytes_that_are_there(tiny_pair: Pair, tmp_path: Path) -> None:
    settings = make_settings(tiny_pair.spec, tmp_path, calibration={"probe_rows": 2, "probe_tokens": 20})
    counts = {split: ROWS.of(split) for split in CALIBRATION_SPLITS}
    plan = PassPlan(tiny_pair, settings.calibration, counts, LENGTH, 4)
    path = calibrate(settings)
    state = load_splits(path).fit.state()
    assert plan.layout.bytes == sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    probe = load_file(path / PROBE)
    scalars = ("good", "scale", "scaling", "exact")
    assert plan.probe_bytes == sum(x.numel() * x.element_size() for name, x in probe.items() if name not in scalars)
    assert plan.kept_tokens == sum(read_json(path / REPORT)["kept_tokens"].values())
    assert plan.home == "cpu"


@pytest.mark.parametrize(
    ("dtype", "speeds", "said"),
    [
        (torch.bfloat16, [1e3 / 8, 1e3], True),
        (torch.bfloat16, [1e3, 1e3], False),
        (torch.float32, [1e3 / 8, 1e3], False),  # two measurements of one dtype on a busy machine
    ],
)
def test_a_dtype_that_this_cpu_is_slow_in_is_told(
    tiny_pair: Pair, dtype: torch.dtype, speeds: list[float], said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([1e12, *speeds])  # of the products, then of the forwards
    monkeypatch.setattr(planning, "_speed", lambda *_: next(measured))
    monkeypatch.setattr(tiny_pair.source, "dtype", dtype)
    rows = {split: ROWS.of(split) for split in CALIBRATION_SPLITS}
    plan = PassPlan(tiny_pair, CalibrationSpec(), rows, LENGTH, 4)
    hint = "bfloat16 is slow on this CPU: pair.dtype=float32 would take about "
    assert [line.startswith(hint) for line in plan.lines() if "slow" in line] == [True] * said
    assert sum(line.startswith("time: ") for line in plan.lines()) == 1


def test_a_probe_of_exact_tokens_alone_is_refused(tiny_pair: Pair) -> None:
    rows = {split: ROWS.of(split) for split in CALIBRATION_SPLITS}
    with pytest.raises(KvxferError, match=r"calibration\.probe_tokens=4 .*corpus\.skip_first=4"):
        PassPlan(tiny_pair, CalibrationSpec(probe_rows=1, probe_tokens=4), rows, LENGTH, 4)


def test_nothing_to_keep_is_refused(tiny_pair: Pair) -> None:
    for rows, skip in (({"fit": 3, "validation": 0, "held_out": 1}, 4), ({"fit": 1}, LENGTH)):
        with pytest.raises(KvxferError, match=r"corpus\.skip_first.*corpus\.rows"):
            PassPlan(tiny_pair, CalibrationSpec(), rows, LENGTH, skip)


def test_wrong_layers_are_named(tiny_pair: Pair) -> None:
    for layers in ((0, 2), (-1,), ()):
        with pytest.raises(KvxferError, match=r"calibration\.layers=\[.*0 to 1"):
            layout_for(tiny_pair, CalibrationSpec(layers=layers))


@pytest.mark.parametrize(
    "options",
    [{"stride": 0}, {"batch_size": 0}, {"probe_rows": -1}, {"max_bad_rows": 1.5}, {"checkpoint_minutes": -1.0}],
)
def test_wrong_settings_are_named(options: dict[str, Any]) -> None:
    key, value = next(iter(options.items()))
    with pytest.raises(KvxferError, match=rf"calibration\.{key}={value}"):
        CalibrationSpec(**options)


def test_the_probe_holds_content_and_queries(tiny_pair: Pair, tmp_path: Path) -> None:
    """With rotation put back, its queries and keys give the attention scores of the model itself."""
    settings = make_settings(tiny_pair.spec, tmp_path, calibration={"probe_rows": 2, "probe_tokens": 20})
    probe = load_file(calibrate(settings) / PROBE)
    ids = load_rows(settings.corpus, tiny_pair.tokenizer, "validation").tokens[:2, :20]
    assert torch.equal(probe["tokens"], ids)
    for which in ("source", "target"):
        content = tiny_pair.content(which, tiny_pair.side(which).prefill(ids))
        for kind in KINDS:
            for layer, tensor in enumerate(getattr(content, kind)):
                assert torch.allclose(probe[f"{which}.{kind}.{layer}"], tensor, atol=1e-5)
    kv, queries = tiny_pair.target.queries(ids)
    cos, sin = tiny_pair.target.cos_sin(20)
    for layer, rotated in enumerate(queries):
        q, k = (rope.restore(probe[f"target.{part}.{layer}"], cos, sin) for part in ("queries", "keys"))
        ours, theirs = (a @ b.repeat_interleave(3, dim=1).mT for a, b in ((q, k), (rotated, kv.keys[layer])))
        assert relative_error(ours, theirs.double()) < 1e-5
    assert {name.rpartition(".")[0] for name in probe} - {""} == {
        *(f"{which}.{kind}" for which in ("source", "target") for kind in KINDS),
        "target.queries",
        "target.output",
    }
