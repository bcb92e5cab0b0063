"""Benchmarks run, on a small scale, and judge what they measure."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.benchmark_scripts import load_benchmark


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_benchmark("selection", monkeypatch)


def test_a_small_run_has_equal_scores_and_every_ratio(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "BARS", {"selection": 1e-6, "path, shared": 1e-6})
    assert benchmark.main(["--layers", "3", "--width", "8", "--lams", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all bars are met"
    assert sum(line.startswith(("| selection", "| path, shared", "| path, all differ")) for line in lines) == 6
    assert lines[-2].startswith("ratios: selection ")


def test_slow_or_wrong_is_named(benchmark: ModuleType) -> None:
    good, slow, wrong = (benchmark.Job() for _ in range(3))
    for job, seconds in ((good, 100.0), (slow, 4.0), (wrong, 1.0)):
        job.seconds = {"reference": seconds, "kvxfer": 1.0}
    wrong.apart = 1e-3
    assert benchmark.failures({"selection": good, "path, shared": good, "path, all differ": slow}) == []
    found = benchmark.failures({"selection": slow, "path, all differ": wrong})
    assert found == ["path, all differ: scores differ by 1e-03", "selection: 4.0 times as fast, below 10"]


@pytest.mark.parametrize("options", [[], ["--hidden", "4", "--depth", "2", "--share", "--instead"]])
def test_applying_a_map_ends_with_its_share_of_the_roof(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = load_benchmark("apply", monkeypatch)
    monkeypatch.setattr(apply, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(apply, "peak_bandwidth", lambda _: 1e9)
    apply.main(["pair=toy", "solver.k=1", "--lengths", "16", "8", "--repeats", "2", *options])
    lines = capsys.readouterr().out.splitlines()
    assert ("full_head_trunks" in lines[0]) == bool(options)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    assert [row[1] for row in rows[2:]] == ["8", "16"]
    found = re.fullmatch(r"roof fraction: (\d+\.\d\d)", lines[-1])
    assert found is not None
    assert found[1] == rows[-1][-2]


def test_the_roof_is_what_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = load_benchmark("apply", monkeypatch)
    timed = apply.Timed(4, apply.Work(flops=2e9, bytes=1.0), [4.0, 2.0, 100.0], [1.0, 1.0, 1.0], ["compute"] * 3)
    assert timed.fraction == 0.25
    assert timed.row() == "| 4 | 2.00 | 0.0 | 4000.00 ms | 1000.00 ms | compute | 0.25 |"
