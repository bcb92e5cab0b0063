"""Evaluations collected for committing: complete, the same again, and free of places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.experiment.stages.train import train_id
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models
from tools.collect import Wanted, collect, dumps, main
from tools.results_page.data import MapResult, Scores

LAMS = ("0.001", "1.0")


@pytest.fixture(scope="module")
def outputs(tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two maps of one pair, each evaluated by its mapped cache alone."""
    folder = tmp_path_factory.mktemp("outputs")
    for lam in LAMS:
        run("evaluate", folder, *toy_models(tiny_folders), "eval=mapped", *TOY_EVAL, f"penalty.lam={lam}")
    return folder


def test_a_collection_has_what_the_runs_have(outputs: Path) -> None:
    found = collect(outputs, Wanted())
    assert [one["settings"]["penalty"]["lam"] for one in found["maps"]] == [0.001, 1.0]
    (baseline,) = found["baselines"].values()
    for one in found["maps"]:
        results = results_of(outputs / "evaluate" / one["runs"]["evaluate"])
        items = results["data"]["items"]
        assert one["scores"]["nats"] == [round(item["nats"]["mapped"], 5) for item in items]
        assert one["scores"]["correct"] == "".join("01"[item["correct"]["mapped"]] for item in items)
        assert one["cost"]["parameters"] == results["map"]["parameters"]
        shares = [results["map"][key] for key in ("share_of_prefill_flops", "handoff_share_of_prefill_flops")]
        assert [one["cost"][key] for key in ("share_of_prefill_flops", "handoff_share_of_prefill_flops")] == shares
        assert baseline["items"]["id"] == [item["id"] for item in items]
        assert baseline["conditions"]["source"]["nats"] == [
            round(i["nats"]["source"], 5) for i in results["data"]["items"]
        ]
        diagnostics = json.loads((outputs / "train" / one["runs"]["train"] / "diagnostics.json").read_text())["layers"]
        keys = [layer["r2_held_out"] for layer in diagnostics if layer["kind"] == "keys"]
        assert one["r2_held_out"]["keys"] == pytest.approx(sum(keys) / len(keys), abs=1e-5)
        assert one["calibration"]["kept_tokens"] > 0


def test_the_command_of_a_map_asks_for_that_map(outputs: Path, tiny_folders: tuple[Path, Path]) -> None:
    for one in collect(outputs, Wanted())["maps"]:
        asked = MapResult(one, Scores.read(one["scores"])).overrides.split()
        settings = settings_of("evaluate", outputs, *toy_models(tiny_folders), *asked)
        assert train_id(settings) == one["runs"]["train"]


def test_collecting_again_writes_the_same_and_no_place(outputs: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "results" / "toy.json"
    main([str(outputs), str(file), "--pair", "toy", "--eval", "mapped"])
    assert capsys.readouterr().out.splitlines()[-1] == str(file)
    first = file.read_text()
    main([str(outputs), str(file)])
    assert file.read_text() == first
    assert str(outputs) not in first
    assert str(Path.home()) + "/" not in first
    assert json.loads(first) == collect(outputs, Wanted())
    assert first.count("\n") < 120


def test_a_group_is_a_sweeps_directory_id_or_name(outputs: Path) -> None:
    one = collect(outputs, Wanted())["maps"][1]["runs"]["evaluate"]
    home = outputs / "sweeps" / "ab12cd34"
    home.mkdir(parents=True, exist_ok=True)
    (home / "summary.csv").write_text(f"job,run\n0,{outputs / 'evaluate' / one}\n1,\n")
    for group in (str(home), "ab12cd34", "maps-ab12cd34"):
        assert [each["runs"]["evaluate"] for each in collect(outputs, Wanted(group=group))["maps"]] == [one]
    with pytest.raises(KvxferError, match=r"--group none-such: no summary\.csv"):
        collect(outputs, Wanted(group="none-such"))


@pytest.mark.parametrize("wanted", [Wanted(pair="other"), Wanted(eval="standard")])
def test_nothing_wanted_is_told_in_one_line(wanted: Wanted, outputs: Path) -> None:
    with pytest.raises(KvxferError, match="no finished evaluation"):
        collect(outputs, wanted)


def test_a_map_that_is_not_there_is_named(outputs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outputs, tmp_path / "out"))
    train = collect(copy, Wanted())["maps"][0]["runs"]["train"]
    shutil.rmtree(copy / "train" / train)
    with pytest.raises(SystemExit, match=rf"error: the map of evaluation \w+ is not in .*{train}"):
        main([str(copy), str(tmp_path / "toy.json")])
    assert not (tmp_path / "toy.json").exists()


def test_results_in_another_form_are_of_an_earlier_version(outputs: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(outputs, tmp_path / "out"))
    file = next((copy / "evaluate").glob("[!.]*/results.json"))
    results = json.loads(file.read_text())
    file.write_text(json.dumps({**results, "schema": 2}))
    with pytest.raises(KvxferError, match="is of an earlier version: evaluate it again with force=true"):
        collect(copy, Wanted())


def test_every_map_is_several_short_lines_and_its_scores_one() -> None:
    text = dumps({"maps": [{"scores": {"nats": [1.0, 2.0], "correct": "01"}, "commit": "a"}]})
    assert '    "nats": [1.0, 2.0]' in text.splitlines()
