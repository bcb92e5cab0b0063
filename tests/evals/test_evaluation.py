"""Evaluations of a small map: what they record, what they refuse, and that they say the same again."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import HANDED, OWN, Controls, given_conditions, mapped_conditions, own_conditions
from kvxfer.evals.scoring import score
from kvxfer.experiment.stages.evaluate import Scene, SharedRuns, subject_of
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.random_weights import random_twin
from kvxfer.models.pair import load_pair
from kvxfer.report.rendering import terminal
from kvxfer.report.schema import validate
from kvxfer.toy.recipe import RECIPES, build_model, save
from tests.small_runs import TOY_EVAL, results_of, run, settings_of, toy_models

CONDITIONS = {*HANDED, *OWN}


@pytest.fixture(scope="module")
def overrides(tiny_folders: tuple[Path, Path]) -> list[str]:
    return [*toy_models(tiny_folders), *TOY_EVAL]


@pytest.fixture(scope="module")
def done(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The outputs folder of one evaluation, and its results."""
    outputs = tmp_path_factory.mktemp("outputs")
    return outputs, results_of(run("evaluate", outputs, *overrides))


@pytest.fixture
def map_copy(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the map that a test may harm."""
    outputs, results = done
    return Path(shutil.copytree(outputs / "train" / results["map"]["run_id"], tmp_path / "map"))


def scores(results: dict[str, Any], leave_out: tuple[str, ...] = ()) -> torch.Tensor:
    """All nats of all items, in the items' order."""
    items = sorted(results["data"]["items"], key=lambda item: item["id"])
    return torch.tensor([[i["nats"][c] for c in sorted(CONDITIONS) if c not in leave_out] for i in items])


def timeless(value: Any) -> Any:
    """Results without what differs from run to run."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in ("started", "finished", "seconds")}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def test_all_conditions_are_scored_on_identical_items(done):
    _, results = done
    assert len(results["data"]["items"]) == 15
    for item in results["data"]["items"]:
        assert set(item["nats"]) == set(item["correct"]) == set(item["generated"]) == CONDITIONS
    assert {row["n"] for row in results["data"]["conditions"].values()} == {15}
    assert {row["n"] for row in results["data"]["tables"]["story_only"]["conditions"].values()} == {15}
    assert len({item["document"] for item in results["data"]["items"]}) == 5


def test_identity_is_the_ceiling(done):
    _, results = done
    for conditions in (results["data"]["conditions"], results["data"]["tables"]["story_only"]["conditions"]):
        assert conditions["identity"]["accuracy"] == conditions["ceiling"]["accuracy"]
        assert conditions["identity"]["nats"] == pytest.approx(conditions["ceiling"]["nats"], abs=1e-4)
    for item in results["data"]["items"]:
        assert item["nats"]["identity"] == pytest.approx(item["nats"]["ceiling"], abs=1e-4)
    assert all(gate["passed"] for gate in results["data"]["gates"])


def test_the_second_table_hands_over_the_story_alone(done):
    _, results = done
    first, second = results["data"]["conditions"], results["data"]["tables"]["story_only"]["conditions"]
    for name in OWN:
        assert first[name]["nats"] == second[name]["nats"]
    assert first["mapped"]["nats"] != second["mapped"]["nats"]


def test_shared_baselines_change_no_number(done, overrides):
    """Every condition of every item, scored on its own as if there were no baselines to take over."""
    outputs, results = done
    settings = settings_of("evaluate", outputs, *overrides)
    pair = load_pair(settings.pair)
    cache_map = CacheMap.load(directory := outputs / "train" / results["map"]["run_id"])
    subject = subject_of(Scene(settings, settings.eval, cache_map, directory, None), pair, SharedRuns(settings))
    asked, twin = settings.eval.ask(subject), random_twin(cache_map, pair.target.geometry.kv_heads)
    random = replace(subject.transfer, mapper=Mapper(twin, dtype=subject.mapper.dtype, pair=pair))
    items = {item["id"]: item for item in results["data"]["items"]}
    with torch.inference_mode():
        for batch in asked.batches:
            prepared = {
                **own_conditions(pair, batch.prompt, batch.context),
                **given_conditions(pair, settings.plan, batch.prompt),
                **mapped_conditions(subject.transfer, batch.prompt, Controls(batch.donors, random)),
            }
            for name, one in prepared.items():
                for item, scored in zip(batch.items, score(one, batch.items, asked.stop), strict=True):
                    record = items[item.id]
                    assert record["nats"][name] == scored.nats
                    assert (record["correct"][name], record["generated"][name]) == (scored.correct, scored.generated)


def test_a_second_map_costs_only_its_own_conditions(done, overrides, monkeypatch):
    outputs, results = done

    def never(*_: Any) -> None:
        raise AssertionError("baselines were scored again")

    for name in ("own_conditions", "given_conditions", "run_gates"):
        monkeypatch.setattr(f"kvxfer.evals.questions.{name}", never)
    other = results_of(run("evaluate", outputs, *overrides, "penalty.lam=1.0"))
    assert other["map"]["sha256"] != results["map"]["sha256"]
    assert other["data"]["gates"] == results["data"]["gates"]
    for item, before in zip(other["data"]["items"], results["data"]["items"], strict=True):
        assert {c: item["nats"][c] for c in OWN} == {c: before["nats"][c] for c in OWN}
    assert other["provenance"]["inputs"]["baseline"] == results["provenance"]["inputs"]["baseline"]
    assert len(list((outputs / "baseline").glob("[!.]*"))) == 1


def test_the_mapped_cache_alone_scores_the_same(done, overrides):
    outputs, results = done
    alone = results_of(run("evaluate", outputs, *overrides, "eval=mapped"))
    validate(alone)
    assert alone["data"]["tables"] == {}
    for item, full in zip(alone["data"]["items"], results["data"]["items"], strict=True):
        assert set(item["nats"]) == CONDITIONS - {"mapped_all", "wrong_donor", "random_map"}
        assert item["nats"] == {name: full["nats"][name] for name in item["nats"]}
        assert item["generated"] == {}
    assert terminal(alone).row_count == len(CONDITIONS) - 3


def test_options_of_other_names_share_their_baselines(overrides, tmp_path):
    for named in ([], ["plan=all", "plan.exact_first=4"], ["eval.name=mine"]):
        run("evaluate", tmp_path, *overrides, "eval=mapped", *named)
    assert len(list((tmp_path / "evaluate").glob("[!.]*"))) == 3
    assert len(list((tmp_path / "baseline").glob("[!.]*"))) == 1


def test_unknown_conditions_are_refused(overrides, tmp_path):
    with pytest.raises(KvxferError, match=r"eval\.conditions='some' is neither 'all' nor 'mapped'"):
        run("evaluate", tmp_path, *overrides, "eval.conditions=some")


def test_evidence_lies_beside_the_map_and_names_it(done):
    outputs, results = done
    directory = outputs / "train" / results["map"]["run_id"]
    evidence = json.loads((directory / "evidence" / f"{results['run_id']}.json").read_text())
    assert evidence["map"] == CacheMap.load(directory).hash == results["map"]["sha256"]
    assert evidence["conditions"] == results["data"]["conditions"]
    assert evidence["metrics"]["mapped/nats"] == results["data"]["conditions"]["mapped"]["nats"]
    assert "items" not in evidence


def test_a_map_that_can_only_be_read_is_evaluated_and_its_evidence_kept(done, overrides, map_copy, caplog):
    outputs, results = done
    shutil.rmtree(map_copy / "evidence")
    (map_copy / "evidence").write_text("in the way of a folder, for root too")
    with caplog.at_level("WARNING", "kvxfer"):
        directory = run("evaluate", outputs, *overrides, f"map={map_copy}")
    kept = directory / "evidence.json"
    assert any(said.endswith(f"what was found of it lies in {kept}") for said in caplog.messages)
    assert json.loads(kept.read_text())["conditions"] == results["data"]["conditions"]


def test_the_same_evaluation_again_says_the_same(done, overrides, tmp_path):
    outputs, results = done
    directory = outputs / "train" / results["map"]["run_id"]
    again = results_of(run("evaluate", tmp_path, *overrides, f"map={directory}"))
    assert again["run_id"] == results["run_id"]
    assert timeless(again) == timeless(results)


def test_a_map_of_all_source_layers_says_how_many_there_are(done, overrides):
    """Not the k that was given beside, which is not read."""
    options = ["eval=mapped", "solver.method=all", "solver.k=1"]
    assert results_of(run("evaluate", done[0], *overrides, *options))["map"]["k"] == 2


def test_a_map_named_by_its_run_is_found(done, overrides):
    outputs, results = done
    found = run("evaluate", outputs, *overrides, f"map={results['map']['run_id']}")
    assert found == outputs / "evaluate" / results["run_id"]


def test_another_seed_asks_about_other_stories(done, overrides):
    outputs, results = done
    other = results_of(run("evaluate", outputs, *overrides, "eval.seed=1"))
    assert not {i["document"] for i in other["data"]["items"]} & {i["document"] for i in results["data"]["items"]}


def test_the_batch_size_does_not_change_the_scores(done, overrides):
    """But for the wrong donor, who is a neighbour in the batch."""
    outputs, results = done
    small = results_of(run("evaluate", outputs, *overrides, "eval.batch_size=2"))
    assert torch.allclose(scores(small), scores(results), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("side", "field"), [("source", "pair.source.sha256"), ("target", "pair.target.sha256")])
def test_a_map_of_other_weights_is_refused(side, field, map_copy, overrides, tmp_path):
    changed = replace(RECIPES[side], width=64, feed_forward=64, heads=4 if side == "source" else 6)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        save(build_model(changed, 2 if side == "source" else 3), tmp_path / "other")
    with pytest.raises(KvxferError, match=re.escape(f"the map was fitted with {field} = ")):
        run("evaluate", tmp_path / "out", *overrides, f"map={map_copy}", f"pair.{side}.model={tmp_path / 'other'}")
    assert not (map_copy / "evidence" / "anything").exists()
    assert [p for p in (tmp_path / "out" / "evaluate").iterdir() if not p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("override", "field"), [("pair.dtype=bfloat16", "pair.dtype"), ("pair.reverse=true", "pair.direction")]
)
def test_a_map_of_another_dtype_or_direction_is_refused(override, field, map_copy, overrides, tmp_path):
    with pytest.raises(KvxferError, match=re.escape(f"the map was fitted with {field} = ")):
        run("evaluate", tmp_path / "out", *overrides, f"map={map_copy}", override)


def test_an_altered_map_is_refused(map_copy, overrides, tmp_path):
    data = bytearray((map_copy / "map.safetensors").read_bytes())
    data[-1] ^= 1
    (map_copy / "map.safetensors").write_bytes(data)
    with pytest.raises(KvxferError, match=r"map\.safetensors: SHA-256 .* the map is damaged or was altered"):
        run("evaluate", tmp_path / "out", *overrides, f"map={map_copy}")


@pytest.mark.parametrize("missing", ["manifest.json", "map.safetensors"])
def test_half_a_map_is_refused(missing, map_copy, overrides, tmp_path):
    (map_copy / missing).unlink()
    with pytest.raises(KvxferError, match="holds no map"):
        run("evaluate", tmp_path / "out", *overrides, f"map={map_copy}")


def test_a_gate_that_fails_records_nothing(overrides, map_copy, monkeypatch, tmp_path):
    monkeypatch.setattr("kvxfer.evals.gates.CACHE_MATTERS", 1e9)
    with pytest.raises(KvxferError, match="gate 'zeroed cache' failed"):
        run("evaluate", tmp_path / "out", *overrides, f"map={map_copy}")
    assert [p for p in (tmp_path / "out" / "evaluate").iterdir() if not p.name.startswith(".")] == []
