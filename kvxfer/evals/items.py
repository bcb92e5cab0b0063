"""What is scored: prompts with answers to choose from, or text that follows a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.text.corpus import load_rows, toy_stories
from kvxfer.text.spec import CorpusSpec


@dataclass(frozen=True)
class Item:
    """One thing to score.

    Attributes:
        prompt: token ids that the models are given; the first ``context`` of them are the story or prefix.
        answer: the token ids that should follow.
        candidates: answers to choose from, or none for running text. The right one is the answer or begins it.
    """

    id: str
    document: str
    kind: str
    prompt: tuple[int, ...]
    context: int
    answer: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...] = ()

    @property
    def right(self) -> int:
        """The place of the right candidate."""
        return next(n for n, candidate in enumerate(self.candidates) if self.answer[: len(candidate)] == candidate)


@dataclass(frozen=True)
class Batch:
    """Items of equal shape; ``donors`` are prompts about other documents, for the wrong-donor control."""

    items: list[Item]
    prompt: Int64[Tensor, "batch prompt"]
    context: int
    donors: Int64[Tensor, "batch prompt"]


def toy_items(tokenizer: Any, length: int, stories: int, questions: int, seed: int) -> list[Item]:
    """Questions about stories that belong to the evaluation split."""
    items = []
    for story in toy_stories("evaluation", stories, length, seed):
        for number, question in enumerate(story.questions[:questions]):

            def ids(words: tuple[str, ...]) -> tuple[int, ...]:
                return tuple(tokenizer.convert_tokens_to_ids(list(words)))

            items.append(
                Item(
                    id=f"{story.seed}/{number}",
                    document=f"toy/{story.seed}",
                    kind=question.kind,
                    prompt=ids((*story.words, *question.prompt)),
                    context=len(story.words) - 1,
                    answer=ids(question.answer),
                    candidates=tuple(ids(candidate) for candidate in question.candidates),
                )
            )
    return items


def text_items(corpus: CorpusSpec, tokenizer: Any, length: int, prefix: int | None = None) -> list[Item]:
    """Rows of the evaluation split, cut in two: the prefix is handed over, the rest is scored.

    A row is of one document (``load_rows``). Without ``prefix`` it is half of the row.
    """
    prefix = length // 2 if prefix is None else prefix
    if not 2 <= prefix < length:
        raise KvxferError(f"eval.prefix={prefix} must be between 2 and eval.length={length} less one")
    rows = load_rows(corpus, tokenizer, "evaluation", length=length)
    if len(rows) < 2:
        raise KvxferError(f"corpus.rows.evaluation={len(rows)}: an evaluation of text needs 2 rows or more")
    return [
        Item(str(n), documents[0], rows.domain, tuple(tokens[:prefix]), prefix, tuple(tokens[prefix:]))
        for n, (tokens, documents) in enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True))
    ]


def choice_items(
    corpus: CorpusSpec,
    tokenizer: Any,
    length: int,
    choices: int,
    answer: int = 16,
    questions: int = 5,
    score_rest: bool = False,
) -> list[Item]:
    """Which text follows? So many ``choices`` of ``answer`` tokens: the row's own, and those of other documents.

    A row gives so many ``questions``, at places spread over its second half; the others' continuations are cut at the
    same place of rows that are spread over the split. With ``score_rest`` the nats are those of the whole rest of the
    row, as without choices: one cache then gives both measures.
    """
    rows = load_rows(corpus, tokenizer, "evaluation", length=length)
    first, last = length // 2, length - answer
    if last < first or last < 2:
        raise KvxferError(f"eval.answer={answer} does not fit the second half of rows of {length} tokens")
    step = (last - first) / max(questions - 1, 1)
    places = sorted({first + round(step * n) for n in range(questions)})
    items = []
    for n, (tokens, documents) in enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True)):
        others = [row for row in range(len(rows)) if not set(rows.documents[row]) & set(documents)]
        if len(others) < choices - 1:
            raise KvxferError(
                f"eval.choices={choices}: only {len(others)} rows are about other documents than row {n}; "
                "raise corpus.rows.evaluation"
            )
        drawn = [others[(n + len(others) * k // (choices - 1)) % len(others)] for k in range(choices - 1)]
        for cut in places:
            parts = [tuple(rows.tokens[row, cut : cut + answer].tolist()) for row in (n, *drawn)]
            items.append(
                Item(
                    id=f"{n}/{cut}",
                    document=documents[0],
                    kind=f"{rows.domain}: which text follows",
                    prompt=tuple(tokens[:cut]),
                    context=cut,
                    answer=tuple(tokens[cut:]) if score_rest else parts[0],
                    candidates=tuple(parts),
                )
            )
    return items


def batches(items: list[Item], size: int) -> Iterator[Batch]:
    """Slices of items of equal shape, each with its donors."""
    donors = dict(zip((item.id for item in items), donors_of(items), strict=True))
    shapes: dict[tuple[int, int, int], list[Item]] = {}
    for item in items:
        shapes.setdefault((len(item.prompt), item.context, len(item.answer)), []).append(item)
    for (_, context, _), group in sorted(shapes.items()):
        for start in range(0, len(group), size):
            part = group[start : start + size]
            prompts = torch.tensor([item.prompt for item in part])
            yield Batch(part, prompts, context, torch.tensor([donors[item.id].prompt for item in part]))


def equal_lengths(things: Sequence[Any], size: int, key: Callable[[Any], int] = len) -> Iterator[list[Any]]:
    """Slices of things of one length, longest first: what does not fit into memory fails at once."""
    by_length: dict[int, list[Any]] = {}
    for thing in things:
        by_length.setdefault(key(thing), []).append(thing)
    for _, group in sorted(by_length.items(), reverse=True):
        for start in range(0, len(group), size):
            yield group[start : start + size]


def donors_of(items: list[Item]) -> list[Item]:
    """For each item another one of the same prompt length about another document.

    It is looked for from half the list away on, since text rows that follow one another may share a document.
    """
    lengths: dict[int, list[Item]] = {}
    for item in items:
        lengths.setdefault(len(item.prompt), []).append(item)
    found: dict[str, Item] = {}
    for group in lengths.values():
        count = len(group)
        for n, item in enumerate(group):
            others = (group[(n + count // 2 + step) % count] for step in range(count))
            donor = next((other for other in others if other.document != item.document), None)
            if donor is None:
                raise KvxferError(
                    f"all items are about {item.document}, and the wrong-donor control needs two documents: "
                    "raise eval.stories (toy) or corpus.rows.evaluation"
                )
            found[item.id] = donor
    return [found[item.id] for item in items]
