"""Small corpora whose words tell which document they are from, with their tokenizers and a hub that holds them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvxfer.text.spec import CorpusSpec

DOCUMENTS, LONGEST = 120, 200


def tokenizer_of(documents: list[str], eos: bool = True, bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per word, so that a token tells which document it is from. ``bos``: it puts one before every text."""
    words = ["<s>", "</s>", "<unk>", *dict.fromkeys(word for text in documents for word in text.split())]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>" if eos else None, unk_token="<unk>"
    )


def make_documents(rng: random.Random) -> list[str]:
    """Documents of words that no other has: single words, some, and several rows long."""
    sizes = [rng.choice((1, 2, 7, 40, LONGEST)) for _ in range(DOCUMENTS)]
    return [" ".join(f"d{index}w{word}" for word in range(size)) for index, size in enumerate(sizes)]


def write_folder(folder: Path, documents: list[str], rng: random.Random) -> Path:
    """The documents as files of all kinds in random places, some of them twice with other white space."""
    folder.mkdir()
    lines: dict[str, list[str]] = {"lines.jsonl": [], "more/lines.jsonl.gz": []}
    copies = [text.replace(" ", "\r\n") + "\n" for text in rng.sample(documents, 15)]
    for index, text in enumerate(rng.sample([*documents, *copies], DOCUMENTS + 15)):
        name = rng.choice(("{}.txt", "sub/{}.md", "a/b/{}.txt.gz", "lines.jsonl", "more/lines.jsonl.gz"))
        if name in lines:
            lines[name].append(json.dumps({"text": text, "other": index}))
        else:
            write(folder / name.format(index), text)
    for name, content in lines.items():
        write(folder / name, "\n\n".join(content))
    return folder


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


class Stream:
    """What ``datasets`` gives for a streamed data set, as far as it is used."""

    def __init__(self, records: list[dict[str, Any]], fails_at: int | None = None) -> None:
        self.records, self.fails_at = records, fails_at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, record in enumerate(self.records):
            if index == self.fails_at:
                raise TimeoutError("read timed out")
            yield record

    def shuffle(self, seed: int, buffer_size: int) -> Stream:
        return Stream(random.Random(seed).sample(self.records, len(self.records)))


def install_hub(monkeypatch: pytest.MonkeyPatch, answer: Stream | Exception) -> list[tuple[Any, ...]]:
    """Puts a stream (or a failure) in the place of the hub, and lists how it was asked for."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(*args: Any, **options: Any) -> Stream:
        calls.append((args, options))
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return calls


def text_spec(folder: Path, **settings: Any) -> CorpusSpec:
    return CorpusSpec(**{"name": "text", "kind": "text", "length": 16, "path": str(folder), **settings})


def hub_spec(**settings: Any) -> CorpusSpec:
    return CorpusSpec(**{"name": "web", "kind": "hub", "length": 16, "dataset": "someone/web", **settings})
