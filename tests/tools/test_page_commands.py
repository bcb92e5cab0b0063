"""The commands that docs/results.md names: they ask for what the committed results hold."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvxfer.experiment.config import compose, plain
from tests.collected import collected, make_map, write
from tools.results_page.data import MapResult, PairResults
from tools.results_page.findings import Verdict, made_by
from tools.results_page.loading import load_results
from tools.results_page.tables import best_table

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"


def named(cell: str) -> list[str]:
    """The overrides of the commands of a cell, without the grid's name."""
    commands = re.findall(r"`python evaluate\.py ([^`]*)`", cell)
    return [re.sub(r"-cd sweeps -cn \w+ ", "", command) for command in commands]


@pytest.fixture(scope="module")
def committed() -> dict[str, PairResults]:
    if not list(RESULTS.glob("*.json")):
        pytest.skip("no results are committed")
    return load_results(RESULTS)


def asked(pair: PairResults) -> dict[str, Any]:
    """What the items of a pair's baseline were asked."""
    for file in RESULTS.glob("*.json"):
        config = json.loads(file.read_text())["baselines"].get(pair.baseline.id, {}).get("config")
        if config is not None:
            return config["eval"]
    raise AssertionError(pair.baseline.id)


@pytest.mark.parametrize("name", ["toy", "smollm2_healed"])
def test_the_command_of_a_map_asks_for_it(name: str, committed: dict[str, PairResults]) -> None:
    pair = committed[name]
    cells = [line.rsplit("|", 2)[1] for line in best_table(pair)[-3:-1]]
    assert len(cells) == 2
    for command in (command for cell in cells for command in named(cell)):
        config = plain(compose("evaluate", command.split()))
        one = next(m for m in pair.rivals if pair.command(m) == f"python evaluate.py {command}")
        for key, value in asked(pair).items():
            # What decides nothing of such items is None.
            if value is not None and key in ("choices", "questions", "score_rest", "stories", "seed"):
                assert config["eval"][key] == value, key
        assert wanted(one).items() <= said(config).items()


def wanted(one: MapResult) -> dict[str, Any]:
    calibration = one.data["calibration"]
    return {
        **{group: one.name(group) for group in ("solver", "penalty", "rank", "features")},
        "k": one.dial("solver", "k"),
        "rows": calibration["corpus"]["rows"]["fit"],
        "keep_layers": calibration["settings"].get("keep_layers"),
    }


def said(config: dict[str, Any]) -> dict[str, Any]:
    return {
        **{group: config[group]["name"] for group in ("solver", "penalty", "rank", "features")},
        "k": config["solver"]["k"],
        "rows": config["corpus"]["rows"]["fit"],
        "keep_layers": config["calibration"]["keep_layers"],
    }


def test_a_finding_names_the_grid_with_the_settings_of_its_maps(tmp_path: Path) -> None:
    line = [make_map(1.5, n, penalty="attention", lam=1e-3, alpha=n / 2, features="both", k=2) for n in range(3)]
    data = collected([*line, make_map(1.6, 7)])
    data["baselines"]["b"]["config"]["eval"] = {"choices": 4, "questions": 1, "score_rest": True}
    pair = load_results(write(tmp_path, data))["toy"]
    swept = [one for one in pair.maps if one.name("penalty") == "attention"]
    begins = "`python evaluate.py -cd sweeps -cn alpha pair=toy eval=mapped_choices"
    found = made_by(pair, Verdict("confirmed", "", "alpha", swept))
    assert found == f"{begins} solver=ridge solver.k=2 rank=full features=both`"
    assert made_by(pair, Verdict("not measured", "", "alpha")) == f"{begins}`"
    plain_ridge = next(one for one in pair.maps if one not in swept)
    both = made_by(pair, Verdict("confirmed", "", "alpha", swept, plain_ridge))
    assert both.endswith(
        "and `python evaluate.py pair=toy eval=mapped_choices solver=ridge solver.k=3 penalty=isotropic rank=full "
        "features=same`"
    )
    assert "[commands](#the-commands)" in made_by(pair, Verdict("confirmed", "", None))


def test_the_command_of_a_changed_design_changes_it(tmp_path: Path) -> None:
    changed = [make_map(1.5, 0, features="both"), make_map(1.4, 1, features="both previous=2 target_layer0=true")]
    pair = load_results(write(tmp_path, collected(changed)))["toy"]
    assert len(pair.rows) == 2
    command = pair.command(max(pair.maps, key=lambda one: len(one.name("features"))))
    assert command.endswith("rank=full features=both features.previous=2 features.target_layer0=true")
    compose("evaluate", command.removeprefix("python evaluate.py ").split())


def test_the_command_asks_for_the_items_that_were_asked(tmp_path: Path) -> None:
    data = collected([make_map(1.5, 0)])
    data["baselines"]["b"]["config"]["eval"] = {"stories": 60, "questions": 5, "seed": 3, "prefix": None}
    assert load_results(write(tmp_path, data))["toy"].asked == "pair=toy eval=mapped eval.stories=60 eval.seed=3"
