"""Batches of training text, with what the loss must know of each word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvxfer.toy.world import BOS, KINDS, TRAINING_SEEDS_FROM, VOCABULARY, make_marked_row

TRAINED = (*KINDS, "repeat")  # what accuracy is reported on
WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}
SPECIAL_WORDS = 4  # the first words of the vocabulary, which random sequences leave out
ANSWER_WEIGHT, TWO_HOP_WEIGHT, OTHER_WEIGHT, REPEAT_WEIGHT = 1.0, 1.5, 0.03, 0.5


@dataclass(frozen=True)
class Bucket:
    """One shape of batch: this many rows of this many tokens, each with so many turns (drawn if None)."""

    tokens: int
    rows: int
    turns: int | None = None


@dataclass(frozen=True)
class Batch:
    """Token ids, the weight of each in the loss, and the kind of question it answers (an index in TRAINED, or -1)."""

    ids: Int[Tensor, "rows tokens"]
    weights: Float[Tensor, "rows tokens"]
    kinds: Int[Tensor, "rows tokens"]
    owners: Int[Tensor, "rows tokens"]  # at the last word of a two-hop prompt: who has the thing asked about; else -1


def draw_batch(seed: int, step: int, buckets: Sequence[Bucket], repeats: bool) -> Batch:
    """The batch of this step, in one of these shapes; with `repeats`, half of it is random words repeated."""
    rng = random.Random(seed * 2**32 + step)
    bucket = rng.choice(buckets) if len(buckets) > 1 else buckets[0]
    repeated_rows = bucket.rows // 2 if repeats else 0
    first_seed = TRAINING_SEEDS_FROM + (seed * 2**20 + step) * 2**12
    rows = [make_marked_row(first_seed + i, bucket.tokens, bucket.turns) for i in range(bucket.rows - repeated_rows)]
    ids = torch.tensor([[WORD_ID[word] for word in words] for words, _ in rows])
    kinds = torch.tensor([marks for _, marks in rows])
    owners = torch.tensor([_owners(words, marks) for words, marks in rows])
    weights = torch.where(kinds >= 0, ANSWER_WEIGHT, OTHER_WEIGHT)
    weights[kinds == KINDS.index("two_hop")] = TWO_HOP_WEIGHT
    if not repeats:
        return Batch(ids, weights, kinds, owners)
    repeated, again = _repeated_words(rng, repeated_rows, bucket.tokens)
    return Batch(
        torch.cat([ids, repeated]),
        torch.cat([weights, again * REPEAT_WEIGHT]),
        torch.cat([kinds, torch.where(again, TRAINED.index("repeat"), -1)]),
        torch.cat([owners, torch.full_like(repeated, -1)]),
    )


def _owners(words: list[str], marks: list[int]) -> list[int]:
    """For the last word of each two-hop prompt the id of the person in between, -1 elsewhere."""
    owner = {key: name for verb, key, name in zip(words, words[1:], words[2:], strict=False) if verb == "who"}
    asked = [mark == KINDS.index("two_hop") for mark in [*marks[1:], -1]]
    return [WORD_ID[owner[word]] if two_hop else -1 for word, two_hop in zip(words, asked, strict=True)]


def _repeated_words(
    rng: random.Random, rows: int, tokens: int
) -> tuple[Int[Tensor, "rows tokens"], Bool[Tensor, "rows tokens"]]:
    """Random words over and over, and which of them can be known from an earlier round.

    Every row has its own period: with a common one, attention to a fixed distance would do, and no look-up would form.
    """
    ids = torch.full((rows, tokens), WORD_ID[BOS])
    again = torch.zeros(rows, tokens, dtype=torch.bool)
    for row in range(rows):
        period = rng.randint(tokens // 5, tokens // 2)
        words = rng.choices(range(SPECIAL_WORDS, len(VOCABULARY)), k=period)
        ids[row, 1:] = torch.tensor([words[i % period] for i in range(tokens - 1)])
        again[row, period + 2 :] = True
    return ids, again
