"""Rows with one end and beginnings of several lengths, so that every length is scored on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.items import Item
from kvxfer.text import toy
from kvxfer.text.corpus import leading_bos, load_rows
from kvxfer.text.spec import CorpusSpec


@dataclass(frozen=True)
class Ends:
    """Items by prefix length: the n-th item of every length is the same row with the same answer."""

    items: dict[int, list[Item]]

    def __len__(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.items.values())))


def same_ends(corpus: CorpusSpec, tokenizer: Any, rows: int, lengths: Sequence[int], scored: int) -> Ends:
    """At most so many rows of the evaluation split whose last ``scored`` tokens follow prefixes of all lengths.

    Of text, a shorter prefix is the end of a longer one, after the BOS that the tokenizer puts before every text. In
    the toy world that would cut off the facts that are asked about, so there a longer prefix is the shortest one with
    filler sentences between its sentences. A row's document, for statistics, is the one that its scored tokens end in.
    """
    shortest, longest = min(lengths), max(lengths)
    is_toy = corpus.kind in toy.KINDS
    length = (shortest if is_toy else longest) + scored
    try:
        found = load_rows(replace(corpus, length=length), tokenizer, "evaluation", rows, fewer=True)
    except KvxferError as error:
        raise KvxferError(f"eval.prefixes={sorted(lengths)} and eval.scored={scored} ask for {error}") from error
    bos = leading_bos(tokenizer)
    items: dict[int, list[Item]] = {length: [] for length in sorted(lengths)}
    for n, (tokens, documents) in enumerate(zip(found.tokens.tolist(), found.documents, strict=True)):
        head, answer = tokens[:-scored], tokens[-scored:]
        for length in items:
            if is_toy:
                prefix = toy.lengthened(tokenizer, head, documents[-1], length)
            else:
                prefix = [*bos, *head[len(head) - length + len(bos) :]]
            items[length].append(Item(str(n), documents[-1], found.domain, tuple(prefix), length, tuple(answer)))
    return Ends(items)
