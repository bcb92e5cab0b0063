"""Evaluations of a kind of their own: run once, told again from their JSON, and settings that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.report.rendering import render
from tests.small_runs import results_of, run, settings_of, toy_models

PERPLEXITY = ["eval=perplexity", "eval.rows=4", "eval.prefixes=[24,48]", "eval.scored=8"]


@pytest.fixture(scope="module")
def done(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    outputs = tmp_path_factory.mktemp("outputs")
    return run("evaluate", outputs, *toy_models(tiny_folders), *PERPLEXITY)


def test_the_report_is_made_from_the_json_alone(done):
    assert (done / "report.md").read_text() == render(results_of(done))


def test_evidence_lies_beside_the_map_and_has_the_verdict_but_no_items(done):
    results = results_of(done)
    file = done.parents[1] / "train" / results["map"]["run_id"] / "evidence" / f"{results['run_id']}.json"
    evidence = json.loads(file.read_text())
    assert evidence["verdict"] == results["verdict"]
    assert evidence["map"] == results["map"]["sha256"]
    assert "data" not in evidence


def test_the_same_question_is_not_asked_twice(done, tiny_folders):
    again = run("evaluate", done.parents[1], *toy_models(tiny_folders), *PERPLEXITY)
    assert again == done
    other = settings_of("evaluate", done.parents[1], *toy_models(tiny_folders), *PERPLEXITY, "eval.scored=9")
    assert other.asked() != settings_of("evaluate", done, *PERPLEXITY).asked()


def test_more_texts_are_named_by_their_option(tmp_path):
    settings = settings_of("evaluate", tmp_path, "eval=perplexity", "eval.domains=[stdlib]")
    assert [corpus.name for corpus in settings.domains] == ["stdlib"]
    with pytest.raises(KvxferError, match=r"eval\.domains: 'nowhere' is no option of corpus"):
        settings_of("evaluate", tmp_path, "eval=perplexity", "eval.domains=[nowhere]")


def test_the_dtype_of_the_products_is_recorded_and_another_is_another_question(done, tiny_folders):
    asked = [*toy_models(tiny_folders), *PERPLEXITY]
    assert results_of(done)["map"]["dtype"] == "float32"
    other = run("evaluate", done.parents[1], *asked, "map_dtype=float64")
    assert other != done
    assert results_of(other)["map"]["dtype"] == "float64"
    with pytest.raises(KvxferError, match="map_dtype='int8' is none of auto, bfloat16"):
        settings_of("evaluate", done.parents[1], *asked, "map_dtype=int8")
