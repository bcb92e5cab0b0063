"""The sentences of docs/results.md: what they say of numbers is what the committed results say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.results_page.choosing import BUDGETS
from tools.results_page.data import MapResult, PairResults
from tools.results_page.loading import load_results

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
HEALED, TRAINED = "smollm2_healed", "smollm2_healed/trained"

Results = dict[str, PairResults]


@pytest.fixture(scope="module")
def results() -> Results:
    return load_results(ROOT / "results")


def found(pair: PairResults, solver: str, features: str, k: int = 4, rank: str = "full", **more: object) -> MapResult:
    """The one map of these settings, λ chosen by R² on the usual text."""
    maps = [
        one
        for one in (*pair.calibrated_alike, *pair.trained)
        if (one.name("solver"), one.name("features"), one.name("rank")) == (solver, features, rank)
        and one.name("penalty") == "isotropic"
        and one.dial("solver", "k") == k
        and (one.trained or (one.dial("penalty", "lam") == "auto" and one.dial("solver", "criterion") == "r2"))
        and all(one.data["trainer"][key] == value for key, value in more.items())
    ]
    assert maps, (solver, features, k)
    return maps[0]


def above(pair: PairResults, one: MapResult) -> float:
    """Nats per token above the ceiling."""
    known = pair.baseline
    return known.per_token(one.scores) - known.per_token(known.conditions["ceiling"])


LEVERS = [
    ("`features=same`, k = 1", "ridge", "same", 1),
    ("`features=same`, k = 2", "ridge", "same", 2),
    ("the same, `solver=corrected`", "corrected", "same", 2),
    ("`features=same`, k = 4 (the paper's form)", "ridge", "same", 4),
    ("`features=same solver=weighted`", "weighted", "same", 4),
    ("`features=both solver=weighted`", "weighted", "both", 4),
    ("`features=both solver=corrected`", "corrected", "both", 4),
    ("`features=previous solver=weighted`", "weighted", "previous", 4),
]


@pytest.mark.parametrize(("said", "solver", "features", "k"), LEVERS, ids=[lever[0] for lever in LEVERS])
def test_the_levers_are_worth_what_the_page_says(
    said: str, solver: str, features: str, k: int, results: Results
) -> None:
    pair = results[TRAINED if solver == "corrected" else HEALED]
    one = found(pair, solver, features, k)
    gap = pair.baseline.gap(one.scores)
    assert f"| {said} | {above(pair, one):.3f} | {gap:.1%} | {one.handoff:.1%} |".replace("%", " %") in TEXT


def nats(pair: PairResults, condition: str) -> float:
    return pair.baseline.per_token(pair.baseline.conditions[condition])


def gained(results: Results, features: str, k: int) -> float:
    """Nats per token that training takes off what the base leaves."""
    pair = results[TRAINED]
    base, trained = (found(pair, solver, features, k) for solver in ("ridge", "corrected"))
    return above(pair, base) - above(pair, trained)


FACTS: dict[str, Callable[[Results], tuple[float, ...]]] = {
    "where the healed source is {:.3f} above it and no context {:.3f}": lambda r: (
        nats(r[HEALED], "source") - nats(r[HEALED], "ceiling"),
        nats(r[HEALED], "no_context") - nats(r[HEALED], "ceiling"),
    ),
    "Plain ridge in the paper's form recovers {:.1f} % of the gap, and {:.1f} % of what the context is worth, for "
    "{:.1f} %": (
        lambda r: tuple(
            100 * (value or 0.0)
            for one in [found(r[HEALED], "ridge", "same")]
            for value in (r[HEALED].baseline.gap(one.scores), r[HEALED].baseline.context(one.scores), one.handoff)
        )
    ),
    "by {:.3f} and {:.3f} nats of the {:.3f} that `same` leaves to the ceiling": lambda r: (
        above(r[HEALED], found(r[HEALED], "ridge", "same")) - above(r[HEALED], found(r[HEALED], "ridge", "both")),
        above(r[HEALED], found(r[HEALED], "ridge", "same")) - above(r[HEALED], found(r[HEALED], "ridge", "previous")),
        above(r[HEALED], found(r[HEALED], "ridge", "same")),
    ),
    "at the same cost it takes {:.1f} % of what its base leaves ({:.1f} % with `same` and k = 2)": lambda r: (
        100 * gained(r, "both", 4) / above(r[TRAINED], found(r[TRAINED], "ridge", "both")),
        100 * gained(r, "same", 2) / above(r[TRAINED], found(r[TRAINED], "ridge", "same", 2)),
    ),
    "at a tenth of the prefill {:.1f} % of the gap is recovered, at a quarter {:.1f} %.": lambda r: tuple(
        100 * max(r[HEALED].baseline.gap(one.scores) or 0.0 for one in r[HEALED].rivals if one.handoff <= budget)
        for budget in BUDGETS
    ),
    "`corrected` is the largest lever there is: {:.3f} nats below its base with `both`, {:.3f} with `same`": lambda r: (
        gained(r, "both", 4),
        gained(r, "same", 2),
    ),
}


@pytest.mark.parametrize("said", FACTS)
def test_a_sentence_says_what_was_measured(said: str, results: Results) -> None:
    assert said.format(*FACTS[said](results)) in TEXT


def test_trained_maps_beat_every_closed_form_where_the_page_says_so(results: Results) -> None:
    best = min(above(results[HEALED], one) for one in results[HEALED].maps)
    for features, k in (("both", 4), ("same", 2)):
        assert above(results[TRAINED], found(results[TRAINED], "corrected", features, k)) < best
    assert "Both beat every closed form at any cost" in TEXT


def test_no_criterion_is_far_from_the_best_lam_where_the_page_says_so(results: Results) -> None:
    pair, sizes = results[HEALED], 0
    for tokens in {one.data["calibration"]["kept_tokens"] for one in pair.maps}:
        maps = [
            one
            for one in pair.maps
            if one.key == ("ridge", "isotropic", "full", "both")
            and one.dial("solver", "k") == 4
            and one.data["calibration"]["kept_tokens"] == tokens
        ]
        fixed = {one.dial("penalty", "lam"): above(pair, one) for one in maps if one.dial("penalty", "lam") != "auto"}
        if not fixed:
            continue
        sizes += 1
        flat = [value for lam, value in fixed.items() if lam <= 1e-2]
        assert round(max(flat) - min(flat), 3) <= 0.004
        chosen = [above(pair, one) for one in maps if one.dial("penalty", "lam") == "auto"]
        assert round(max(chosen) - min(fixed.values()), 3) <= 0.002
    assert sizes == 2


def test_what_last_and_first_tokens_are_worth_is_what_was_measured() -> None:
    """Under other plans: the maps of files of their own, in nats per token and as a share of the gap."""
    for file, said in (
        ("tail", "`corrected` recovers {gap:.1%} for {cost:.1%}."),
        ("plan", "`plan=all` with `corpus.skip_first=0`: {nats:.3f} nats"),
    ):
        data = json.loads((ROOT / "results" / f"smollm2_healed_{file}.json").read_text())
        (one,), (baseline,) = data["maps"], data["baselines"].values()
        tokens = sum(baseline["items"]["tokens"])
        of = {name: sum(scores["nats"]) / tokens for name, scores in baseline["conditions"].items()}
        nats = sum(one["scores"]["nats"]) / tokens
        gap = (nats - of["source"]) / (of["ceiling"] - of["source"])
        cost = one["cost"]["handoff_share_of_prefill_flops"]
        assert said.format(gap=gap, cost=cost, nats=nats).replace("%", " %") in TEXT
