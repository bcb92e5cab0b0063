"""The report says what the numbers say, in a reader's numbers, and results.json is complete and valid JSON."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvxfer.errors import KvxferError
from kvxfer.evals.fit_check import TOLERATED, TOLERATED_MEAN
from kvxfer.evals.statistics import CONDITIONS, summarise
from kvxfer.report.designs import best_design, compare_designs
from kvxfer.report.kinds import REPORTS
from kvxfer.report.rendering import render, terminal, write
from kvxfer.report.schema import validate

pytestmark = pytest.mark.draws

SHARES = {"ceiling": 0.95, "identity": 0.95, "source": 0.6, "mapped": 0.85, "mapped_all": 0.75}


def make_items(mapped: float = 0.85, answers: bool = True, count: int = 120) -> list[dict]:
    """Toy items; only the mapped conditions depend on ``mapped``, so that designs share their baselines."""
    draw = np.random.default_rng(11)
    shares = dict.fromkeys(CONDITIONS, 0.2) | SHARES | {"mapped": mapped, "mapped_all": mapped - 0.05}
    items = []
    for index in range(count):
        hard, noise = draw.random(), draw.uniform(0.9, 1.1)
        right = {name: bool(hard < share) for name, share in shares.items()}
        item = {
            "id": f"q{index}",
            "document": f"toy/{index // 4}",
            "kind": ("where", "who")[index % 2],
            "chance": 1 / 6,
        }
        item |= {"tokens": 2, "nats": {name: float((0.2 if ok else 4.0) * noise) for name, ok in right.items()}}
        items.append(item | ({"correct": right, "generated": right} if answers else {}))
    return items


@functools.cache
def summary_of(mapped: float, answers: bool) -> dict:
    return summarise(make_items(mapped, answers))


def make_check(ratio: float) -> dict:
    """A check of the fit of one target layer, whose keys leave so many times as much unexplained as their fit."""
    row = {"layer": 3, "kind": "keys", "r2": 1 - 0.04 * ratio, "recorded": 0.96, "ratio": ratio}
    beyond = [row] if ratio > TOLERATED else []
    shared = {"tolerated": TOLERATED, "mean": ratio, "tolerated_mean": TOLERATED_MEAN, "tokens": 2048}
    return {"outputs": [row], "worst": row, "beyond": beyond, "passed": ratio <= TOLERATED_MEAN, **shared}


def make_results(mapped: float = 0.85, answers: bool = True, **changed: Any) -> dict:
    """A complete results.json with numbers of many decimals everywhere; ``changed`` are keys of its data."""
    grid = np.random.default_rng(2).uniform(0, 1, (4, 3)).tolist()
    chosen = [[0, 1]] * 4
    fitted = {"run_id": "m1", "sha256": "c" * 64, "solver": "ridge", "penalty": "isotropic", "lam": 0.00123456789}
    fitted |= {"rank": "full", "features": "same", "k": 2, "parameters": 1234567, "bytes": 4938268}
    summary = copy.deepcopy(summary_of(mapped, answers))
    data = {
        **summary,
        "prompt_tokens": 64,
        "tables": {"story_only": {key: copy.deepcopy(summary[key]) for key in ("conditions", "tests")}},
        "ancestry": None,
        "gates": [{"name": "identity", "value": 1.23456789e-7, "tolerance": 1e-4, "passed": True}],
        "fit_check": make_check(1.0123456789),
        "selection": {"r2_keys": grid, "r2_values": grid, "chosen_keys": chosen, "chosen_values": chosen},
        "items": make_items(mapped, answers),
        **changed,
    }
    fitted |= {"flops_per_token": 2469134.123456, "share_of_prefill_flops": 0.2741234567}
    fitted |= {"handoff_share_of_prefill_flops": 0.3011234567}
    return {
        "schema": 3,
        "kind": "items",
        "run_id": "ab12",
        "title": "Toy questions",
        "pair": {"name": "toy", "source": {"model": "small", "revision": "d" * 40}, "target": {"model": "large"}},
        "map": fitted,
        "verdict": vars(REPORTS["items"].verdict(data)),
        "data": data,
        "provenance": {
            "seconds": 12.3456789,
            "versions": {"torch": "2.13.0"},
            "commit": "e" * 40,
            "note": "a | b",
            "config": {"k": 7, "eval": {"name": "standard"}},
        },
    }


def test_verdict_in_nats_alone():
    said = make_results(answers=False)["verdict"]
    assert said["kind"] == "beats"
    assert "accuracy" not in said["sentence"]


def test_the_report_is_for_a_reader():
    report = render(make_results())
    assert not re.search(r"\d\.\d{5,}", report)
    assert not re.search(r"\de-\d{2}", re.sub("1.2e-07|1.0e-04|1.23e-03", "", report))
    assert not re.search(r"\b(nan|None|inf)\b", report)
    for words in (
        "# Toy questions",
        "**Worth it: the mapped cache beats the source, with accuracy",
        "| fit: largest ratio of unexplained variance | 1.01 | 1.5 | passed |",
        "| fit: mean ratio of unexplained variance | 1.01 | 1.15 | passed |",
        "| Source alone (baseline) |",
        "When only the story is handed over",
        "Accuracy by kind of item",
        "| λ (relative) | 1.23e-03 |",
        "| Parameters | 1.23 M |",
        "| The whole handoff, as a share of the target's prefill FLOPs | 30.1 % |",
        "| The map alone, per mapped token | 27.4 % |",
        "| Context recovered |",
        "| identity | 1.2e-07 | 1.0e-04 | passed |",
        "(figures/conditions.png)",
        "(figures/r2.png)",
        "## Glossary",
        "a \\| b",
        "| commit | eeeeeeeeeeee |",
        "< 0.001",
    ):
        assert words in report
    assert "config.k" not in report


def test_every_markdown_table_is_rectangular():
    for report in (render(make_results()), render(make_comparison())):
        for block in re.findall(r"(?:^\|.*\n)+", report, flags=re.MULTILINE):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_a_report_without_answers_leaves_the_accuracy_columns_out():
    report = render(make_results(answers=False))
    assert "| Condition | Perplexity | Nats per token | Gap recovered (nats) |" in report
    assert "chance" not in report.split("## Glossary")[0]


def test_a_failed_gate_is_seen():
    results = make_results()
    results["data"]["gates"][0]["passed"] = False
    assert "**failed**" in render(results)


def make_comparison() -> dict:
    return compare_designs(
        {n: make_results(m) for n, m in (("same", 0.5), ("both", 0.62), ("previous", 0.85))}, "Designs"
    )


def test_a_comparison_names_the_best_and_shows_the_shared_baselines_once():
    results = make_comparison()
    best = make_results(0.85)
    assert results["data"]["best"] == "previous"
    assert {key: results[key] for key in ("run_id", "pair", "map")} == {
        key: best[key] for key in ("run_id", "pair", "map")
    }
    report = render(results)
    first, overview = report.split("The rest is about the best design")[0].split("## What this is about")
    assert "| Source alone (baseline) |" in first
    assert "Mapped, same" in first
    assert overview.count("| Source alone (baseline) |") == 1
    assert "| **previous** (best) |" in overview
    assert "corrected for 3 tries (Bonferroni)" in first
    assert "Worth it: the best of 3 designs, previous, beats the source" in first
    assert not re.search(r"\d\.\d{5,}", report)


def test_ties_in_accuracy_are_broken_by_nats():
    designs = {name: make_results() for name in ("first", "second")}
    designs["second"]["data"]["conditions"]["mapped"]["nats"] -= 0.1
    assert best_design(designs) == "second"
    with pytest.raises(KvxferError, match="0 were evaluated"):
        best_design({})


def test_designs_on_other_items_are_refused():
    designs = {"same": make_results(), "both": make_results()}
    designs["both"]["data"]["conditions"]["source"]["nats"] += 0.01
    with pytest.raises(KvxferError, match=r"source has .* evaluate them on the same items"):
        compare_designs(designs, "Designs")


def shown(results: dict, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(terminal(results))
    return out.getvalue()


@pytest.mark.parametrize("results", [make_results(), make_results(answers=False), make_comparison()])
def test_the_console_table_fits_eighty_columns(results):
    text = shown(results)
    assert "…" not in text
    assert "Source alone" in text
    lines = [line.rstrip() for line in text.splitlines()]
    rows = [line for line in lines if line.startswith(("Target", "Source", "Mapped", "  all", "Zeroed"))]
    assert all(re.search(r"(%|\d)$", line) for line in rows)
    assert "beats the source" in " ".join(text.split())


def test_the_console_table_of_a_comparison_has_a_row_per_design():
    text = shown(make_comparison())
    cost = "A whole handoff's FLOPs, of the target's own prefill: same 30.1 %, both 30.1 %, previous 30.1 %."
    assert cost in " ".join(text.split())
    assert [text.count(f"Mapped, {name}") for name in ("same", "both", "previous")] == [1, 1, 1]
    assert text.count("Source alone") == 1


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_files_are_written_and_complete(tmp_path):
    report, page, data = write(make_results(), tmp_path)
    assert (report, page, data) == tuple(tmp_path / name for name in ("report.md", "report.html", "results.json"))
    results = strict(data.read_text(encoding="utf-8"))
    validate(results)
    assert results["data"]["conditions"]["mapped"] == make_results()["data"]["conditions"]["mapped"]
    assert results["data"]["items"] == make_items()
    assert len(results["data"]["selection"]["r2_keys"]) == 4
    assert report.read_text(encoding="utf-8") == render(results)
    linked = re.findall(r"\]\((figures/.*?)\)", report.read_text(encoding="utf-8"))
    assert sorted(set(linked)) == ["figures/conditions.png", "figures/r2.png"]
    assert all((tmp_path / path).stat().st_size > 1000 for path in linked)


def test_a_comparison_is_written_with_its_figure(tmp_path):
    report, _, data = write(make_comparison(), tmp_path)
    assert set(strict(data.read_text(encoding="utf-8"))["data"]["designs"]) == {"same", "both", "previous"}
    linked = re.findall(r"\]\((figures/.*?)\)", report.read_text(encoding="utf-8"))
    assert "figures/designs.png" in linked
    assert all((tmp_path / path).exists() for path in linked)


def test_what_is_not_finite_becomes_null(tmp_path):
    results = make_results()
    results["provenance"] |= {"bad": [math.nan, np.float32("inf"), np.int64(3)], "flag": np.bool_(True)}
    results["data"]["selection"]["r2_keys"][0][0] = np.nan
    *_, data = write(results, tmp_path)
    written = strict(data.read_text(encoding="utf-8"))
    assert written["provenance"]["bad"] == [None, None, 3]
    assert written["provenance"]["flag"] is True
    assert written["data"]["selection"]["r2_keys"][0][0] is None


def test_a_map_without_selection_has_no_heat_map(tmp_path):
    report, *_ = write(make_results(selection=None), tmp_path)
    assert "r2.png" not in report.read_text(encoding="utf-8")
    assert not (tmp_path / "figures" / "r2.png").exists()


@pytest.mark.parametrize(
    "path",
    [
        "provenance",
        "map",
        "map.handoff_share_of_prefill_flops",
        "data.conditions.no_context",
        "data.conditions.source.accuracy",
        "data.tests.mapped_vs_source",
        "data.tests.mapped_vs_source.nll_p",
        "data.tests.mapped_vs_floor",
        "data.tests.mapped_vs_no_context.nll_sign_p",
        "data.tests.source_vs_no_context.accuracy_se",
        "data.conditions.mapped.context_recovered_nats",
        "data.tables.story_only.tests",
        "data.gates.0.tolerance",
    ],
)
def test_a_missing_key_is_named_and_nothing_is_written(tmp_path, path):
    results = make_results()
    *parents, last = path.split(".")
    holder = results
    for name in parents:
        holder = holder[int(name) if isinstance(holder, list) else name]
    del holder[last]
    with pytest.raises(KvxferError, match=re.escape(f"key {path} is missing")):
        write(results, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_design_that_lacks_a_key_is_named():
    results = make_comparison()
    del results["data"]["designs"]["both"]["pair"]
    with pytest.raises(KvxferError, match=r"design both: .*key pair is missing"):
        validate(results)
    with pytest.raises(KvxferError, match="best is other"):
        validate({**results, "data": make_comparison()["data"] | {"best": "other"}})


def test_another_schema_is_refused():
    with pytest.raises(KvxferError, match="schema is 2 and this version reads 3"):
        validate(make_results() | {"schema": 2})
