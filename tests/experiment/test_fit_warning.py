"""A map that does less than its fit reported is said to, wherever the verdict stands."""

from __future__ import annotations

from kvxfer.report.designs import compare_designs
from kvxfer.report.rendering import render
from tests.report.test_report import make_check, make_results, shown


def test_a_map_that_does_less_than_its_fit_reported_is_seen_beside_the_verdict():
    results = make_results(fit_check=make_check(15.0))
    said = (
        "On this text layer 3's keys have R² 0.40; where the map was fitted it was 0.96, 15.0 times as much left "
        "unexplained (1 of 1 target layers and kinds leave more than 1.5 times as much; in the mean of all it is 15.00 "
        "times): the map is damaged, or this text is far from its calibration."
    )
    report = render(results)
    assert f"**{said}**" in report.split("## Headline")[0]
    assert "| fit: largest ratio of unexplained variance | 15.00 | 1.5 | **failed** |" in report
    assert "| fit: mean ratio of unexplained variance | 15.00 | 1.15 | **failed** |" in report
    assert said in " ".join(shown(results).split())
    results["data"]["fit_check"] |= {"mean": None}
    results["data"]["fit_check"]["worst"] |= {"r2": None, "ratio": None}
    said_so = "keys have no finite R²; where the map was fitted it was 0.96 (1 of 1 target layers and kinds leave more"
    assert f"{said_so} than 1.5 times as much): the map" in render(results)
    designs = {"same": make_results(0.5, fit_check=make_check(15.0)), "both": make_results(0.62)}
    assert f"**Design `same`: {said}**" in render(compare_designs(designs, "Designs"))


def test_a_fit_that_was_not_checked_is_no_failure():
    results = make_results(fit_check=None)
    assert "ratio of unexplained" not in render(results)
    assert "Worth it" in shown(results)


def test_few_documents_are_said_beside_the_verdict():
    results = make_results()
    said = "The items are about 16 documents: below 30, p values and intervals are rough. Raise eval.stories (toy)"
    results["data"]["tests"]["mapped_vs_source"]["documents"] = 30
    assert "documents: below" not in render(results) + shown(results)
    results["data"]["tests"]["mapped_vs_source"]["documents"] = 16
    assert f"**{said}" in render(results).split("## Headline")[0]
    assert said in " ".join(shown(results).split())
    assert render(compare_designs({"same": results, "both": results}, "Designs")).split("## ")[0].count(said) == 1
