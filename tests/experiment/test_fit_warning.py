"""A map that does less than its fit reported is said to, wherever the verdict stands."""

from __future__ import annotations

from kvxfer.report.designs import compare_designs
from kvxfer.report.rendering import render
from tests.report.test_report import make_check, make_results, shown


def test_a_map_that_does_less_than_its_fit_reported_is_seen_beside_the_verdict():
    results = make_results(fit_check=make_check(0.56))
    said = (
        "On this text layer 3's keys have R² 0.41; where the map was fitted it was 0.97: the map is damaged, or this "
        "text is far from its calibration."
    )
    report = render(results)
    assert f"**{said}**" in report.split("## Headline")[0]
    assert "| fit: largest drop in R² | 0.560 | 0.15 | **failed** |" in report
    assert said in " ".join(shown(results).split())
    results["data"]["fit_check"]["worst"] |= {"r2": None, "drop": None}
    assert "keys have no finite R²" in render(results)
    results["data"]["fit_check"]["below"] *= 2
    assert "it was 0.97 (2 of 1 target layers and kinds lose more than 0.15): the map" in render(results)
    designs = {"same": make_results(0.5, fit_check=make_check(0.56)), "both": make_results(0.62)}
    assert f"**Design `same`: {said}**" in render(compare_designs(designs, "Designs"))


def test_a_fit_that_was_not_checked_is_no_failure():
    results = make_results(fit_check=None)
    assert "fit: largest drop" not in render(results)
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
