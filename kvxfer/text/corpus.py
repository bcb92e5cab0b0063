"""Token rows, split by document. Nothing else decides which text is for fitting and which for evaluation.

A document's split depends on its key alone, never on a setting, so that rows of different splits share no document
whatever the lengths, seeds, shards and corpora of the runs that made them.

The rule for special tokens: documents are encoded without any and joined by the tokenizer's EOS (if it has one). A row
begins with BOS if, and only if, the tokenizer itself puts one before every text: that is what the models meet when they
serve. BOS is then the first of the row's ``length`` tokens.

A row to evaluate on is of one document, which its scores are about: with the rest of another before it, a handed prefix
would be one document's and the scored text another's, and rows that share documents are not independent. Rows for all
else are packed.

Text to train on is what the fit split still has without the documents of the rows that closed forms are fitted on.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.text import folder as text
from kvxfer.text import hub, python, toy
from kvxfer.text.reading import EMPTY, TWICE, Reading
from kvxfer.text.spec import EVALUATION, SPLITS, TOY_DRAWS, TRAINING, CorpusSpec, at_least

_SPLIT_OF_TENTH = ("fit",) * 6 + ("validation", "held_out") + ("evaluation",) * 2
# A draw of the toy world is this many stories; all draws together stay below the seeds that its models were trained on.
_TOY_STORIES = 1_000_000


Row = tuple[list[int], tuple[str, ...]]
"""Token ids, and the keys of their documents."""


def split_of(document_key: str) -> str:
    """The split that a document belongs to, for good: .6 fit, .1 validation, .1 held-out, .2 evaluation, by SHA-256."""
    number = int.from_bytes(hashlib.sha256(document_key.encode()).digest()[:8], "big")
    return _SPLIT_OF_TENTH[number % 10]


def document_key(content: str) -> str:
    """SHA-256 of the text, blind to white space: copies that differ by line ends or indents are one document."""
    return hashlib.sha256(" ".join(content.split()).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """Token ids ``[rows, length]``, the keys of the documents in each row, and the corpus's name as their domain.

    ``left_out`` counts by reason what of the corpus (of a hub's: as far as it was streamed) is in no row.
    """

    tokens: Int64[Tensor, "rows length"]
    documents: list[tuple[str, ...]]
    domain: str
    left_out: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def digest(self) -> str:
        """SHA-256 of the token ids: what was really read, for a manifest."""
        return hashlib.sha256(self.tokens.numpy().astype("<i8").tobytes()).hexdigest()


def load_rows(
    spec: CorpusSpec,
    tokenizer: Any,
    split: str,
    count: int | None = None,
    length: int | None = None,
    fewer: bool = False,
) -> Rows:
    """The first ``count`` rows of a split (default ``spec.rows``), each of exactly ``length`` tokens (``spec.length``).

    ``split`` may be ``training``: the rows after the first ``spec.rows.fit`` of the fit split that share no document
    with any of those. ``tokenizer`` is a Hugging Face fast tokenizer. With shards, only this process's share of the
    ``count`` rows comes back. Raises :class:`KvxferError` if the corpus cannot be read or has fewer rows (unless
    ``fewer`` will do): how many, and what to lower.
    """
    if split not in (*SPLITS, TRAINING):
        raise KvxferError(f"split {split!r}: choose one of {', '.join((*SPLITS, TRAINING))}")
    count = spec.rows.of(split) if count is None else count
    length = spec.length if length is None else length
    at_least("length", length, 2)
    bos = leading_bos(tokenizer)
    reading = Reading()
    found = list(itertools.islice(_rows_of(spec, tokenizer, split, length - len(bos), len(bos), reading), count))
    reading.check(spec.name, spec.max_left_out)
    if len(found) < count and not fewer:
        has = f"{spec.name} has only {len(found)} rows of {length} tokens"
        raise KvxferError(f"corpus.rows.{split}={count}: {has} for {_whose(spec, split)}")
    share = found[spec.shard_index :: spec.num_shards]
    tokens = torch.tensor([bos + ids for ids, _ in share], dtype=torch.int64).reshape(len(share), length)
    return Rows(tokens, [keys for _, keys in share], spec.name, dict(sorted(reading.left_out.items())))


def _rows_of(spec: CorpusSpec, tokenizer: Any, split: str, room: int, leading: int, reading: Reading) -> Iterator[Row]:
    """All rows of a split, or those to train on, of ``room`` tokens; ``leading`` more will stand before them."""
    pack = _toy_rows if spec.kind in toy.KINDS else _packed
    if split == EVALUATION and pack is _packed:
        return _apart(spec, tokenizer, room, reading)
    if split != TRAINING:
        return pack(spec, tokenizer, split, room, reading)
    fitted = itertools.islice(pack(spec, tokenizer, "fit", spec.length - leading, Reading()), spec.rows.fit)
    return _left_over(pack(spec, tokenizer, "fit", room, reading), fitted)


def _whose(spec: CorpusSpec, split: str) -> str:
    """What a split gets of a corpus, and what to do if that is too little."""
    if split == TRAINING:
        fitted = f"its first corpus.rows.fit={spec.rows.fit} rows"
        gets = f"training, which gets those of split fit that share no document with {fitted}"
        return f"{gets}; lower corpus.rows.training, corpus.rows.fit or corpus.length, or add documents"
    gets = f"this split, which gets {_SPLIT_OF_TENTH.count(split)} of 10 documents (a file or a line of JSONL is one)"
    if split == EVALUATION and spec.kind not in toy.KINDS:
        gets += ", each row of a single document"
    return f"{gets}; lower corpus.rows.{split} or corpus.length, or add documents"


def toy_stories(split: str, count: int, tokens: int, seed: int = 0) -> list[Any]:
    """``count`` toy stories (``kvxfer.toy.world.Story``) of ``tokens`` tokens whose seeds belong to the split."""
    from kvxfer.toy.world import make_story

    return [make_story(number, tokens) for number in itertools.islice(_toy_seeds(split, seed), count)]


def toy_conversations(split: str, count: int, turns: int, tokens: int, seed: int = 0) -> dict[str, tuple[Any, ...]]:
    """The turns (``kvxfer.toy.conversation.Turn``) of ``count`` toy conversations, ``tokens`` each, by document key."""
    from kvxfer.toy.conversation import make_conversation

    seeds = itertools.islice(_toy_seeds(split, seed), count)
    return {_toy_key(number): make_conversation(number, turns, tokens) for number in seeds}


def leading_bos(tokenizer: Any) -> list[int]:
    """``[bos]`` if the tokenizer itself begins every text with its BOS, else ``[]``."""
    # Asked with a text: of the empty one, the EOS that a tokenizer may end texts with is the first token too, and it
    # is the BOS wherever one token is both.
    bos = tokenizer.bos_token_id
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    begun = tokenizer("a")["input_ids"][: len(plain) + 1]
    return [bos] if bos is not None and begun == [bos, *plain] else []


def _toy_key(seed: int) -> str:
    return f"toy/{seed}"


def _toy_seeds(split: str, seed: int) -> Iterator[int]:
    """Seeds of the split from a draw's first on, below those that the toy models were trained on."""
    if not 0 <= seed < TOY_DRAWS:
        raise KvxferError(
            f"corpus.seed or eval.seed asks for draw {seed} of the toy world, which has {TOY_DRAWS}; give a lower seed"
        )
    numbers = range(seed * _TOY_STORIES, TOY_DRAWS * _TOY_STORIES)
    return (n for n in numbers if split_of(_toy_key(n)) == split)


def _toy_rows(spec: CorpusSpec, tokenizer: Any, split: str, room: int, reading: Reading) -> Iterator[Row]:
    """One row of the toy world per seed; a tokenizer that cuts words keeps the row's beginning."""
    from kvxfer.toy.world import make_row, make_shuffled_row

    make = make_row if spec.kind == "toy" else make_shuffled_row
    for seed in _toy_seeds(split, spec.seed):
        try:
            words = make(seed, room)
        except ValueError as error:
            raise KvxferError(f"corpus.length={spec.length}: {error}") from error
        ids = _encode(tokenizer, " ".join(words))
        if len(ids) < room or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids):
            raise KvxferError(
                f"corpus={spec.name}: the pair's tokenizer does not know the toy world's words; "
                "use corpus=text corpus.path=<folder>"
            )
        yield ids[:room], (_toy_key(seed),)


