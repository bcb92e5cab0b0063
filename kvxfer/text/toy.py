"""Rows of the toy world: as its models know them, in another order, or longer with the same end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("toy", "toy_shuffled")
"""``toy_shuffled``: the sentences of a row in random order, its questions with their answers among them. The words are
the same and so is each row's split; what follows what is not."""


def lengthened(tokenizer: Any, head: Sequence[int], key: str, tokens: int) -> list[int]:
    """A row's first token ids with filler sentences put between its sentences, so that there are ``tokens`` of them.

    The sentences are those that tell nothing that is asked; where they go is random, but the same for the same ``key``,
    and always within the story. What follows the story's last full stop in ``head`` stays last, so that the rest of
    the row goes on as it did.
    """
    from kvxfer.toy.world import DOT, SEP, filler_between

    stop, bar = tokenizer.convert_tokens_to_ids([DOT, SEP])
    story = list(head).index(bar) if bar in head else len(head)
    ends = [1, *(n + 1 for n, token in enumerate(head[:story]) if token == stop)]
    first, *parts = (list(head[a:b]) for a, b in zip([0, *ends], [*ends, len(head)], strict=True))
    found, room = first, tokens - len(head)
    for words, part in zip(filler_between(f"{key} {tokens}", room, len(ends)), parts, strict=True):
        # A tokenizer that cuts words would give more ids than words.
        ids = list(tokenizer(" ".join(words), add_special_tokens=False)["input_ids"])[:room]
        room -= len(ids)
        found = [*found, *ids, *part]
    return found
