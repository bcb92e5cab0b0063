"""The stage of trained maps around the loop: bases, ids, what is left behind, and processes beside the first.

The loop is stood in for; ``test_trained_commands.py`` has the real one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.fit_check import recorded_r2
from kvxfer.experiment.config import refuse_in_multirun
from kvxfer.experiment.loggers import RunLogger
from kvxfer.experiment.stages.random_map import make_random_map
from kvxfer.experiment.stages.train import train, train_id
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.trunks import Trunk
from kvxfer.models.hf.load import load_tokenizer
from kvxfer.text.corpus import load_rows
from tests.small_runs import run, settings_of, toy_models

SMALL = ["corpus.rows.training=6", "trainer.max_steps=3", "trainer.batch_size=2"]


@dataclass(frozen=True)
class Rows:
    """``kvxfer.fitting.trained.loop.TrainingRows``."""

    training: Any
    validation: Any
    held_out: Any


def measured(base: CacheMap, kl: float) -> dict[str, Any]:
    """What the loop measures on the held-out rows."""
    outputs = list(base.layers)
    layers = [{"layer": layer, "attention_score": 0.9, "cosine": 0.8} for layer in sorted({o[0] for o in outputs})]
    r2 = [{"layer": layer, "kind": kind, "r2": 0.5} for layer, kind in outputs]
    return {"kl": kl, "cosine": 0.8, "attention_score": 0.9, "layers": layers, "r2": r2}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A loop that moves the base's biases; the calls that it got."""
    calls: list[Any] = []

    def fitted(pair, base, spec, trainer, rows, exact, work, out):
        calls.append(SimpleNamespace(spec=spec, trainer=trainer, rows=rows, exact=exact, work=work, out=out, pair=pair))
        (work / "checkpoints").mkdir(exist_ok=True)
        for name in ("best", "last"):
            (work / "checkpoints" / f"{name}.ckpt").write_text(name)
        if trainer.lr > 100:
            raise KvxferError("the loss is not finite at step 2, layer 1: lower trainer.lr")
        layers = {o: replace(layer, bias=layer.bias + 0.01 * (1 + trainer.seed)) for o, layer in base.layers.items()}
        history = [{"step": step, "loss": 1 / step, "kl": 1 / step, "val_kl": 1 / step} for step in (1, 2, 3)]
        record = {"steps": 3, "best_step": 2, "seconds": 1.0, "seconds_per_step": 0.3, "stopped": "max_steps"}
        held_out = {"base": measured(base, 0.4), "trained": measured(base, 0.1)}
        record |= {"lr": trainer.lr, "history": history, "held_out": held_out}
        record |= {"base_val_kl": 2.0, "trained_parameters": 12}
        return SimpleNamespace(layers=layers, trunks=(), record=record, question="a question")

    fitting = lambda *given: SimpleNamespace(run=lambda: fitted(*given))  # noqa: E731
    stand_in = SimpleNamespace(TrainingRows=Rows, Fitting=fitting)
    monkeypatch.setitem(sys.modules, "kvxfer.fitting.trained.loop", stand_in)
    return calls


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all tests' runs lie, so that the base is fitted once."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def tiny(tiny_folders: tuple[Path, Path]) -> list[str]:
    return [*toy_models(tiny_folders), *SMALL]


@pytest.mark.parametrize("base", ["weighted", "auto"])
def test_the_base_is_the_run_that_the_plain_command_makes(base: str, tmp_path: Path) -> None:
    given = ["features=both", "penalty=attention", "rank=reduced", "solver.k=2"]
    settings = settings_of("train", tmp_path, "solver=residual", f"solver.base={base}", *given)
    plain = settings_of("train", tmp_path, f"solver={base}", *given)
    assert train_id(settings.base()) == train_id(plain)
    assert settings.base().columns() == plain.columns()
    assert settings.calibration == plain.calibration
    assert train_id(settings) is None


