"""The text that healing reads: plain text, Python source and HTML pages of unpacked packages, a file a document."""

from __future__ import annotations

import random
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.text.corpus import document_key

SUFFIXES = (".txt", ".py", ".html")
FEWEST_CHARACTERS = 400
"""A shorter file is a stub: an empty __init__.py, a page that points elsewhere."""


class _Page(HTMLParser):
    """The text of a page's body, with line breaks where blocks end."""

    BLOCKS = ("p", "div", "li", "dt", "dd", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "tr", "table", "section", "br")
    LEFT_OUT = ("script", "style", "head", "nav", "footer")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.LEFT_OUT:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[-1]:
            self.inside.pop()
        elif tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.parts.append(data)


def read_document(file: Path) -> str:
    """A file's text; of an HTML page what a reader sees, without blank lines."""
    content = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".html":
        return content
    page = _Page()
    page.feed(content)
    lines = (line.rstrip() for line in "".join(page.parts).splitlines())
    return "\n".join(line for line in lines if line.strip())


def documents(folders: list[Path], seed: int) -> Iterator[tuple[str, str]]:
    """(key, text) of every document under the folders, each once, in an order that the seed and the text decide."""
    files = sorted(
        file for folder in folders for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()
    )
    if not files:
        raise KvxferError(f"no {', '.join(SUFFIXES)} file under {', '.join(map(str, folders))}: give unpacked packages")
    found = {document_key(text): text for text in map(read_document, files) if len(text) >= FEWEST_CHARACTERS}
    order = sorted(found)
    random.Random(seed).shuffle(order)
    return ((key, found[key]) for key in order)


def rows(
    found: Iterator[tuple[str, str]], tokenizer: Any, count: int, length: int, document_tokens: int
) -> tuple[Int64[Tensor, "rows length"], list[str]]:
    """``count`` rows of token ids, documents joined by EOS, and the keys of those documents.

    Raises:
        KvxferError: there is too little text.
    """
    ids: list[int] = []
    keys: list[str] = []
    for key, text in found:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:document_tokens]
        ids.append(tokenizer.eos_token_id)
        keys.append(key)
        if len(ids) >= count * length:
            break
    else:
        raise KvxferError(f"{len(keys)} documents give {len(ids)} tokens of {count * length}: lower --steps, add text")
    return torch.tensor(ids[: count * length]).view(count, length), keys
