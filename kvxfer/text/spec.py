"""What text a run reads, as settings. Nothing here is heavy: a command's ``--help`` reads it too.

In every room a field's ``metadata`` may say what is special of a setting (``kvxfer.experiment`` reads it):

- ``id``: whether it decides a run's id (it does, unless this is False), or a function of the whole spec that gives what
  decides in its place: a digest of what a path holds, or None where the setting is not read.
- ``given``: what a config says unless it is told otherwise, where that is no value of the field itself (``auto``).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.text import folder, python, toy

EVALUATION = "evaluation"
SPLITS = ("fit", "validation", "held_out", EVALUATION)
TRAINING = "training"  # what is left of the fit split; it can be asked for like a split
KINDS = (*toy.KINDS, "text", "hub", *python.KINDS)
TOY_DRAWS = 1_000_000


@dataclass(frozen=True)
class RowCounts:
    """How many rows each split gives, and how many there are to train on."""

    fit: int = 512
    validation: int = 128
    held_out: int = 64
    evaluation: int = 64
    training: int = 512

    def of(self, split: str) -> int:
        return int(getattr(self, split))


def _content(spec: CorpusSpec) -> dict[str, str] | None:
    """What there is to read, wherever it lies; a toy corpus and one of the hub are told by other fields."""
    if spec.kind == "text":
        return {"sha256": folder.digest(str(spec.path), spec.glob)}
    if spec.kind in python.KINDS:
        return {"python": platform.python_version(), "sha256": python.digest(spec.kind)}
    return None


def _read_by(key: str, *kinds: str) -> dict[str, Any]:
    """Of a field that only these kinds of corpus read."""
    return {"id": lambda spec: getattr(spec, key) if spec.kind in kinds else None}


@dataclass(frozen=True)
class CorpusSpec:
    """What text a run reads; the fields are the keys of ``configs/corpus/*.yaml``.

    ``length`` is tokens per row. ``document_tokens`` is how many first tokens of a document are read (None: all).
    ``max_left_out`` is the share of documents that can't be read, or are empty, above which reading fails.
    ``skip_first`` is how many first tokens of a row stay out of the moments. ``seed``
    picks another draw of the same corpus: other toy stories, another order of the documents. ``num_shards`` processes
    share the rows, and this one takes ``rows[shard_index::num_shards]``.

    Raises:
        KvxferError: a value or a combination of values makes no sense; it names the key.
    """

    name: str
    kind: str
    length: int
    path: str | None = field(default=None, metadata={"id": _content})
    glob: str = field(default="**/*", metadata={"id": False})
    column: str = field(default="text", metadata=_read_by("column", "text", "hub"))
    dataset: str | None = field(default=None, metadata=_read_by("dataset", "hub"))
    subset: str | None = field(default=None, metadata=_read_by("subset", "hub"))
    revision: str | None = field(default=None, metadata=_read_by("revision", "hub"))
    document_tokens: int | None = None
    max_left_out: float = field(default=0.05, metadata={"id": False})
    rows: RowCounts = field(default_factory=RowCounts)
    skip_first: int = 4
    num_shards: int = field(default=1, metadata={"id": False})
    shard_index: int = field(default=0, metadata={"id": False})
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise KvxferError(f"corpus.kind={self.kind!r}: choose one of {', '.join(KINDS)}")
        at_least("length", self.length, 2)
        at_least("skip_first", self.skip_first, 0)
        if self.document_tokens is not None:
            at_least("document_tokens", self.document_tokens, 1)
        if not 0 <= self.max_left_out <= 1:
            raise KvxferError(f"corpus.max_left_out={self.max_left_out}: must be a share between 0 and 1")
        at_least("num_shards", self.num_shards, 1)
        at_least("seed", self.seed, 0)
        for split in (*SPLITS, TRAINING):
            at_least(f"rows.{split}", self.rows.of(split), 0)
        if self.skip_first >= self.length:
            raise KvxferError(
                f"corpus.skip_first={self.skip_first} leaves nothing of corpus.length={self.length}; lower it"
            )
        if not 0 <= self.shard_index < self.num_shards:
            raise KvxferError(
                f"corpus.shard_index={self.shard_index} with corpus.num_shards={self.num_shards}: "
                f"give an index from 0 to {self.num_shards - 1}"
            )
        if self.kind in toy.KINDS and self.seed >= TOY_DRAWS:
            raise KvxferError(f"corpus.seed={self.seed}: the toy world has {TOY_DRAWS} draws; give a lower seed")
        if self.kind == "text" and not self.path:
            raise KvxferError("corpus.path is not set: corpus=text needs corpus.path=<folder of .txt, .md or .jsonl>")
        if self.kind == "hub" and not self.dataset:
            raise KvxferError("corpus.dataset is not set: a hub corpus needs corpus.dataset=<owner/name>")


def at_least(key: str, value: int, least: int) -> None:
    """Refuse a key of group ``corpus`` below ``least``."""
    if value < least:
        raise KvxferError(f"corpus.{key}={value}: must be at least {least}")
