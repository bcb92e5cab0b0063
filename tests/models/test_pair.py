"""Pairs: proved compatible or refused in one line, and what content space, identity and description say of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    PreTrainedModel,
)

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.models.hf.geometry import read_geometry
from kvxfer.models.hf.load import load_config, load_tokenizer
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair, check_geometries, load_pair, prove_rotary
from kvxfer.models.spec import ModelSpec, PairSpec
from tests.doubles import DOUBLES, FAMILIES, WINDOW, make_double, save, tiny_model, tiny_tokenizer

OPTIONS = Path(__file__).parents[2] / "configs" / "pair"


def spec_of(folders: tuple[Path, Path], name: str = "custom", **changes: object) -> PairSpec:
    source, target = (ModelSpec(str(folder)) for folder in folders)
    return replace(PairSpec(name, source, target, device="cpu"), **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_double("qwen3_0.6b_4b", tmp_path_factory.mktemp("double"))


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    return load_pair(spec_of(folders, dtype="float32"))


def test_every_option_of_real_models_but_toy_has_a_double() -> None:
    assert {path.stem for path in OPTIONS.glob("*.yaml")} == {*DOUBLES, "toy", "geometry"}


@pytest.mark.parametrize("option", DOUBLES)
def test_the_double_of_every_option_is_a_pair(option: str, tmp_path: Path) -> None:
    settings = OmegaConf.load(OPTIONS / f"{option}.yaml")
    double = DOUBLES[option]
    spec = spec_of(make_double(option, tmp_path), option, dtype=settings.dtype, attention=settings.attention)
    pair = load_pair(spec)
    assert pair.source.dtype == torch.bfloat16
    for model, shape in ((pair.source, double.source), (pair.target, double.target)):
        assert model.geometry.heads == shape.ratio * model.geometry.kv_heads
        assert model.geometry.layers == shape.layers
    assert double.source.layers / double.target.layers == pytest.approx(double.depths[0] / double.depths[1], rel=0.08)
    ids = torch.tensor([pair.tokenizer.encode("anna has the red box .")])
    cache = pair.target.prefill(ids)
    again = pair.rotated("target", pair.content("target", cache))
    assert torch.allclose(pair.target.logits(ids[:, :1], again), pair.target.logits(ids[:, :1], cache), atol=0.05)


@pytest.mark.parametrize("option", [*DOUBLES, "toy"])
def test_every_option_has_every_setting(option: str) -> None:
    path = OPTIONS / f"{option}.yaml"
    settings = OmegaConf.to_container(OmegaConf.load(path))
    settings.pop("defaults", None)
    sides = {"source": {"model", "revision"}, "target": {"model", "revision"}}
    assert {side: set(settings.pop(side)) for side in sides} == sides
    dropped = settings.pop("drop_layers", None)
    assert (dropped is not None) == (option == "smollm2_mild")
    assert set(settings) == {"name", "dtype", "device", "attention", "reverse", "k", "features"}
    assert settings["name"] == option
    assert path.read_text().startswith("# ")
    assert " k: " in path.read_text().split("name:")[0]


def test_content_and_back(pair: Pair) -> None:
    ids = torch.randint(3, 300, (2, 24))
    for which in ("source", "target"):
        cache = pair.side(which).prefill(ids)
        content = pair.content(which, cache)
        assert content.keys[0].dtype == torch.float32
        assert torch.equal(content.values[1], cache.values[1])
        back = pair.rotated(which, content)
        assert torch.allclose(back.keys[1], cache.keys[1], atol=1e-6)
        late = pair.content(which, cache.span(10, 24), start=10)
        assert torch.allclose(late.keys[0], content.keys[0][:, :, 10:], atol=1e-6)
        late = pair.rotated(which, content.span(10, 24), start=10)
        assert torch.allclose(late.keys[0], cache.keys[0][:, :, 10:], atol=1e-6)


def test_rotated_is_in_the_models_dtype(folders: tuple[Path, Path]) -> None:
    pair = load_pair(spec_of(folders))
    cache = pair.source.prefill(torch.tensor([[5, 6, 7]]))
    again = pair.rotated("source", pair.content("source", cache))
    assert again.keys[0].dtype == again.values[0].dtype == torch.bfloat16


def test_description_is_json_and_names_no_path(pair: Pair, folders: tuple[Path, Path]) -> None:
    described = json.dumps(pair.describe())
    assert str(folders[0].parent) not in described
    description = json.loads(described)
    assert description["source"]["geometry"]["layers"] == 3
    assert description["target"]["geometry"]["rotary"]["theta"] == 1e6
    assert description["tokenizer"] == pair.tokenizer_digest
    assert (description["dtype"], description["direction"]) == ("float32", "forward")
    assert description["longest_context"] == 40960


def test_reverse_swaps_the_sides(folders: tuple[Path, Path], pair: Pair) -> None:
    spec = spec_of(folders, "qwen3_0.6b_4b", dtype="float32", reverse=True)
    assert [side.model for side in spec.oriented()] == [str(folders[1]), str(folders[0])]
    swapped = load_pair(spec)
    assert swapped.name == "qwen3_0.6b_4b_reversed"
    assert (swapped.source.geometry, swapped.target.geometry) == (pair.target.geometry, pair.source.geometry)
    assert swapped.describe()["direction"] == "reversed"


def test_identity_follows_content_not_place(folders: tuple[Path, Path], tmp_path: Path) -> None:
    spec = spec_of(folders)
    before = identity(spec)
    assert str(folders[0].parent) not in json.dumps(before)
    copies = tuple(shutil.copytree(folder, tmp_path / folder.name) for folder in folders)
    assert identity(spec_of(copies, "other", device="auto")) == before
    for other in (replace(spec, dtype="float32"), replace(spec, attention="eager"), replace(spec, reverse=True)):
        assert identity(other) != before


def test_identity_of_hub_ids_needs_no_network() -> None:
    spec = PairSpec("q", ModelSpec("Qwen/Qwen3-0.6B"), ModelSpec("Qwen/Qwen3-1.7B", "abc123"))
    found = identity(spec)
    assert found["source"] == {"model": "Qwen/Qwen3-0.6B", "revision": "main", "drop_layers": []}
    assert found["target"] == {"model": "Qwen/Qwen3-1.7B", "revision": "abc123", "drop_layers": []}


def test_toy_names_stand_for_the_embedded_models() -> None:
    from kvxfer import toy

    source, target = PairSpec("toy", ModelSpec("toy-source"), ModelSpec("toy-target")).oriented()
    assert (source.model, target.model) == (str(toy.SOURCE_DIR), str(toy.TARGET_DIR))


@pytest.mark.parametrize("unset", ["???", ""])
@pytest.mark.parametrize("call", [load_pair, identity])
def test_custom_without_a_model_is_refused(folders: tuple[Path, Path], unset: str, call: object) -> None:
    spec = replace(spec_of(folders), target=ModelSpec(unset))
    with pytest.raises(KvxferError, match=r"^pair.target.model is not set; give a hub id or the folder"):
        call(spec)
    with pytest.raises(KvxferError, match=r"^pair.target.model is not set"):
        call(replace(spec, reverse=True))


def test_missing_folder_has_no_identity(folders: tuple[Path, Path]) -> None:
    with pytest.raises(KvxferError, match=r"^pair.source.model: no folder './nowhere'"):
        identity(replace(spec_of(folders), source=ModelSpec("./nowhere")))


def test_unequal_geometries_are_refused_by_field_and_values(pair: Pair) -> None:
    geometry = pair.source.geometry
    check_geometries(geometry, pair.target.geometry)
    with pytest.raises(KvxferError, match=r"KV heads \(kv_heads\) differ: 2 in the source, 8 in the target"):
        check_geometries(geometry, replace(geometry, kv_heads=8))
    with pytest.raises(KvxferError, match=r"head size \(head_dim\) differ: 16 in the source, 128 in the target"):
        check_geometries(geometry, replace(geometry, head_dim=128))


def test_geometry_and_tokenizer_are_refused_before_weights_are_read(folders: tuple[Path, Path], tmp_path: Path) -> None:
    other = save(tiny_model("qwen3-default", num_key_value_heads=4), tiny_tokenizer(), tmp_path / "heads")
    (other / "model.safetensors").unlink()
    with pytest.raises(KvxferError, match="KV heads"):
        load_pair(spec_of((folders[0], other)))
    other = save(tiny_model("qwen3-default"), tiny_tokenizer(bos=True), tmp_path / "words")
    (other / "model.safetensors").unlink()
    with pytest.raises(KvxferError, match="tokenizers differ in bos_token_id"):
        load_pair(spec_of((folders[0], other)))


def test_configs_and_tokenizers_alone_can_be_compared(folders: tuple[Path, Path]) -> None:
    source, target = (ModelSpec(str(folder)) for folder in folders)
    geometry = read_geometry(load_config(source, "pair.source"), "pair.source")
    check_geometries(geometry, read_geometry(load_config(target, "pair.target"), "pair.target"))
    assert len(load_tokenizer(source, "pair.source")) == 384


def test_the_shortest_window_is_the_longest_context(tmp_path: Path) -> None:
    pair = load_pair(spec_of(make_double("ministral8b_nemo12b", tmp_path)))
    assert pair.longest_context == WINDOW
    pair.check_length(WINDOW, "corpus.length")
    wanted = f"^corpus.length: {WINDOW + 1} tokens, but .* has a sliding window of {WINDOW}; use {WINDOW} or fewer"
    narrow = replace(pair.source.geometry, max_positions=4 * WINDOW)
    pair.source.geometry = narrow
    with pytest.raises(KvxferError, match=wanted):
        pair.check_length(WINDOW + 1, "corpus.length")


def test_more_tokens_than_positions_are_refused(pair: Pair) -> None:
    with pytest.raises(KvxferError, match=r"^corpus.length: 50000 tokens, .* max_position_embeddings of 40960"):
        pair.check_length(50000, "corpus.length")


def loaded(lm: PreTrainedModel) -> LoadedModel:
    return LoadedModel(lm, tiny_tokenizer(), read_geometry(lm.config, "x"), lm.config.model_type, "random")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_proof_passes_every_supported_family(family: str, dtype: torch.dtype) -> None:
    prove_rotary(loaded(tiny_model(family).to(dtype)))


SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_layouts_are_refused(dtype: torch.dtype) -> None:
    for lm in (CohereForCausalLM(CohereConfig(**SMALL)), GlmForCausalLM(GlmConfig(**SMALL, head_dim=16))):
        with pytest.raises(KvxferError, match=r"layer 0's keys still turn .* interleaved or unknown rotary layout"):
            prove_rotary(loaded(lm.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_does_not_rotate_is_refused(dtype: torch.dtype) -> None:
    kinds = ["sliding_attention", "full_attention"]
    lm = Exaone4ForCausalLM(Exaone4Config(**SMALL, head_dim=16, sliding_window=64, layer_types=kinds))
    with pytest.raises(KvxferError, match="exaone4: layer 1's keys still turn"):
        prove_rotary(loaded(lm.to(dtype)))


def test_a_cache_of_another_shape_than_the_config_says_is_refused() -> None:
    model = loaded(tiny_model("qwen3-default"))
    model.geometry = replace(model.geometry, kv_heads=1)
    with pytest.raises(KvxferError, match=r"layer 0 caches \(1, 2, 48, 16\), not \(1, 1, 48, 16\)"):
        prove_rotary(model)
    model.geometry = replace(model.geometry, kv_heads=2, layers=5)
    with pytest.raises(KvxferError, match="2 layers in the cache, 5 in the config"):
        prove_rotary(model)