def _cut(documents: Iterable[tuple[str, list[int]]], room: int) -> Iterator[Row]:
    """The ids of (key, ids) documents one after the other, cut to rows of ``room``; a shorter rest is dropped."""
    ids: list[int] = []
    keys: list[str] = []
    for key, own in documents:
        ids += own
        keys.append(key)
        start = 0
        while len(ids) - start >= room:
            yield ids[start : start + room], tuple(keys)
            start += room
            keys = [key]
        ids = ids[start:]
        if not ids:
            keys = []


def _left_over(rows: Iterable[Row], taken: Iterable[Row]) -> Iterator[Row]:
    """The rows that share no document with any row of ``taken``."""
    gone = {key for _, keys in taken for key in keys}
    return (row for row in rows if gone.isdisjoint(row[1]))


def _packed(spec: CorpusSpec, tokenizer: Any, split: str, room: int, reading: Reading) -> Iterator[Row]:
    """The split's own documents joined by EOS, cut to rows of ``room`` tokens; what is left at the end is dropped."""
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    documents = _documents(spec, split, reading)
    return _cut(((key, _encode(tokenizer, content)[: spec.document_tokens] + eos) for key, content in documents), room)


def _apart(spec: CorpusSpec, tokenizer: Any, room: int, reading: Reading) -> Iterator[Row]:
    """Rows of the evaluation split, each of one document: first one of every document, then a second one, and so on.

    So many rows are about as many documents as there can be. A shorter document, and the rest of a longer one, is left
    out.
    """
    later: list[tuple[str, list[int]]] = []
    for key, content in _documents(spec, EVALUATION, reading):
        ids = _encode(tokenizer, content)[: spec.document_tokens]
        if len(ids) >= room:
            yield ids[:room], (key,)
        if len(ids) >= 2 * room:
            later.append((key, ids[room:]))
    while later:
        yield from ((ids[:room], (key,)) for key, ids in later)
        later = [(key, ids[room:]) for key, ids in later if len(ids) >= 2 * room]


