"""Rows made of documents, each with the keys of the documents that it touches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Row = tuple[list[int], tuple[str, ...]]
"""Token ids, and the keys of their documents."""


def packed(documents: Iterable[tuple[str, list[int]]], room: int) -> Iterator[Row]:
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


def left_over(rows: Iterable[Row], taken: Iterable[Row]) -> Iterator[Row]:
    """The rows that share no document with any row of ``taken``."""
    gone = {key for _, keys in taken for key in keys}
    return (row for row in rows if gone.isdisjoint(row[1]))
