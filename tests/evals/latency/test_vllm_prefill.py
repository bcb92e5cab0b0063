"""``benchmarks/vllm_prefill.py`` without vLLM: what it writes, what it refuses; and with it where it is installed."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType

import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.latency.vllm import KEYS, figures_for, floor_seconds
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import load_config
from kvxfer.models.spec import ModelSpec
from tests.benchmark_scripts import load_benchmark

HAS_VLLM = importlib.util.find_spec("vllm") is not None
SMALL = ["--lengths", "16", "32", "--repeats", "2", "--warmup", "1", "--dtype", "float32"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_benchmark("vllm_prefill", monkeypatch)


@pytest.fixture
def written(benchmark, monkeypatch, tiny_folders, tmp_path, capsys):
    """The file of an engine that takes two milliseconds, and the ids that it was given."""
    asked: list[list[int]] = []

    def prefill(ids: list[int]) -> None:
        asked.append(ids)
        time.sleep(0.002)

    monkeypatch.setattr(benchmark, "start_engine", lambda args, revision: (prefill, "0.33.0"))
    out = tmp_path / "vllm.json"
    assert benchmark.main(["--model", str(tiny_folders[1]), *SMALL, "--peak-tflops", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    return out, asked


def test_every_prompt_is_new_ids_and_the_file_says_what_was_timed(written):
    out, asked = written
    found = json.loads(out.read_text())
    assert set(KEYS) <= set(found)
    assert [point["tokens"] for point in found["points"]] == [16, 32]
    assert all(point["median"] >= 0.002 > point["floor"] for point in found["points"])
    assert (found["prefix_caching"], found["decode_steps"], found["peak_from"]) == (False, 1, "--peak-tflops")
    assert [len(ids) for ids in asked] == [16] * 3 + [32] * 3
    assert len({tuple(ids) for ids in asked}) == 6


def test_a_cache_hit_is_refused_with_its_number_and_the_floor(benchmark, monkeypatch, tiny_folders, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "start_engine", lambda args, revision: (lambda ids: None, "0.33.0"))
    out = tmp_path / "vllm.json"
    # At a thousandth of a GFLOP/s, no prefill of this model is that fast.
    given = ["--model", str(tiny_folders[1]), *SMALL, "--peak-tflops", "0.000001", "--out", str(out)]
    assert benchmark.main(given) == 1
    said = capsys.readouterr().err
    floor = floor_seconds(read_geometry(load_config(ModelSpec(str(tiny_folders[1])), "x"), "x"), 16, 1e6)
    assert f"16 tokens is below the {1e3 * floor:.4g} ms that the card's peak FLOP/s allow" in said
    assert "prefix caching off" in said
    assert not out.exists()


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_one_line_says_so(benchmark, tiny_folders, capsys):
    assert benchmark.main(["--model", str(tiny_folders[1]), *SMALL]) == 1
    assert capsys.readouterr().err == ("error: vLLM is not installed: pip install vllm, in an environment of its own\n")


def target_of(out: Path) -> dict[str, str]:
    return {key: json.loads(out.read_text())[key] for key in ("revision", "dtype", "device")}


def test_a_file_about_the_target_gives_its_medians(written, tiny_pair):
    out, _ = written
    geometry = tiny_pair.target.geometry
    found = figures_for(str(out), target_of(out), [16, 32], geometry, 1e12)
    assert list(found) == [16, 32]
    # Random weights of the same shape have no revision.
    assert figures_for(str(out), target_of(out) | {"revision": None}, [16], geometry, 1e12)[16] == found[16]


@pytest.mark.parametrize(
    ("change", "lengths", "peak", "said"),
    [
        ({"revision": "other"}, [16], 1e12, "its revision is sha256:.*, but here it is other"),
        ({"device": "H200"}, [16], 1e12, "its device is .*, but here it is H200"),
        ({"dtype": "float16"}, [16], 1e12, "its dtype is float32, but here it is float16"),
        ({}, [16, 64], 1e12, r"has no 64 tokens \(eval\.lengths\), only \[16, 32\]"),
    ],
)
def test_a_file_about_something_else_is_refused(written, tiny_pair, change, lengths, peak, said):
    out, _ = written
    with pytest.raises(KvxferError, match=said):
        figures_for(str(out), target_of(out) | change, lengths, tiny_pair.target.geometry, peak)


def test_a_file_of_another_shape_below_the_floor_or_broken_is_refused(written, tiny_pair, tmp_path):
    out, _ = written
    target = target_of(out)
    with pytest.raises(KvxferError, match=r"whose layers is 3, but the target's is 2"):
        figures_for(str(out), target, [16], tiny_pair.source.geometry, 1e12)
    found = json.loads(out.read_text())
    found["peak_flops"] = 1e6
    out.write_text(json.dumps(found))
    with pytest.raises(KvxferError, match=r"ms for 16 tokens is below the .* ms"):
        figures_for(str(out), target, [16], tiny_pair.target.geometry, 1e6)
    del found["points"]
    out.write_text(json.dumps(found))
    with pytest.raises(KvxferError, match=r"points is missing"):
        figures_for(str(out), target, [16], tiny_pair.target.geometry, 1e12)
    out.write_text('{"points":')
    with pytest.raises(KvxferError, match=r"^eval\.vllm=.*vllm\.json is no file of benchmarks/vllm_prefill\.py .*\)$"):
        figures_for(str(out), target, [16], tiny_pair.target.geometry, 1e12)
    with pytest.raises(KvxferError, match=r"no such file; benchmarks/vllm_prefill\.py writes it"):
        figures_for(str(tmp_path / "nope.json"), target, [16], tiny_pair.target.geometry, 1e12)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"points": 3}, "points is no list of objects"),
        ({"points": [{"tokens": 16}]}, r"points\.0\.median is no number above 0"),
        ({"points": [{"tokens": 16, "median": float("nan")}]}, r"points\.0\.median is no number above 0"),
        ({"points": [{"tokens": "16", "median": 1.0}]}, r"points\.0\.tokens is no number above 0"),
        ({"peak_flops": "fast"}, "peak_flops is no number above 0"),
        ({"geometry": []}, "geometry is no object"),
        ({"schema": 9}, "its schema is 9 and not 1"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(tiny_pair, tmp_path, change, said):
    about = {**dict.fromkeys(KEYS, "x"), "schema": 1, "peak_flops": 1e12, "geometry": {}, "points": []}
    out = tmp_path / "vllm.json"
    out.write_text(json.dumps({**about, **change}))
    with pytest.raises(KvxferError, match=rf"eval\.vllm=.*vllm\.json is no file .* \({said}\)"):
        figures_for(str(out), {}, [16], tiny_pair.target.geometry, 1e12)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--peak-tflops", "inf"], "--peak-tflops=inf must be above 0 and finite"),
        (["--peak-tflops", "nan"], "--peak-tflops=nan must be above 0 and finite"),
        (["--peak-tflops", "0"], "--peak-tflops=0.0 must be above 0 and finite"),
        (["--out", "nowhere/vllm.json"], "--out=nowhere/vllm.json cannot be written: name a file in a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_timed(benchmark, monkeypatch, tiny_folders, given, said, capsys):
    monkeypatch.setattr(benchmark, "start_engine", None)
    assert benchmark.main(["--model", str(tiny_folders[1]), *SMALL, *given]) == 1
    assert f"error: {said}" in capsys.readouterr().err


@pytest.mark.vllm
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed, so no real engine was timed")
def test_a_real_engine_is_timed(benchmark, tiny_folders, tmp_path):
    out = tmp_path / "vllm.json"
    given = ["--model", str(tiny_folders[1]), *SMALL, "--memory", "0.2", "--out", str(out)]
    assert benchmark.main(given) == 0
    assert len(json.loads(out.read_text())["points"]) == 2
