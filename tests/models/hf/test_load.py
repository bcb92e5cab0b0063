"""Loading by folder or hub id: what comes out, and the one line when nothing can."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from kvxfer.errors import KvxferError
from kvxfer.models.files import folder_digest
from kvxfer.models.hf import load
from kvxfer.models.hf.load import load_config, load_model, load_tokenizer, resolve_device
from kvxfer.models.spec import ModelSpec
from tests.doubles import make_double, save, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dtype_and_attention_are_as_asked(qwen: Path, dtype: str, attention: str) -> None:
    model = load_model(ModelSpec(str(qwen)), dtype, "cpu", attention)
    assert model.dtype == getattr(torch, dtype)
    assert model.lm.config._attn_implementation == attention
    assert model.device.type == "cpu"
    assert model.prefill(torch.tensor([[5, 6, 7]])).keys[0].dtype == model.dtype
    cos, _ = model.cos_sin(4)
    assert cos.dtype == torch.float32
    assert model.revision == f"sha256:{folder_digest(qwen, 'pair.source')}"


def test_low_precision_angles_are_those_of_float32(qwen: Path) -> None:
    exact, low = (load_model(ModelSpec(str(qwen)), dtype, "cpu", "sdpa") for dtype in ("float32", "bfloat16"))
    for wanted, got in zip(exact.cos_sin(200), low.cos_sin(200), strict=True):
        assert torch.equal(wanted, got)


def test_of_a_vision_language_model_only_the_language_model_is_kept(tmp_path: Path) -> None:
    folder, _ = make_double("ministral3_3b_8b", tmp_path)
    model = load_model(ModelSpec(str(folder)), "float32", "cpu", "sdpa")
    assert type(model.lm).__name__ == "Ministral3ForCausalLM"
    assert not any("vision" in name for name, _ in model.lm.named_modules())
    assert not any(parameter.is_meta for parameter in model.lm.parameters())
    assert model.geometry.rotary.type == "yarn"
    logging.disable_progress_bar()
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logging.enable_progress_bar()
    ids = torch.randint(3, 300, (2, 20))
    with torch.no_grad():
        wanted = whole(input_ids=ids, use_cache=False).logits
    assert torch.allclose(model.logits(ids), wanted, atol=1e-5)
    assert torch.allclose(model.logits(ids[:, 9:], model.prefill(ids[:, :9])), wanted[:, 9:], atol=1e-5)
    assert len(model.queries(ids)[1]) == 3


def test_small_checkpoints_load_without_a_progress_bar(qwen: Path, capfd: pytest.CaptureFixture[str]) -> None:
    enabled = logging.is_progress_bar_enabled()
    load_model(ModelSpec(str(qwen)), "float32", "cpu", "sdpa")
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled() == enabled


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (("float8", "cpu", "sdpa"), "pair.dtype: 'float8' is not supported; use one of float32, bfloat16, float16"),
        (("float32", "abacus", "sdpa"), "pair.device: 'abacus' is no device"),
        (("float32", "cpu", "fast"), "pair.attention: 'fast' is not supported"),
    ],
)
def test_unknown_settings(qwen: Path, choice: tuple[str, str, str], message: str) -> None:
    with pytest.raises(KvxferError, match=message):
        load_model(ModelSpec(str(qwen)), *choice)


def test_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(KvxferError, match=r"pair.device: 'cuda:0' is not available on this machine"):
        resolve_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_missing_folder_and_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        KvxferError, match=r"^pair.target.model: no folder '/nowhere/model'; give a hub id or the folder"
    ):
        load_config(ModelSpec("/nowhere/model"), "pair.target")
    with pytest.raises(KvxferError, match=r"^pair.source.model: folder '.*' has no config.json"):
        load_tokenizer(ModelSpec(str(tmp_path)), "pair.source")


def test_hub_id_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = r"^pair.source.model: config of 'nobody/no-such-model' can't be read .*HF_HUB_OFFLINE is set: unset it"
    with pytest.raises(KvxferError, match=message) as refused:
        load_config(ModelSpec("nobody/no-such-model", "v2"), "pair.source")
    assert "'v2'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_that_needs_remote_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "homemade", "auto_map": {"AutoConfig": "code.Config"}}')
    with pytest.raises(KvxferError, match=r"^pair.source.model: config of .* can't be read") as refused:
        load_config(ModelSpec(str(tmp_path)), "pair.source")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("model.safetensors", None, "weights"),
        ("model.safetensors", b"no weights", "weights"),
        ("tokenizer.json", b"{}", "tokenizer"),
        ("config.json", b"{", "config"),
    ],
)
def test_a_broken_checkpoint_is_one_line(tmp_path: Path, name: str, content: bytes | None, what: str) -> None:
    save(tiny_model("qwen3-default"), tiny_tokenizer(), tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(KvxferError, match=f"^pair.source.model: {what} of .* can't be read") as refused:
        load_model(ModelSpec(str(tmp_path)), "float32", "cpu", "sdpa", "pair.source")
    assert "\n" not in str(refused.value)


def test_a_vision_language_model_without_a_language_model_of_its_own_is_refused(tmp_path: Path) -> None:
    folder, _ = make_double("ministral3_3b_8b", tmp_path)
    logging.disable_progress_bar()
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    logging.enable_progress_bar()
    del whole.model.language_model
    with pytest.raises(KvxferError, match=r"^pair.source x: Mistral3ForConditionalGeneration has no language model"):
        load._language_model(whole, "pair.source x")
