"""What evaluations keep beside a map is what a handoff's admission reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvxfer.handoff.policy import Policy
from kvxfer.handoff.serving import Handoff
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.evidence import read_evidence
from kvxfer.models.machine import machine
from tests.small_runs import TOY_EVAL, little, run, toy_models


def test_admission_reads_what_evaluations_keep(tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    models = toy_models(tiny_folders)
    fitted = run("train", tmp_path, *models)
    run("evaluate", tmp_path, *models, "eval=mapped", *TOY_EVAL)
    run("evaluate", tmp_path, *models, *little("latency", tmp_path, models))
    cache_map = CacheMap.load(fitted)
    found = {each.kind: each for each in read_evidence(fitted, cache_map.hash)}
    assert set(found) == {"items", "latency"}
    items, latency = found["items"], found["latency"]
    assert (items.task, items.domain, items.items, items.documents) == ("mapped", "toy", 15, 5)
    assert items.plan == latency.plan == {"exact_first": 4, "hold_back": 1}
    assert items.metrics["gap_recovered_nats"][1] <= items.metrics["gap_recovered_nats"][0]

    names = {"source": str(tiny_folders[0]), "target": str(tiny_folders[1]), "device": "cpu"}
    handoff = Handoff.from_pretrained(fitted, **names, policy=Policy(min_tokens=0))
    assert handoff.admission.unsupported is None, "identity and norms are those of the run"
    assert handoff.admission.refusal is not None
    assert "15 items were asked" in handoff.admission.refusal.why
    here = machine(handoff.pair.target.device)
    assert latency.machine == {key: here[key] for key in ("device", "name")}
    # Evidence is of one map.
    assert read_evidence(fitted, replace(cache_map, manifest={**cache_map.manifest, "run_id": "x"}).hash) == []
    bold = Policy(min_tokens=0, items=1, beats=False, at_least=-1e9, norms=4.0)
    record = Handoff.from_pretrained(fitted, **names, policy=bold).generate("the train stopped . " * 8, 2).record
    assert record.status == "applied", record.why
