"""A checkpoint that is not its model's is refused by name; what the library only warns of is kept and told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.models.hf.load import load_model
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.spec import ModelSpec
from tests.doubles import save, tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 6, 7, 8]])
LAYER = "model.layers.1.self_attn"

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A checkpoint whose output weights are its embedding's, and one whose own are apart."""
    home = tmp_path_factory.mktemp("saved")
    return {
        tied: save(tiny_model("qwen3-default", tie_word_embeddings=tied), tiny_tokenizer(), home / str(tied))
        for tied in (True, False)
    }


def load(folder: Path) -> LoadedModel:
    return load_model(ModelSpec(str(folder)), "float32", "cpu", "sdpa", "pair.target")


@pytest.fixture
def changed(saved: dict[bool, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of the checkpoint, with other tensors and other values in its config."""

    def make(change: Callable[[Tensors], object], tied: bool = False, **config: object) -> Path:
        folder = shutil.copytree(saved[tied], tmp_path / "changed")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        known = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | config))
        return folder

    return make


def kept(tensors: Tensors) -> None:
    """Change nothing."""


def layers(count: int) -> dict[str, object]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def added(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(3)})


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (without(f"{LAYER}.q_proj.weight"), {}, rf"its weights lack {LAYER}\.q_proj\.weight\. Numbers"),
        (without("lm_head.weight"), {}, r"its weights lack lm_head\.weight"),
        (added(f"{LAYER}.q_proj.bias"), {}, rf"hold, though the model has no such parameter, {LAYER}\.q_proj\.bias"),
        (added("score.weight"), {}, r"hold, .* score\.weight"),
        (added("model.layers.7.x"), {}, r"hold, .* model\.layers\.7\.x"),
        (kept, layers(3), r"its weights lack model\.layers\.2\.\S+, .* and \d+ more\."),
        (kept, layers(1), r"hold, .* model\.layers\.1\.\S+, .*and \d+ more\. .*set drop_layers"),
        (kept, {"intermediate_size": 96}, r"another shape model.layers.0.mlp.down_proj.weight \(64 × "),
        (
            lambda tensors: (tensors.pop("lm_head.weight"), tensors.update(extra=torch.ones(1))),
            {},
            r"its weights lack lm_head\.weight; they hold, .* extra\.",
        ),
    ],
)
def test_missing_unexpected_and_other_shapes_are_named_in_one_line(
    change: Callable[[Tensors], object],
    config: dict[str, object],
    said: str,
    changed: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = changed(change, **config)
    with pytest.raises(KvxferError, match=rf"^pair\.target\.model: '\S+': .*{said}") as refused:
        load(folder)
    assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_an_index_that_names_a_shard_which_is_not_there_is_one_line(changed: Callable[..., Path]) -> None:
    folder = changed(kept)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(KvxferError, match=r"weights of .* can't be read \(.*model-00002-of-00002"):
        load(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_model_class_leaves_out_is_no_fault(
    tied: bool, saved: dict[bool, Path], changed: Callable[..., Path]
) -> None:
    """Angles that older checkpoints carry, and output weights that are saved beside the embedding that they are."""

    def older(tensors: Tensors) -> None:
        tensors[f"{LAYER}.rotary_emb.inv_freq"] = torch.ones(8)
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())

    found, plain = load(changed(older, tied)), load(saved[tied])
    assert torch.equal(found.logits(IDS), plain.logits(IDS))
    assert found.remarks == plain.remarks == ()


def test_weights_that_should_be_tied_and_are_not_are_told(
    changed: Callable[..., Path], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The library goes by the checkpoint and against the config, and warns once a process."""
    folder = changed(lambda tensors: tensors.update({"lm_head.weight": torch.ones(384, 64)}), True)
    for _ in range(2):
        [remark] = load(folder).remarks
        assert "both are present in the checkpoints with different values, so we will NOT tie them" in remark
    assert "tie_word" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("content", ["{", "", '{"eos_token_id": '])
def test_a_generation_config_that_cannot_be_read_is_not_passed_over(content: str, changed: Callable[..., Path]) -> None:
    folder = changed(kept)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(KvxferError, match=r"^pair.target.model: generation config of .* can't be read"):
        load(folder)


def test_a_folder_with_an_adapter_is_refused(changed: Callable[..., Path]) -> None:
    folder = changed(kept)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(KvxferError, match=r"^pair.target.model: .* holds an adapter, .*; merge it into"):
        load(folder)


def test_files_that_change_while_they_are_loaded_are_refused(
    changed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(kept)

    def tokenizer(*_: object) -> object:
        (folder / "generation_config.json").write_text("{}")
        return tiny_tokenizer()

    monkeypatch.setattr("kvxfer.models.hf.load.load_tokenizer", tokenizer)
    with pytest.raises(KvxferError, match=r"^pair.target.model: the files of .* changed while they were loaded"):
        load(folder)