def test_rows_may_be_those_that_the_base_was_fitted_on(outputs: Path, tiny: list[str], loop: list[Any]) -> None:
    given = [*tiny, "solver=corrected", "trainer.rows=fit"]
    settings = settings_of("train", outputs, *given)
    run("train", outputs, *given)
    tokenizer = load_tokenizer(settings.pair.oriented()[1], "pair.target")
    fitted = load_rows(settings.corpus, tokenizer, "fit", 6)
    assert torch.equal(loop[0].rows.training.tokens, fitted.tokens)
    with pytest.raises(KvxferError, match=r"corpus\.rows\.training=6: .* corpus\.rows\.fit=5"):
        run("train", outputs, *given, "corpus.rows.fit=5")


def test_a_trained_map_is_a_run_like_any_other(outputs: Path, tiny: list[str], loop: list[Any]) -> None:
    path = run("train", outputs, *tiny, "solver=residual", "solver.hidden=8")
    assert run("train", outputs, *tiny, "solver=residual", "solver.hidden=8") == path
    (call,) = loop
    assert (call.spec.hidden, call.trainer.max_steps, call.exact) == (8, 3, 0)
    assert [len(part) for part in (call.rows.training, call.rows.validation, call.rows.held_out)] == [6, 4, 4]
    base = run("train", outputs, *tiny)
    made, under = CacheMap.load(path), CacheMap.load(base)
    assert made.manifest["base"] == {"run": base.name, "sha256": under.hash}
    assert made.manifest["solver"] == {
        **under.manifest["solver"],
        **{"name": "residual", "base": "ridge", "hidden": 8, "activation": "gelu", "queries": "continuation"},
        **{"attention": 1.0, "kl": 0.0, "mse": 0.0, "carried": False, "layers": None},
    }
    for key in ("pair", "calibration", "kept_tokens", "penalty", "rank", "features"):
        assert made.manifest[key] == under.manifest[key]
    assert made.manifest["training"]["rows"] == 6
    assert made.manifest["calibrated_on"] == {"name": "toy", "length": 48, "skip_first": 0}
    assert made.manifest["training"]["rows_sha256"] == call.rows.training.digest
    assert set(recorded_r2(path).values()) == {0.5}
    assert set(recorded_r2(path)) == set(made.layers)
    assert [file.name for file in path.rglob("*.ckpt")] == ["best.ckpt"]
    assert {"training.json", "selection.json", "r2.png", "run.json"} <= {file.name for file in path.iterdir()}
    log = json.loads((path / "log.json").read_text())
    assert [entry["type"] for entry in log["artifacts"].values()] == ["checkpoint", "kv-map"]
    assert (log["config"]["trainer_seed"], log["config"]["max_steps"]) == (0, 3)
    assert log["name"] == "toy/previous-residual-isotropic-full-seed0"
    record = json.loads((path / "run.json").read_text())
    assert record["config"]["corpus"]["rows"] == {"fit": 12, "validation": 4, "held_out": 4, "training": 6}
    assert record["inputs"] == {"train": under.hash, "calibrate": under.manifest["calibration"]}


def test_a_base_may_be_named_and_is_then_the_same_question(
    outputs: Path, tiny: list[str], loop: list[Any], tmp_path: Path
) -> None:
    built = run("train", outputs, *tiny, "solver=corrected")
    base = run("train", outputs, *tiny)
    # Whatever the config says of the base beside its name.
    other = ["penalty.lam=5", "features=same", "solver.k=1", "solver=corrected"]
    for name in (base.name, str(base)):
        assert run("train", outputs, *tiny, *other, f"solver.base_map={name}") == built
    assert len(loop) == 1
    less = run("train", outputs, *tiny, "solver=corrected", f"solver.base_map={base}", "corpus.skip_first=2")
    assert (CacheMap.load(less).skip_first, CacheMap.load(base).skip_first) == (2, 0)
    with pytest.raises(KvxferError, match=r"solver\.base_map=nope is no directory and no run in"):
        run("train", outputs, *tiny, "solver=corrected", "solver.base_map=nope")
    with pytest.raises(KvxferError, match=r"the base .*: the map was fitted with pair\.direction"):
        run("train", outputs, *tiny, "solver=corrected", f"solver.base_map={base}", "pair.reverse=true")
    with pytest.raises(KvxferError, match=r"solver\.layers=\[3\]: the target has layers 0 to 2"):
        run("train", outputs, *tiny, "solver=corrected", "solver.layers=[3]")
    with pytest.raises(KvxferError, match=r"no base map .*: run train\.py with these settings and solver=ridge"):
        run("train", tmp_path, *tiny, "solver=corrected", "build_missing=false")


