"""A corpus that cannot be read, or is too small, says so in one line that names the setting or the file."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError
from small_corpora import Stream, hub_spec, install_hub, make_documents, text_spec, tokenizer_of, write

from kvxfer.errors import KvxferError
from kvxfer.text.corpus import document_key, load_rows, split_of, toy_conversations, toy_stories
from kvxfer.text.spec import CorpusSpec, RowCounts
from kvxfer.toy.tokenizer import build_tokenizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "books"}, "corpus.kind='books': choose one of toy, toy_shuffled, text, hub"),
        ({"length": 1}, "corpus.length=1: must be at least 2"),
        ({"skip_first": -1}, "corpus.skip_first=-1: must be at least 0"),
        ({"skip_first": 16}, "corpus.skip_first=16 leaves nothing of corpus.length=16"),
        ({"num_shards": 0}, "corpus.num_shards=0"),
        ({"num_shards": 4, "shard_index": 4}, "corpus.shard_index=4 with corpus.num_shards=4"),
        ({"shard_index": -1}, "corpus.shard_index=-1 with corpus.num_shards=1"),
        ({"seed": -1}, "corpus.seed=-1"),
        ({"kind": "toy", "seed": 10**9}, "corpus.seed=1000000000"),
        ({"rows": RowCounts(held_out=-1)}, "corpus.rows.held_out=-1: must be at least 0"),
        ({"rows": RowCounts(training=-1)}, "corpus.rows.training=-1: must be at least 0"),
        ({"path": None}, "corpus.path is not set"),
        ({"kind": "hub", "dataset": None}, "corpus.dataset is not set"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(KvxferError, match=re.escape(message)) as refusal:
        text_spec(tmp_path, **settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        ({}, {"path": "nowhere"}, "corpus.path=nowhere: no such folder or file"),
        ({"a.pdf": b"x"}, {}, "none of 1 files that match corpus.glob='**/*' is one of .txt, .md, .jsonl"),
        ({"a.txt": b"x"}, {"glob": "*.md"}, "none of 0 files that match corpus.glob='*.md'"),
        ({"a.txt": b"x"}, {"glob": "/*.md"}, "corpus.glob='/*.md': "),
        ({"a.txt": b"fine \xff"}, {}, "a.txt: not UTF-8 text (byte 5: "),
        ({"a.txt.gz": b"no gzip"}, {}, "a.txt.gz: cannot be read ("),
        ({"a.jsonl.gz": gzip.compress(b"x" * 100)[:-9]}, {}, "a.jsonl.gz: cannot be read ("),
        (
            {"a.jsonl": b'{"text": "x"}\n\n{"body": "x", "id": 3}'},
            {},
            "a.jsonl, line 3: no text in column 'text' (the ",
        ),
        ({"a.jsonl": b'{"text": 3}'}, {}, "a.jsonl, line 1: no text in column 'text' (the line holds text)"),
        ({"a.jsonl": b'["text"]'}, {}, "a.jsonl, line 1: no text in column 'text' (the line holds a list)"),
        ({"a.jsonl": b'{"text": "x"}\n{"text": '}, {}, "a.jsonl, line 2: not JSON ("),
    ],
)
def test_unreadable_text_is_named(
    files: dict[str, bytes], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(KvxferError, match=re.escape(message)) as refusal:
        load_rows(text_spec(tmp_path, **settings), tokenizer_of([]), "fit", 1)
    assert "\n" not in str(refusal.value)


def test_broken_characters_are_replaced(tmp_path: Path) -> None:
    texts = [f"a{i} b\ud800" for i in range(9)]
    write(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts))
    rows = load_rows(
        text_spec(tmp_path, length=3, skip_first=0), tokenizer_of([f"a{i} b?" for i in range(9)]), "fit", 1
    )
    assert 2 not in rows.tokens, "no word is unknown"


def test_too_few_rows_says_how_many_there_are(tmp_path: Path) -> None:
    text = next(text for text in (f"w{i} b c d" for i in range(99)) if split_of(document_key(text)) == "fit")
    write(tmp_path / "a.txt", text)
    spec = text_spec(tmp_path, length=2, skip_first=0, name="mine")
    with pytest.raises(KvxferError, match=re.escape("corpus.rows.fit=512: mine has only 2 rows of 2 tokens")):
        load_rows(spec, tokenizer_of([text]), "fit")
    with pytest.raises(KvxferError, match=re.escape("only 0 rows of 2 tokens for this split, which gets 1 of 10")):
        load_rows(spec, tokenizer_of([text]), "validation")
    with pytest.raises(KvxferError, match="split 'test': choose one of fit"):
        load_rows(spec, tokenizer_of([text]), "test")
    few = dataclasses.replace(spec, rows=RowCounts(fit=1))
    with pytest.raises(KvxferError) as refusal:
        load_rows(few, tokenizer_of([text]), "training")
    for part in (
        "corpus.rows.training=512: mine has only 0 rows of 2 tokens for training",
        "that share no document with its first corpus.rows.fit=1 rows; lower corpus.rows.training, corpus.rows.fit or",
    ):
        assert part in str(refusal.value)


def test_the_toy_corpus_refuses_what_it_cannot_do() -> None:
    with pytest.raises(KvxferError, match=r"corpus\.length=16: .* tokens more"):
        load_rows(CorpusSpec("toy", "toy", 16), build_tokenizer(), "fit", 1)
    with pytest.raises(KvxferError, match="the pair's tokenizer does not know the toy world's words"):
        load_rows(CorpusSpec("toy", "toy", 64), tokenizer_of([]), "fit", 1)


@pytest.mark.parametrize("seed", [-1, 1_000_000])
def test_stories_that_the_toy_models_were_trained_on_are_out_of_reach(seed: int) -> None:
    message = rf"corpus\.seed or eval\.seed asks for draw {seed} of the toy world, which has 1000000"
    with pytest.raises(KvxferError, match=message):
        toy_stories("evaluation", 1, 64, seed)
    with pytest.raises(KvxferError, match=message):
        toy_conversations("evaluation", 1, 2, 16, seed)


def test_the_hub_is_streamed_at_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = make_documents(random.Random(4))
    calls = install_hub(monkeypatch, Stream([{"content": text} for text in documents]))
    spec = hub_spec(subset="small", revision="abc", column="content")
    first = load_rows(spec, tokenizer_of(documents), "fit", 4)
    assert calls == [(("someone/web", "small"), {"split": "train", "streaming": True, "revision": "abc"})]
    assert load_rows(spec, tokenizer_of(documents), "fit", 4).digest == first.digest
    other = load_rows(dataclasses.replace(spec, seed=1), tokenizer_of(documents), "fit", 4)
    assert other.digest != first.digest


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (DatasetNotFoundError("Dataset 'x' doesn't exist\non the Hub"), "someone/web: no such data set on the hub"),
        (ConnectionError("Couldn't reach it"), "someone/web: cannot be read (ConnectionError: Couldn't reach it)"),
        (ValueError("BuilderConfig 'x' not found"), "check corpus.dataset, corpus.subset, corpus.revision"),
        (Stream([{"text": "a"}, {"text": "b"}], fails_at=1), "cannot be read (TimeoutError: read timed out)"),
        (
            Stream([{"url": "a", "body": "b"}]),
            "corpus.column='text': a record of someone/web has no text there (it hol",
        ),
    ],
)
def test_a_failing_hub_is_one_clear_line(answer: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install_hub(monkeypatch, answer)
    with pytest.raises(KvxferError, match=re.escape(message)) as refusal:
        load_rows(hub_spec(), tokenizer_of(["a b"]), "fit", 1)
    assert "\n" not in str(refusal.value)


def test_a_hub_that_is_switched_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install_hub(monkeypatch, ConnectionError("offline"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(KvxferError, match=r"is switched off \(HF_HUB_OFFLINE is set\); unset it, or use corpus=text"):
        load_rows(hub_spec(), tokenizer_of([]), "fit", 1)
