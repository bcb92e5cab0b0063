"""Conversations that change models at every turn, played under each pattern and scored at every turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared
from kvxfer.evals.items import Item
from kvxfer.evals.scoring import score
from kvxfer.evals.specs import LARGE, PATTERNS, SMALL
from kvxfer.handoff.conversation import Conversation
from kvxfer.handoff.transfer import Transfer
from kvxfer.models.hf.model import LoadedModel
from kvxfer.text.corpus import load_rows, toy_conversations
from kvxfer.text.spec import CorpusSpec


@dataclass(frozen=True)
class Turn:
    """What is said before the question, what is asked, and what is said in reply (nothing where text just goes on)."""

    text: tuple[int, ...]
    item: Item
    reply: tuple[int, ...]


Talk = Sequence[Turn]


def toy_talks(count: int, turns: int, tokens: int, tokenizer: Any, seed: int) -> list[Talk]:
    """Conversations of the toy world: each turn tells some facts, and a question about all so far is answered."""

    def ids(*words: str) -> tuple[int, ...]:
        return tuple(tokenizer.convert_tokens_to_ids(list(words)))

    try:
        found = toy_conversations("evaluation", count, turns, tokens, seed)
    except ValueError as error:
        raise KvxferError(f"eval.turns={turns}, eval.segment={tokens}: {error}") from error
    talks: list[Talk] = []
    for document, told in found.items():
        talk = []
        for number, turn in enumerate(told):
            asked = turn.question
            text, answer = ids(*turn.words, *asked.prompt), ids(*asked.answer)
            candidates = tuple(ids(*candidate) for candidate in asked.candidates)
            item = Item(f"{document}/{number}", document, asked.kind, text, len(text), answer, candidates)
            talk.append(Turn(text, item, (*answer, *ids("."))))
        talks.append(talk)
    return talks


def text_talks(corpus: CorpusSpec, count: int, turns: int, tokens: int, tokenizer: Any) -> list[Talk]:
    """Rows of text, a segment each turn; what is scored at a turn is the segment that follows."""
    rows = load_rows(corpus, tokenizer, "evaluation", count, (turns + 1) * tokens)
    talks: list[Talk] = []
    for n, (row, documents) in enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True)):
        parts = [tuple(row[start : start + tokens]) for start in range(0, len(row), tokens)]
        items = [
            Item(f"{n}/{turn}", documents[0], rows.domain, parts[turn], tokens, parts[turn + 1])
            for turn in range(turns)
        ]
        talks.append([Turn(parts[turn], item, ()) for turn, item in enumerate(items)])
    return talks


@dataclass(frozen=True)
class Handed:
    """Where the answering model's cache came from at one turn, before the tokens that it holds back.

    Attributes:
        answering: the model that answers.
        hops: the most maps between a token and the text.
        mapped: how many tokens were mapped.
        tokens: how many there are.
    """

    answering: str
    hops: int
    mapped: int
    tokens: int


@dataclass(frozen=True)
class Stage:
    """The two models, and how they hand over."""

    models: Mapping[str, LoadedModel]
    transfers: Mapping[tuple[str, str], Transfer]
    max_hops: int | None

    def opened(self, pattern: str) -> Conversation:
        """A conversation before its first word."""
        wanted = {direction: self.transfers[direction] for direction in PATTERNS[pattern]}
        return Conversation(self.models, wanted, self.max_hops)


@torch.inference_mode()
def play(
    stage: Stage, talks: Sequence[Talk], patterns: Sequence[str], batch_size: int, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, list[Handed]]]:
    """Every conversation under every pattern, and each model by itself.

    Returns:
        A record per turn of each conversation, conversations one after the other: as those of ``evaluation.Records``,
        with ``turn`` (from 1 on); conditions are the patterns and both models by name. And, per pattern, what was
        handed over at every turn.
    """
    records: list[dict[str, Any]] = []
    handed: dict[str, list[Handed]] = {}
    for start in range(0, len(talks), batch_size):
        batch = talks[start : start + batch_size]
        players: dict[str, Iterator[tuple[Prepared, Handed | None]]] = {
            **{name: _alone(stage, name, batch) for name in (SMALL, LARGE)},
            **{pattern: _handing_over(stage, pattern, batch) for pattern in patterns},
        }
        played: list[list[dict[str, Any]]] = [[] for _ in batch]
        handed = {pattern: [] for pattern in patterns}
        for turn in range(len(batch[0])):
            items = [talk[turn].item for talk in batch]
            for row, item in zip(played, items, strict=True):
                record = {"id": item.id, "document": item.document, "kind": item.kind, "turn": turn + 1}
                more: dict[str, Any] = {"chance": item.chance, "correct": {}} if item.candidates else {}
                row.append({**record, "tokens": len(item.answer), "nats": {}, **more})
            for name, player in players.items():
                prepared, given = next(player)
                if given is not None:
                    handed[name].append(given)
                for row, result in zip(played, score(prepared, items, None), strict=True):
                    row[-1]["nats"][name] = result.nats
                    if result.correct is not None:
                        row[-1]["correct"][name] = result.correct
        records += [record for row in played for record in row]
        advance(len(batch))
    return records, handed


def _said(batch: Sequence[Talk], turn: int) -> tuple[Int64[Tensor, "batch text"], Int64[Tensor, "batch reply"]]:
    text = torch.tensor([talk[turn].text for talk in batch])
    return text, torch.tensor([talk[turn].reply for talk in batch], dtype=torch.int64).reshape(len(batch), -1)


def _alone(stage: Stage, name: str, batch: Sequence[Talk]) -> Iterator[tuple[Prepared, None]]:
    """One model that reads everything itself."""
    talk = Conversation({name: stage.models[name]}, {})
    for turn in range(len(batch[0])):
        text, reply = _said(batch, turn)
        talk.append(text)
        talk.read(name, talk.tokens - 1)
        yield _prepared(talk, name), None
        talk.append(reply)


def _handing_over(stage: Stage, pattern: str, batch: Sequence[Talk]) -> Iterator[tuple[Prepared, Handed]]:
    """Both models by turns.

    ``up`` and ``down``: one reads whatever is said, the other answers. ``ping_pong``: each turn's model reads what is
    said and answers; what was said before, it is handed.
    """
    talk = stage.opened(pattern)
    for turn in range(len(batch[0])):
        text, reply = _said(batch, turn)
        talk.append(text)
        directions = PATTERNS[pattern]
        sender, receiver = directions[(turn + 1) % len(directions)]
        before_last = talk.tokens - stage.transfers[sender, receiver].plan.hold_back
        if pattern != "ping_pong":
            talk.read(sender)
        talk.receive(receiver, sender, before_last)
        talk.read(receiver, before_last)
        held = talk.held(receiver)
        yield _prepared(talk, receiver), Handed(receiver, held.depth, int((~held.own).sum()), held.tokens)
        talk.append(reply)
        talk.read(receiver)


def _prepared(talk: Conversation, name: str) -> Prepared:
    """The model, what it has, and what it still has to read."""
    held = talk.held(name)
    return Prepared(talk.models[name], held.kv, talk.ids[:, held.tokens :])
