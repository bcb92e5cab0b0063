"""Benchmarks run, on a small scale, and judge what they measure."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvxfer.maps.apply
from kvxfer.fitting.random_maps import random_map
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.blocks import KINDS
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from tests.benchmark_scripts import load_benchmark
from tests.launching import REPOSITORY
from tests.small_runs import settings_of


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_benchmark("selection", monkeypatch)


def test_a_small_run_has_equal_scores_and_every_ratio(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "BARS", {"selection": 1e-6, "path, shared": 1e-6})
    small = ["--layers", "3", "--width", "8", "--lams", "4", "--fit-layers", "5", "--fit-width", "8"]
    assert benchmark.main(small) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all bars are met"
    assert sum(line.startswith(("| selection", "| path, shared", "| path, all differ")) for line in lines) == 6
    assert lines[-2].startswith("ratios: selection ")
    fits = [line.split(" | ") for line in lines if line.startswith(("| same", "| previous"))]
    assert [row[1] for row in fits] == ["32", "128"]
    for row in fits:
        assert abs(sum(int(cell.strip(" |").rstrip("%")) for cell in row[3:]) - 100) <= 3, "shares of the whole"


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
    tiny = ["pair=toy", "solver.k=1", "map_dtype=bfloat16", "--lengths", "16", "8", "--repeats", "2"]
    apply.main([*tiny, *options])
    lines = capsys.readouterr().out.splitlines()
    assert ("full_head_trunks" in lines[0]) == bool(options)
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    assert [row[1] for row in rows[2:]] == ["8", "16"]
    found = re.fullmatch(r"roof fraction: (\d+\.\d\d)", lines[-1])
    assert found is not None
    assert rows[0][7:-1] == ["fraction", "loop / kvxfer", "float32 loop / kvxfer"]
    assert found[1] == rows[-1][7]
    assert re.match(r"16 tokens: read and strip \d+%, products \d+%, rotate and write \d+%, rest \d+%", lines[-3])


def test_another_checkout_does_not_take_this_one_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    other = load_benchmark("other_tree", monkeypatch)
    (theirs,) = other.modules_of(REPOSITORY, "kvxfer.maps.plan")
    assert theirs is not sys.modules["kvxfer.maps.plan"]
    assert theirs.Plan is not Plan
    assert sys.modules["kvxfer.maps.apply"] is kvxfer.maps.apply
    with pytest.raises(SystemExit, match="no checkout"):
        other.modules_of(REPOSITORY / "docs", "kvxfer.maps.plan")


@pytest.mark.parametrize("form", [["solver=ridge"], ["solver=head_local"], ["rank=reduced", "rank.r=8"]])
@pytest.mark.parametrize("hidden", [0, 8])
def test_the_rival_of_the_map_computes_the_same(
    form: list[str], hidden: int, tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, device = load_benchmark("apply", monkeypatch), torch.device("cpu")
    settings = settings_of("evaluate", Path("."), "solver.k=2", "features=both", *form)
    cache_map = random_map(tiny_pair, settings.solver, {})
    if hidden:
        cache_map = apply.with_random_trunks(cache_map, hidden, 1, True, False)
    cache, ids = apply.cache_of(tiny_pair, 9, device), torch.zeros(1, 9, dtype=torch.int64)
    ours = apply.into_a_cache(Transfer(tiny_pair, Mapper(cache_map), Plan()), 9)(cache, ids)
    theirs = apply.loop(tiny_pair, cache_map, torch.float32, device)(cache, ids)
    for kind in KINDS:
        for a, b in zip(getattr(ours, kind), getattr(theirs, kind), strict=True):
            assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


def test_the_roof_is_what_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = load_benchmark("apply", monkeypatch)
    timed = apply.Timed(
        4,
        apply.Work(flops=2e9, bytes=1.0),
        {"kvxfer": [4.0, 2.0, 100.0], "loop": [12.0, 2.0, 500.0]},
        [1.0, 1.0, 1.0],
        ["compute"] * 3,
    )
    assert timed.fraction == 0.25
    assert timed.times("loop") == 3
    assert timed.row() == "| 4 | 2.00 | 0.0 | 4000.00 ms | 1000.00 ms | compute | 0.25 | 3.0 |"