def _documents(spec: CorpusSpec, split: str, reading: Reading) -> Iterator[tuple[str, str]]:
    """The split's documents as (key, text) in an order that only the seed decides."""
    if spec.kind == "hub":
        texts = hub.documents(str(spec.dataset), spec.subset, spec.revision, spec.column, spec.seed)
        return _of_split(texts, split, reading)
    found: Iterator[tuple[str, str]]
    if spec.kind in python.KINDS:
        found = (item for item in python.documents(spec.kind) if split_of(item[0]) == split)
    else:
        found = _of_split(text.documents(str(spec.path), spec.glob, spec.column, reading), split, reading)
    # Files come by name, which often means by subject: a few rows from the front would be about one thing.
    return iter(sorted(found, key=lambda item: _draw(spec.seed, item[0])))


def _of_split(texts: Iterator[str], split: str, reading: Reading) -> Iterator[tuple[str, str]]:
    """Documents of one split, each once, without empty ones; ``reading`` counts those of all splits."""
    seen: set[bytes] = set()
    for number, raw in enumerate(texts, start=1):
        content = raw.encode("utf-8", "replace").decode()  # JSON may hold half a surrogate pair; tokenizers refuse it
        if not content.strip():
            reading.leave_out(EMPTY, f"document {number} is empty; leave such documents out, or allow more of them")
            continue
        reading.read += 1
        key = document_key(content)
        if bytes.fromhex(key) in seen:
            reading.leave_out(TWICE, key)
            continue
        seen.add(bytes.fromhex(key))
        if split_of(key) == split:
            yield key, content


def _draw(seed: int, key: str) -> bytes:
    return hashlib.sha256(f"{seed}/{key}".encode()).digest()


def _encode(tokenizer: Any, content: str) -> list[int]:
    return list(tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])
