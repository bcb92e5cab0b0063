"""The table of trained maps: seeds together, tests against base and best closed form, and files that stand apart."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.statistics import paired_difference
from kvxfer.experiment.identity import identity
from kvxfer.fitting.trained.specs import MLP, Corrected, Residual, Trained, TrainerSpec
from kvxfer.report.numbers import p_value, points
from kvxfer.report.wording import condition_name
from tests.collected import collected, make_map, write
from tests.small_runs import settings_of
from tools.results_page import page
from tools.results_page.choosing import budget_table
from tools.results_page.data import MapResult, Scores
from tools.results_page.loading import load_results
from tools.results_page.tables import best_table, front, maps_table
from tools.results_page.trained import HEADER, grouped, trained_table

MINUS = "\N{MINUS SIGN}"
BASE, BEST = "a" * 64, "b" * 64


def closed() -> list[dict[str, Any]]:
    """A base, and a better closed form."""
    return [{**make_map(1.6, 0), "map": BASE}, {**make_map(1.5, 1, features="both", share=0.2), "map": BEST}]


def make_trained(
    level: float, number: int, spec: Trained, seed: int = 0, rows: int = 512, **trainer: Any
) -> dict[str, Any]:
    """A trained map on the base of ``closed``, as it is collected."""
    one = make_map(level, number)
    own = {key: value for key, value in asdict(spec).items() if value is not None}
    one["settings"]["solver"] |= {"base": "ridge", **own}
    measured = {"kl": level - 1, "cosine": 0.9, "attention_score": 0.8}
    base = {"kl": 0.5, "cosine": 0.7, "attention_score": 0.6}
    training = {
        "steps": 900 + seed,
        "best_step": 800,
        "seconds": 60.0,
        "map_seconds_ratio": 1.5 + seed,
        "corpus": {"name": "toy", "rows": {"fit": 64, "training": rows}},
    }
    return {
        **one,
        "trainer": identity(TrainerSpec(**trainer, seed=seed)),
        "training": {**training, "held_out": {"base": base, "trained": measured}},
        "base": {"run": "t000", "sha256": BASE},
    }


def trained() -> list[dict[str, Any]]:
    """A residual of two seeds that is better than the best closed form, and an MLP that is worse than the base."""
    residual = Residual("residual", hidden=32)
    return [
        make_trained(1.24, 10, residual),
        make_trained(1.26, 11, residual, seed=1),
        make_trained(1.8, 12, MLP("mlp", attention=0.0, mse=1.0), max_steps=50),
    ]


def cells(lines: list[str]) -> list[dict[str, str]]:
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
    assert rows[0] == list(HEADER)
    # p (Holm) is there thrice; the last one wins.
    return [dict(zip(HEADER, row, strict=True)) for row in rows[2:]]


def test_seeds_are_one_row_that_is_tested_against_base_and_best(tmp_path: Path) -> None:
    pair = load_results(write(tmp_path, collected([*closed(), *trained()])))["toy/trained"]
    lines = trained_table(pair)
    rows = cells(lines)
    known = {"ceiling": rows[0], "source": rows[5], "no_context": rows[6], "raw_copy": rows[7], "floor": rows[8]}
    assert {row["Map"] for row in known.values()} == {f"**{condition_name(name, short=True)}**" for name in known}
    assert [row["Map"] for row in rows[1:5]] == [
        "`solver=residual solver.hidden=32`",
        "`solver=ridge features=both` (best closed form)",
        "`solver=ridge features=same` (base)",
        "`solver=mlp trainer.max_steps=50`",
    ]
    assert "`solver.k=3 penalty=isotropic rank=full`, the trained ones `features=same`" in lines[0]
    residual, best, base, mlp = rows[1:5]
    assert (residual["Seeds"], residual["Nats per token"], residual["Each seed"]) == ("0, 1", "1.250", "1.240, 1.260")
    assert residual["Δ nats to base"] == f"{MINUS}0.350"
    assert residual["Δ nats to best"] == f"{MINUS}0.250"
    assert residual["p (Holm)"].startswith("<")
    # Between source (2.0) and ceiling (1.0), and of the half that the best closed form leaves.
    assert residual["Gap recovered (nats)"] == "75.0 %"
    assert residual["Of what the best closed form leaves"] == "50.0 %"
    assert residual["Δ accuracy to base"].endswith(" pp")
    assert (residual["KL"], residual["Steps"]) == ("0.250", "900")
    assert mlp["Δ nats to base"] == "+0.200"
    assert mlp["Of what the best closed form leaves"] == f"{MINUS}60.0 %"
    assert (base["KL"], best["KL"]) == ("0.500", "–")
    assert {row["Bytes"] for row in rows[1:5]} == {"4 k"}
    assert [row["Time to map"] for row in rows] == ["–", "2.00", "–", "1.00", "1.50", "–", "–", "–", "–"]


def test_files_with_trained_maps_leave_the_pairs_tables_alone(tmp_path: Path) -> None:
    apart = collected([*closed(), *trained()])
    write(tmp_path, collected([make_map(1.7, 20), make_map(1.6, 21, features="both")]))
    (tmp_path / "more").mkdir()
    (write(tmp_path / "more", apart) / "toy.json").rename(tmp_path / "toy_trained.json")
    results = load_results(tmp_path)
    assert set(results) == {"toy", "toy/trained"}
    assert (len(results["toy"].maps), len(results["toy"].trained)) == (2, 0)
    assert (len(results["toy/trained"].maps), len(results["toy/trained"].trained)) == (2, 3)
    text = "<!-- begin table: trained toy -->\n<!-- end table -->\n<!-- begin table: maps toy -->\n<!-- end table -->\n"
    made = page.render(text, results)
    assert made.index("solver.hidden=32") < made.index("begin table: maps")
    assert "\n".join(maps_table(results["toy"])) in made
    with pytest.raises(KvxferError, match=r"no results of pair 'other/trained' .*: write results/other_trained\.json"):
        page.render("<!-- begin table: trained other -->\n<!-- end table -->\n", results)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    without = load_results(write(tmp_path / "a", collected([closed()[1], *trained()])))["toy/trained"]
    with pytest.raises(KvxferError, match="residual was trained on the map t000, which is not among them"):
        trained_table(without)
    alone = load_results(write(tmp_path / "b", collected(trained())))["toy/trained"]
    with pytest.raises(KvxferError, match=r"no trained map beside a closed form: run python evaluate\.py -cd sweeps"):
        trained_table(alone)
    plain = load_results(write(tmp_path / "c", collected(closed())))["toy"]
    with pytest.raises(KvxferError, match="no trained map"):
        trained_table(plain)


def test_seeds_are_together_and_other_settings_apart() -> None:
    residual = Residual("residual")
    asked = [
        make_trained(1.2, 0, residual, seed=1),
        make_trained(1.2, 1, residual),
        make_trained(1.2, 2, residual, lr=0.01),
        make_trained(1.2, 3, Corrected("corrected")),
        {**make_trained(1.2, 4, residual), "base": {"run": "t001", "sha256": BEST}},
        make_trained(1.2, 5, residual, rows=4096),
    ]
    groups = grouped([MapResult(one, Scores.read(one["scores"])) for one in asked])
    seeds = sorted([one.data["trainer"]["seed"] for one in group.maps] for group in groups)
    assert seeds == [[0], [0], [0], [0], [0, 1]]
    said = [group.first.overrides.split() for group in groups]
    assert sum("corpus.rows.training=4096" in each for each in said) == 1


@pytest.mark.parametrize("solver", ["residual", "mlp", "mlp_small", "corrected"])
def test_a_command_names_only_what_its_option_has_otherwise(solver: str, tmp_path: Path) -> None:
    given = ["solver.kl=0.5", "trainer.patience=null", "trainer.seed=2"]
    config = settings_of("train", tmp_path, f"solver={solver}", "features=same", *given).solver_config
    one = make_trained(1.2, 0, Corrected("corrected"))
    one["settings"], one["trainer"] = {key: config[key] for key in one["settings"]}, config["trainer"]
    said = MapResult(one, Scores.read(one["scores"])).overrides.split()
    assert [part for part in said if part.startswith(("solver.", "trainer."))] == ["solver.k=3", *given]
    assert settings_of("train", tmp_path, *said).solver_config == config


def test_accuracy_is_tested_on_the_share_of_seeds_that_are_right(tmp_path: Path) -> None:
    pair = load_results(write(tmp_path, collected([*closed(), *trained()[:2]])))["toy/trained"]
    (group,) = grouped(pair.trained)
    base = next(one for one in pair.maps if one.data["map"] == BASE).scores.correct
    right = [one.scores.correct for one in group.maps]
    assert base is not None
    found = paired_difference(np.mean(right, axis=0), base, pair.baseline.documents)
    row = next(line for line in trained_table(pair) if "solver=residual" in line)
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    place = HEADER.index("Δ accuracy to base")
    assert cells[place : place + 2] == [points(found["difference"]), p_value(found["t_p"])]


def test_trained_maps_that_were_asked_the_same_stand_on_the_front_and_in_budgets(tmp_path: Path) -> None:
    """Of a file of their own; what was asked something else stays out."""
    folder = write(tmp_path, collected(closed()))
    better = make_trained(1.2, 7, Residual(name="residual"))
    (folder / "toy_trained.json").write_text(json.dumps(collected([*closed(), better])))
    pair = load_results(folder)["toy"]
    assert [one.name("solver") for one in front(pair)] == ["residual"]
    assert any("| 10 % | trained |" in line for line in budget_table(pair))
    assert "(1 of them trained)" in best_table(pair)[0]
    assert all(one.name("solver") == "ridge" for one in pair.maps)
    other = make_trained(1.2, 7, Residual(name="residual"))
    other["runs"]["baseline"] = "other"
    elsewhere = [{**one, "runs": {**one["runs"], "baseline": "other"}} for one in closed()]
    (folder / "toy_trained.json").write_text(json.dumps(collected([*elsewhere, other])))
    assert [one.name("solver") for one in front(load_results(folder)["toy"])] == ["ridge", "ridge"]
