"""A map that does less than its fit reported is said to, wherever the verdict stands."""

from __future__ import annotations

from kvxfer.report.writing import render_comparison, render_report
from tests.report.test_report import make_check, make_results, shown


def test_a_map_that_does_less_than_its_fit_reported_is_seen_beside_the_verdict():
    results = make_results() | {"fit_check": make_check(0.56)}
    said = (
        "On this text layer 3's keys have R² 0.41; where the map was fitted it was 0.97: the map is damaged, or this "
        "text is far from its calibration."
    )
    report = render_report(results)
    assert f"**{said}**" in report.split("## Headline")[0]
    assert "| fit: largest drop in R² | 0.560 | 0.15 | **failed** |" in report
    assert said in " ".join(shown(results).split())
    results["fit_check"]["worst"] |= {"r2": None, "drop": None}
    assert "keys have no finite R²" in render_report(results)
    results["fit_check"]["below"] *= 2
    assert "it was 0.97 (2 of 1 target layers and kinds lose more than 0.15): the map" in render_report(results)
    designs = {"same": make_results(0.5) | {"fit_check": make_check(0.56)}, "both": make_results(0.62)}
    assert f"**Design `same`: {said}**" in render_comparison(designs)


def test_results_of_before_the_fit_was_checked_are_still_rendered():
    for check in ({}, {"fit_check": None}):
        results = {key: value for key, value in make_results().items() if key != "fit_check"} | check
        assert "fit: largest drop" not in render_report(results)
        assert "Worth it" in shown(results)


def test_few_documents_are_said_beside_the_verdict():
    results = make_results()
    said = "The items are about 16 documents: below 30, p values and intervals are rough. Raise eval.stories (toy)"
    results["tests"]["mapped_vs_source"]["documents"] = 30
    assert "documents: below" not in render_report(results) + shown(results)
    results["tests"]["mapped_vs_source"]["documents"] = 16
    assert f"**{said}" in render_report(results).split("## Headline")[0]
    assert said in " ".join(shown(results).split())
    assert render_comparison({"same": results, "both": results}).split("## ")[0].count(said) == 1