def test_what_decides_the_weights_decides_the_id(outputs: Path, tiny: list[str]) -> None:
    run("train", outputs, *tiny)

    def asked(*overrides: str) -> str:
        identifier = train_id(settings_of("train", outputs, *tiny, "solver=residual", *overrides))
        assert identifier is not None
        return identifier

    changes = ["trainer.seed=1", "trainer.lr=1", "solver.kl=1", "solver.layers=[0]", "corpus.rows.training=5"]
    assert len({asked(), *(asked(change) for change in changes)}) == 1 + len(changes)
    place = ["trainer.devices=2", "trainer.cache_gib=0", "trainer.ckpt_path=x", "trainer.accelerator=cpu"]
    assert asked(*place, "solver.attention=1", "trainer.lr=1e-3", "force=true") == asked()


def test_a_failure_keeps_the_checkpoints(outputs: Path, tiny: list[str], loop: list[Any]) -> None:
    with pytest.raises(KvxferError, match="not finite at step 2, layer 1"):
        run("train", outputs, *tiny, "solver=residual", "trainer.lr=1000")
    (call,) = loop
    assert call.work.name.endswith(".partial")
    assert (call.work / "checkpoints" / "last.ckpt").is_file()
    assert json.loads((call.work / "log.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("done", [False, True])
def test_a_process_beside_the_first_takes_part_and_ends(
    outputs: Path, tiny: list[str], loop: list[Any], monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """It waits for no lock: the first process holds it until all have trained."""
    given = [*tiny, "solver=residual", "trainer.seed=7", "trainer.devices=2"]
    settings = settings_of("train", outputs, *given)
    if done:
        train(settings)
    else:
        run("train", outputs, *tiny)
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = len(loop)
    monkeypatch.setattr("kvxfer.experiment.runs.fcntl.flock", lambda *_: pytest.fail("it waited for the lock"))
    with pytest.raises(SystemExit) as ended:
        train(settings)
    assert ended.value.code == 0
    assert len(loop) - before == (0 if done else 1)
    if not done:
        assert isinstance(loop[-1].out, RunLogger)
        assert loop[-1].work.name == f".{train_id(settings)}.partial"
        assert not loop[-1].out._directory.exists()


def test_random_weights_and_multiruns_on_several_devices_are_refused(tmp_path: Path) -> None:
    settings = settings_of("evaluate", tmp_path, "pair=geometry", "solver=mlp", "eval=latency")
    with pytest.raises(KvxferError, match="solver=mlp is trained, which random weights"):
        make_random_map(settings)
    refuse_in_multirun(settings_of("train", tmp_path, "trainer.devices=2"))
    with pytest.raises(KvxferError, match=r"trainer\.devices=2 in a multirun"):
        refuse_in_multirun(settings_of("train", tmp_path, "solver=mlp", "trainer.devices=2"))


def test_the_linear_part_of_a_trained_map_can_be_a_base_and_a_network_cannot(
    outputs: Path, tiny: list[str], loop: list[Any], tmp_path: Path
) -> None:
    base = CacheMap.load(run("train", outputs, *tiny, "solver=corrected", "solver.delta_rank=2"))
    again = run("train", outputs, *tiny, "solver=residual", f"solver.base_map={base.manifest['run_id']}")
    solver = CacheMap.load(again).manifest["solver"]
    assert (solver["name"], solver["base"], "delta_rank" in solver) == ("residual", "corrected", False)
    block, output = next(iter(base.blocks)), (0, "keys")
    width = base.layers[output].bias.numel()
    trunk = Trunk((block,), (torch.zeros(width, 4),), (torch.zeros(4),), "relu", {output: torch.zeros(4, width)})
    manifest = {key: value for key, value in base.manifest.items() if key != "sha256"}
    CacheMap(base.layers, manifest, None, (trunk,)).save(tmp_path)
    with pytest.raises(KvxferError, match="is a corrected map and the base must be linear"):
        run("train", outputs, *tiny, "solver=residual", f"solver.base_map={tmp_path}")
