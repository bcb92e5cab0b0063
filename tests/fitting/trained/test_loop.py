"""A training from start to end: what it leaves behind, and what stops it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.fitting.trained.activations import ActivationStore
from kvxfer.fitting.trained.module import culprit
from kvxfer.fitting.trained.networks import Network
from kvxfer.fitting.trained.objective import Losses
from kvxfer.fitting.trained.specs import MLP, Corrected, Residual
from kvxfer.maps.apply import Mapper
from kvxfer.maps.content_errors import MappedErrors
from kvxfer.models.kv import KV
from kvxfer.models.pair import Pair
from tests.exact_maps import mapped_content
from tests.trainings import EXACT, SPEC, Told, base_map, fit, make_rows, training_rows

TERMS = ("attention", "kl", "mse")


def test_what_a_training_leaves_behind(
    tiny_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    out = Told()
    spec = replace(SPEC, attention=0.1, mse=0.1)
    found = fit(tiny_pair, tmp_path, spec, out, max_steps=5)
    record = found.record
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["steps"], record["stopped"], record["lr"]) == (5, "max_steps", 1e-2)
    assert [look["step"] for look in record["history"]] == [2, 4, 5]
    best = min(record["history"], key=lambda look: look["val_kl"])
    assert record["best_step"] == best["step"]
    assert record["trained_parameters"] == 6 * (128 * 64 + 64)
    steps = [values for values in out.numbers if "train/loss" in values]
    assert [values["trainer/step"] for values in steps] == [1, 2, 3, 4, 5]
    assert [values["train/lr"] for values in steps[:3]] == [0.005, 0.01, 0.01]
    for values in steps:
        total = sum(getattr(spec, term) * values[f"train/{term}"] for term in TERMS)
        assert values["train/loss"] == pytest.approx(total, rel=1e-5)
    looks = [values for values in out.numbers if "validation/kl" in values]
    assert [values["validation/kl"] for values in looks] == [look["val_kl"] for look in record["history"]]
    assert {row["layer"] for row in out.tables["training_layers"]} == {0, 1, 2}
    assert len(out.tables["training_layers"]) == 3 * 3
    assert len(out.tables["training_outputs"]) == 3 * 6
    assert "numbers are trained" in caplog.messages[1]
    assert {entry.name for entry in caplog.records} == {"kvxfer"}
    assert capfd.readouterr() == ("", "")
    assert any("for 2 steps" in message and "about" in message for message in caplog.messages)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    state = torch.load(tmp_path / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    assert all(name.startswith("network.parts.") for name in state)


def test_no_more_is_kept_than_the_cache_holds(tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the held-out rows are read either, when training and validation rows are done with."""
    stores: list[ActivationStore] = []
    make, read, most = ActivationStore.__init__, ActivationStore.batch, 0

    def made(self: ActivationStore, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        stores.append(self)

    def batch(self: ActivationStore, rows: Sequence[int]) -> Any:
        nonlocal most
        found = read(self, rows)
        most = max(most, sum(store.used for store in stores))
        return found

    monkeypatch.setattr(ActivationStore, "__init__", made)
    monkeypatch.setattr(ActivationStore, "batch", batch)
    fit(tiny_pair, tmp_path, cache_gib=8e-4, max_steps=2)
    assert len(stores) == 3
    assert 0.5 * 8e-4 * 2**30 < most <= 8e-4 * 2**30


def test_held_out_numbers_are_those_of_the_map_as_it_is_served(tiny_pair: Pair, tmp_path: Path) -> None:
    rows = training_rows()
    found = fit(tiny_pair, tmp_path, Residual("residual", attention=0.0, mse=1.0, hidden=8), rows=rows, max_steps=4)
    base = base_map(tiny_pair)
    trained = replace(base, layers=found.layers, trunks=found.trunks)
    ids = rows.held_out.tokens
    own = tiny_pair.content("target", tiny_pair.target.prefill(ids))
    for name, each in (("base", base), ("trained", trained)):
        errors = MappedErrors(3)  # as an evaluation's fit check, which compares with what is recorded
        errors.add(own, mapped_content(tiny_pair, Mapper(each), ids), EXACT, ids.shape[1])
        recorded = {(row["layer"], row["kind"]): row["r2"] for row in found.record["held_out"][name]["r2"]}
        assert {output: error.r2() for output, error in errors.by_output.items()} == pytest.approx(recorded, abs=1e-4)
    one, other = found.record["held_out"]["base"], found.record["held_out"]["trained"]
    assert sum(row["r2"] for row in other["r2"]) > sum(row["r2"] for row in one["r2"])
    assert len(one["layers"]) == 3


@pytest.mark.parametrize(
    "spec", [MLP("mlp", attention=0.0, mse=1.0, hidden=16), MLP("mlp_small", hidden=16, share=True)]
)
def test_an_mlp_replaces_the_layers_that_are_named(tiny_pair: Pair, tmp_path: Path, spec: MLP) -> None:
    found = fit(tiny_pair, tmp_path, replace(spec, layers=(0, 2)), patience=1, max_steps=2)
    assert {output[0] for trunk in found.trunks for output in trunk.readouts} == {0, 2}
    assert found.layers[1, "keys"] is not None
    assert torch.equal(found.layers[1, "keys"].weight, base_map(tiny_pair).layers[1, "keys"].weight)
    rows = [row for row in found.record["layers"] if row["step"] == 2]
    assert [row["attention_loss"] is None for row in rows] == ([False, True, False] if spec.attention else [True] * 3)


def poisoned(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """From the call of this number on, the network gives a number that is not finite."""
    forward, count = Network.forward, 0

    def broken(self: Network, *inputs: Any) -> Any:
        nonlocal count
        count += 1
        content = forward(self, *inputs)
        if count >= calls:
            content.values[1][0, 0, 7, 3] *= float("nan")
        return content

    monkeypatch.setattr(Network, "forward", broken)


@pytest.mark.parametrize(("calls", "step"), [(6, 3), (7, 4)])
def test_a_number_that_is_not_finite_stops_it(
    tiny_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, step: int
) -> None:
    """At a step, or in a look at the validation rows: no checkpoint of it is kept."""
    poisoned(monkeypatch, calls)
    last = tmp_path / "checkpoints" / "last.ckpt"
    message = f"training stopped at step {step}: what is mapped as values of layer 1 is not finite; the last good"
    with pytest.raises(KvxferError, match=message) as error:
        fit(tiny_pair, tmp_path)
    assert f"checkpoint is {last}; lower trainer.lr" in str(error.value)
    assert torch.load(last, weights_only=True)["global_step"] == 2


def test_a_learning_rate_that_is_found(
    tiny_pair: Pair, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = fit(tiny_pair, tmp_path, lr="auto", max_steps=1)
    # No bar where there is no terminal.
    assert capfd.readouterr() == ("", "")
    assert any("trainer.lr=auto: 20 steps" in message for message in caplog.messages)
    kept = json.loads((tmp_path / "lr.json").read_text())
    assert 1e-6 < found.record["lr"] == kept["lr"] < 0.3
    assert not list(tmp_path.glob(".lr_find*"))
    (tmp_path / "lr.json").write_text(json.dumps({**kept, "lr": 0.025}))
    for file in (tmp_path / "checkpoints").iterdir():
        file.unlink()
    assert fit(tiny_pair, tmp_path, lr="auto", max_steps=1).record["lr"] == 0.025


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": training_rows(1)}, r"trainer.batch_size=2 is more than the 1 training rows"),
        ({"rows": replace(training_rows(), validation=make_rows(0, 9))}, r"corpus.rows.validation=0"),
        ({"rows": replace(training_rows(), held_out=make_rows(3, 0))}, r"document 0 is in training and held_out rows"),
        ({"rows": replace(training_rows(), held_out=make_rows(3, 9, 8))}, r"held_out rows have 8 tokens"),
        ({"spec": Corrected("corrected", layers=(0, 3))}, r"solver.layers"),
        ({"accelerator": "gpu"}, r"trainer.accelerator=gpu, but the pair is on cpu: set pair.device"),
        ({"accelerator": "abacus"}, r"trainer.accelerator=abacus"),
        ({"strategy": "magic"}, r"trainer.strategy=magic"),
        ({"strategy": "ddp_spawn", "devices": 2}, r"trainer.strategy=ddp_spawn: .*use auto or ddp"),
    ],
)
def test_settings_that_do_not_fit(tiny_pair: Pair, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(KvxferError, match=message):
        fit(tiny_pair, tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_what_is_blamed_first() -> None:
    fine, bad = torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), torch.inf)
    nan = torch.tensor([0.0, torch.nan])
    mapped, layers = KV([fine, fine], [fine, fine]), (2, 5)
    assert culprit(KV([fine, bad], [bad, fine]), None, layers) == "what is mapped as values of layer 0"
    assert culprit(mapped, Losses(nan, nan[1], None), layers) == "the loss of layer 5's attention output"
    assert culprit(mapped, Losses(None, nan[1], nan[[0, 0, 0, 1]]), layers) == "the squared error of values of layer 5"
    assert culprit(mapped, Losses(nan[:1], nan[1], None), layers) == "the loss of next-token KL"
    assert culprit(mapped, None, layers) == "next-token KL of the validation rows"
