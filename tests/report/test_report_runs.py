"""Evaluations side by side: what was asked the same in one table, and never a test between other questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import holm
from kvxfer.experiment.sweeps.measures import numbers
from kvxfer.report.command import report as command
from kvxfer.report.evaluated import Evaluated, find, groups
from kvxfer.report.side_by_side import render
from tests.report.test_html import stands_alone
from tests.small_runs import TOY_EVAL, results_of, run, toy_models
from tools.collect import Wanted, collect

ITEMS = ["eval=mapped", *TOY_EVAL]
TEXT = ["eval=perplexity", "eval.rows=4", "eval.prefixes=[24,32]", "eval.scored=8"]


@pytest.fixture(scope="module")
def runs(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two maps that are asked the same, one under another plan, other stories, and text after prefixes."""
    outputs, models = tmp_path_factory.mktemp("outputs"), toy_models(tiny_folders)
    asked = {
        "first": [*ITEMS, "penalty.lam=0.001"],
        "second": [*ITEMS, "penalty.lam=1.0"],
        "plan": [*ITEMS, "penalty.lam=1.0", "plan=all"],
        "stories": [*ITEMS, "penalty.lam=1.0", "eval.seed=1"],
        "text": [*TEXT, "penalty.lam=0.001"],
        "text_second": [*TEXT, "penalty.lam=1.0"],
    }
    return {name: run("evaluate", outputs, *models, *overrides) for name, overrides in asked.items()}


def found(runs: dict[str, Path], *names: str) -> list:
    return find([str(runs[name]) for name in names], Path("nowhere"))


def test_only_what_was_asked_the_same_shares_a_table(runs):
    together = groups(found(runs, "first", "text", "second", "stories", "plan", "text_second"))
    assert [[one.label for one in group] for group in together] == [["A", "C", "E"], ["B", "F"], ["D"]]


def test_times_of_another_machine_are_another_question(runs):
    results = results_of(runs["text"])
    config = results["provenance"]["config"]
    here, there = ({**config, "machine": {"name": name}} for name in ("one", "another"))
    asked = [Evaluated("A", {**results, "provenance": {"config": each}}).question for each in (here, there, here)]
    assert asked[0] == asked[2] != asked[1]


@pytest.mark.parametrize("key", ["map.sha256", "map.features", "map.lam", "provenance.config.eval"])
@pytest.mark.parametrize("name", ["first", "text"])
def test_what_the_comparison_reads_is_asked_for(runs, tmp_path, name, key):
    results = results_of(runs[name])
    *parents, last = key.split(".")
    holder = results
    for parent in parents:
        holder = holder[parent]
    del holder[last]
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(KvxferError, match=rf"key {key} is missing"):
        find([str(tmp_path)], Path("nowhere"))


def test_a_run_that_is_named_twice_counts_once(runs):
    assert len(found(runs, "first", "first")) == 1


def test_tests_between_runs_are_those_of_scipy(runs):
    report = render(found(runs, "first", "second", "plan"))
    scores = [results_of(runs[name])["data"]["items"] for name in ("first", "second", "plan")]
    documents = [item["document"] for item in scores[0]]
    means = [
        [np.mean([i["nats"]["mapped"] / i["tokens"] for i in items if i["document"] == d]) for d in set(documents)]
        for items in scores
    ]
    pairs = ((0, 1), (0, 2), (1, 2))
    ps = holm([float(stats.ttest_rel(means[a], means[b]).pvalue) for a, b in pairs])
    rows = [line for line in report.splitlines() if re.match(r"\| [ABC] vs [ABC] \|", line)]
    assert [row.split(" | ")[0] for row in rows] == ["| A vs B", "| A vs C", "| B vs C"]
    for row, p in zip(rows, ps, strict=True):
        shown = row.split("|")[-2].strip()
        assert shown == "< 0.001" if p < 0.001 else float(shown) == pytest.approx(p, abs=0.006)
    assert "corrected for 3 tests (Holm)" in report


def test_items_of_other_kinds_are_found_and_tested(runs):
    (text,) = found(runs, "text")
    assert list(text.items) == ["domain toy, prefix 24", "domain toy, prefix 32"]
    report = render(found(runs, "text", "text_second"))
    assert "| A vs B (domain toy, prefix 24) |" in report
    assert "| toy/32/mapped/nats |" in report


def test_of_many_runs_each_is_tested_against_the_first(runs, monkeypatch):
    monkeypatch.setattr("kvxfer.report.side_by_side.ALL_PAIRS_UP_TO", 2)
    report = render(found(runs, "first", "second", "plan"))
    assert re.findall(r"^\| (. vs .) \|", report, re.MULTILINE) == ["B vs A", "C vs A"]


def test_the_command_writes_both_pages_and_prints_the_path_last(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    outputs = runs["first"].parents[1]
    command([runs["first"].name, str(runs["second"]), str(runs["stories"] / "results.json"), "--outputs", str(outputs)])
    assert capsys.readouterr().out.splitlines() == ["comparison.md", "comparison.html"]
    report = (tmp_path / "comparison.md").read_text()
    assert report.startswith("# Evaluations side by side\n\n**3 evaluations against the source alone; ")
    assert "no test is between them" in report
    tags = stands_alone((tmp_path / "comparison.html").read_text())
    assert len(tags.named("img")) == len(list(tmp_path.glob("*.png"))) == 2
    command([str(runs["first"]), "--out", str(tmp_path / "other")])
    assert (tmp_path / "other" / "comparison.html").is_file()


def test_what_diagnostics_foretell_is_told_over_all_maps_of_the_outputs(runs, tiny_folders, tmp_path):
    outputs = runs["first"].parents[1]
    asked = [*toy_models(tiny_folders), "eval=diagnostics", "eval.rows=2", "eval.prefix=24", "eval.scored=8"]
    diagnosed = [run("evaluate", outputs, *asked, f"penalty.lam={lam}") for lam in ("0.001", "1.0")]
    assert "correlation" not in results_of(diagnosed[0])["data"]
    for given, count in ((outputs, 2), (tmp_path, 0)):
        command([str(diagnosed[0]), "--outputs", str(given), "--out", str(tmp_path / "out")])
        report = (tmp_path / "out" / "comparison.md").read_text()
        assert "### Do diagnostics foretell what a map is worth?" in report
        assert f"Too few maps ({count}): 4 maps of this pair" in report
    assert "Do diagnostics foretell" not in render(found(runs, "first", "text"))


def test_collecting_passes_over_what_asks_no_items(runs):
    found = collect(runs["first"].parents[1], Wanted())["maps"]
    asked = {runs[name].name for name in ("first", "second", "plan", "stories")}
    assert {one["runs"]["evaluate"] for one in found} == asked


def test_a_sweep_of_any_kind_has_its_numbers(runs):
    found = numbers("evaluate", runs["text"])
    assert found["toy/32/mapped/nats"] > 0
    assert found["parameters"] == results_of(runs["text"])["map"]["parameters"]


def test_mistakes_are_told_in_one_line(runs, tmp_path):
    train = next((runs["first"].parents[1] / "train").glob("[!.]*/run.json")).parent
    (tmp_path / "results.json").write_text('{"kind": "perplexity"}')
    for given, message in (
        (["nowhere"], r"nowhere: there is no such directory, and no such id in outputs; name finished"),
        ([str(train)], r"is a run, but no evaluation \(it has no results\.json\); name finished evaluations"),
        ([str(tmp_path)], r"key schema is missing"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{message}") as end:
            command([*given, "--out", str(tmp_path / "out")])
        assert "\n" not in str(end.value)
    assert not (tmp_path / "out").exists()
