"""A model and itself without some layers go through all three commands; the report says what they must show."""

from __future__ import annotations

import json
import random

import pytest

from kvxfer.errors import KvxferError
from kvxfer.experiment.config import compose, to_settings
from kvxfer.experiment.stages.calibrate import calibrate
from kvxfer.experiment.stages.evaluate import evaluate
from kvxfer.experiment.stages.train import train
from kvxfer.report.rendering import render
from kvxfer.report.verdict import ancestry_sentence
from tests.doubles import TEXT, save, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint of five layers as source (without two of them) and target, and a small folder of text."""
    home = tmp_path_factory.mktemp("pruned")
    lm = tiny_model("qwen3-default", num_hidden_layers=5, tie_word_embeddings=True)
    folder = save(lm, tiny_tokenizer(), home / "model")
    draw, words = random.Random(0), " ".join(TEXT).split()
    (home / "text").mkdir()
    for index in range(60):
        (home / "text" / f"{index}.txt").write_text(" ".join(draw.choices(words, k=60)))
    return [
        "pair=custom",
        f"pair.source.model={folder}",
        f"pair.target.model={folder}",
        "pair.drop_layers=[1,3]",
        "pair.dtype=float32",
        "pair.device=cpu",
        "pair.k=2",
        "corpus=text",
        f"corpus.path={home / 'text'}",
        "corpus.length=32",
        "corpus.rows={fit: 24, validation: 4, held_out: 4, evaluation: 12}",
        "logger=disabled",
        f"paths.outputs={home / 'outputs'}",
    ]


def settings_of(stage: str, overrides: list[str]) -> object:
    return to_settings(stage, compose(stage, overrides))


def test_all_three_commands(overrides: list[str]) -> None:
    moments = calibrate(settings_of("calibrate", overrides))
    described = json.loads((moments / "calibration.json").read_text())["pair"]
    assert described["source"]["drop_layers"] == [1, 3]
    assert described["source"]["geometry"]["layers"] == 3
    fitted = train(settings_of("train", overrides))
    assert json.loads((fitted / "manifest.json").read_text())["pair"]["source"]["drop_layers"] == [1, 3]
    report, _, data = evaluate(settings_of("evaluate", overrides), show=False)
    results = json.loads(data.read_text())
    data = results["data"]
    assert data["ancestry"] == {"layers": [0, 0, 1, 1, 2], "dropped": [1, 3], "identical": 1, "healed": False}
    assert set(data["items"][0]["nats"]) >= {"mapped", "raw_copy", "ancestor_copy"}
    assert data["conditions"]["ancestor_copy"]["nats"] != data["conditions"]["raw_copy"]["nats"]
    test = data["tests"]["mapped_vs_ancestor_copy"]
    wanted = data["conditions"]["mapped"]["nats"] - data["conditions"]["ancestor_copy"]["nats"]
    assert test["nll_difference"] == pytest.approx(wanted, abs=1e-6)
    text = report.read_text()
    assert text == render(results)
    for words in (
        "The source is the target without layers 1, 3; 1 of 5 target layers have identical caches",
        "No claim stands on this pair unless the mapped cache beats a copy of each layer's ancestor",
        "| Copy of each layer's ancestor |",
        "| Mapped cache vs Ancestors' copy |",
    ):
        assert words in text
    whole = [*overrides, "pair.drop_layers=[]"]
    with pytest.raises(KvxferError, match=r"^the map was fitted with pair.source.drop_layers = \[1, 3\] but this"):
        evaluate(settings_of("evaluate", [*whole, f"map={fitted}"]), show=False)


def test_dropped_layers_give_other_runs(overrides: list[str]) -> None:
    from kvxfer.experiment.stages.calibrate import calibration_id

    drops = ("[1,3]", "[3,1]", "[1]", "[]")
    ids = [calibration_id(settings_of("calibrate", [*overrides, f"pair.drop_layers={drop}"])) for drop in drops]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    named = [*overrides[:3], *overrides[4:], "pair.source.drop_layers=[1,3]"]
    assert calibration_id(settings_of("calibrate", named)) == ids[0]
    other = [*overrides, "pair.drop_layers=[]", "pair.target.drop_layers=[1,3]"]
    assert calibration_id(settings_of("calibrate", other)) not in ids


@pytest.mark.parametrize(
    ("difference", "interval", "p", "said"),
    [
        (-0.2, [-0.3, -0.1], 0.001, "ancestor: it does (\N{MINUS SIGN}0.200 nats per token"),
        (-0.2, [-0.5, 0.1], 0.2, "ancestor: that is not shown, so none does ("),
        (0.2, [0.1, 0.3], 0.001, "ancestor: that is not shown, so none does ("),
    ],
)
def test_what_the_control_decides(difference: float, interval: list[float], p: float, said: str) -> None:
    test = {"accuracy_p": None, "nll_p": p, "nll_difference": difference, "nll_ci": interval}
    results = {"tests": {"mapped_vs_ancestor_copy": test}}
    assert ancestry_sentence(results) is None
    results["ancestry"] = {"layers": [0, 0, 1], "dropped": [1], "identical": 1, "healed": False}
    assert said in ancestry_sentence(results)
    assert "1 of 3 target layers have identical caches" in ancestry_sentence(results)
    results["ancestry"] |= {"identical": 0, "healed": True}
    assert said in ancestry_sentence(results)
    assert "without layers 1, and healed by distillation." in ancestry_sentence(results)
