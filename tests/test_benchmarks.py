"""Benchmarks run, on a small scale, and judge what they measure."""

from __future__ import annotations

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
