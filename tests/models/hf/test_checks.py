"""What is refused before any weights are read: attention, quantisation and tokenizers that can't work here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, Gemma2Config, GptOssConfig, PreTrainedConfig

from kvxfer.errors import KvxferError
from kvxfer.models.hf.checks import check_attention, check_quantised, check_tokenizer
from kvxfer.models.hf.load import load_tokenizer
from kvxfer.models.hf.published import random_model
from kvxfer.models.pair import load_pair
from kvxfer.models.spec import ModelSpec, PairSpec
from tests.doubles import save, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 16, "intermediate_size": 32, "vocab_size": 384, "pad_token_id": None}


@pytest.mark.parametrize("config", [Gemma2Config(**SMALL), GptOssConfig(**SMALL, num_local_experts=2)])
def test_an_attention_that_a_model_refuses_is_told_with_one_that_it_takes(config: PreTrainedConfig) -> None:
    check_attention(config, "eager", "float32", CPU, "it")
    with pytest.raises(KvxferError, match=r"^pair.attention=sdpa: it can't run with it .*set pair.attention=eager$"):
        check_attention(config, "sdpa", "float32", CPU, "it")


def test_flash_attention_needs_its_package_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_model("qwen3-default").config
    advice = r"set pair.attention=sdpa$"
    with pytest.raises(KvxferError, match=rf"^pair.attention=flash_attention_2: .*{advice}"):
        check_attention(config, "flash_attention_2", "bfloat16", CPU, "it")
    monkeypatch.setattr("kvxfer.models.hf.checks._refusal", lambda *_: None)  # as if it were installed
    with pytest.raises(KvxferError, match=rf"needs a CUDA GPU, and pair.dtype bfloat16 or float16.*{advice}"):
        check_attention(config, "flash_attention_2", "bfloat16", CPU, "it")
    with pytest.raises(KvxferError, match="needs a CUDA GPU"):
        check_attention(config, "flash_attention_2", "float32", torch.device("cuda"), "it")
    check_attention(config, "flash_attention_2", "bfloat16", torch.device("cuda"), "it")


def test_random_weights_are_refused_an_attention_too() -> None:
    with pytest.raises(KvxferError, match=r"^pair.attention=flash_attention_3: pair.source qwen3-0.6b can't run"):
        random_model("qwen3-0.6b", 1, "bfloat16", "meta", "flash_attention_3", "pair.source")


@pytest.mark.parametrize("given", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "nothing known"}])
def test_quantised_weights_without_their_package_are_told_as_such(given: dict[str, Any]) -> None:
    config = tiny_model("qwen3-default").config
    check_quantised(config, "it")
    config.quantization_config = given
    said = rf"^it: its weights are quantised \(quant_method: {given['quant_method']}\) .* or give the model without"
    with pytest.raises(KvxferError, match=said) as refused:
        check_quantised(config, "it")
    assert "\n" not in str(refused.value)


def test_both_models_are_looked_at_before_any_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path / side) for side in ("source", "target")]
    monkeypatch.setattr("kvxfer.models.pair.load_model", None)
    spec = PairSpec("it", *(ModelSpec(str(folder)) for folder in folders), dtype="float32", device="cpu")
    config = json.loads((folders[1] / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (folders[1] / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(KvxferError, match=r"^pair.target.model .*quant_method: awq"):
        load_pair(spec)
    (folders[1] / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(
        KvxferError, match=r"^pair.target.model: the tokenizer of .* ids up to 383, the model embeds 300"
    ):
        load_pair(spec)


def test_ids_beyond_the_embedding_are_refused_where_text_may_give_them() -> None:
    spec, tokenizer = ModelSpec("it"), tiny_tokenizer()
    check_tokenizer(tokenizer, 384, spec, "pair.source")
    tokenizer.add_tokens([AddedToken("<pad>", special=True)], special_tokens=True)
    check_tokenizer(tokenizer, 384, spec, "pair.source")  # no text has it
    tokenizer.add_tokens(["lamp"])
    with pytest.raises(KvxferError, match=r"up to 385, the model embeds 384 \(vocab_size\), .* give 'lamp' \(385\)"):
        check_tokenizer(tokenizer, 384, spec, "pair.source")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})  # it stands between documents
    with pytest.raises(KvxferError, match=r"text may give '<end>' \(384\)"):
        check_tokenizer(tokenizer, 384, spec, "pair.source")


def bare(folder: Path, kind: str) -> ModelSpec:
    """A folder with the config alone of a model of some kind."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    return ModelSpec(str(folder))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma", "gpt_neox", "mistral"])
def test_a_folder_without_a_tokenizer_is_told_as_such(kind: str, tmp_path: Path) -> None:
    spec = bare(tmp_path, kind)
    with pytest.raises(KvxferError, match=r"^pair.source.model: .*tokenizer.*; put the files of its tokenizer"):
        check_tokenizer(load_tokenizer(spec, "pair.source"), 1_000_000, spec, "pair.source")


def test_a_tokenizer_that_wants_converting_says_what_it_needs(tmp_path: Path) -> None:
    spec = bare(tmp_path, "llama")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x07")
    with pytest.raises(KvxferError, match=r"^pair.source.model: tokenizer of .*sentencepiece") as refused:
        load_tokenizer(spec, "pair.source")
    assert "\n" not in str(refused.value)


def test_a_tokenizer_file_that_its_class_reads_otherwise_is_refused(tmp_path: Path) -> None:
    """A class that builds its own pipeline from a file's vocabulary may lose every word of a text, without a word."""
    from kvxfer.toy.tokenizer import build_tokenizer

    spec = bare(tmp_path, "qwen2")
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(KvxferError, match="has no tokenizer that reads text; save its tokenizer again"):
        check_tokenizer(load_tokenizer(spec, "pair.source"), 1_000_000, spec, "pair.source")
