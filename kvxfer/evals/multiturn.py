"""A conversation that changes models at every turn, under each pattern: does what is lost add up?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared, unmapped, without_context
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.items import Item
from kvxfer.evals.scoring import Records, add_scores, empty_records
from kvxfer.evals.specs import DOWN, LARGE, PATTERNS, SMALL, UP, MultiturnSpec
from kvxfer.evals.statistics import NOTHING_HANDED, paired_difference, summarise
from kvxfer.handoff.conversation import Conversation
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.plan import Plan
from kvxfer.models.ancestry import find_ancestry
from kvxfer.models.hf.model import LoadedModel
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
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

    def to(self, receiver: str) -> Transfer:
        """How a model is handed something."""
        return next(transfer for (_, name), transfer in self.transfers.items() if name == receiver)

    def unmapped(self, receiver: str) -> list[str]:
        """What costs no map and a model can be handed: ``NOTHING_HANDED``, without ancestors where it has none."""
        kin = find_ancestry(self.to(receiver).pair) is not None
        return [name for name in NOTHING_HANDED if kin or name != "ancestor_copy"]


@torch.inference_mode()
def play(
    stage: Stage, talks: Sequence[Talk], patterns: Sequence[str], batch_size: int, advance: Callable[[int], None]
) -> tuple[list[dict[str, Any]], dict[str, list[Handed]]]:
    """Every conversation under every pattern, and each model by itself.

    Returns:
        A record per turn of each conversation, conversations one after the other: ``Records``,
        with ``turn`` (from 1 on); conditions are the patterns and both models by name. And, per pattern, what was
        handed over at every turn.
    """
    records: list[dict[str, Any]] = []
    handed: dict[str, list[Handed]] = {}
    answering = {receiver for pattern in patterns for _, receiver in PATTERNS[pattern]}
    for start in range(0, len(talks), batch_size):
        batch = talks[start : start + batch_size]
        players: dict[str, Iterator[tuple[Prepared, Handed | None]]] = {
            **{name: _alone(stage, name, batch) for name in (SMALL, LARGE)},
            **{pattern: _handing_over(stage, pattern, batch) for pattern in patterns},
            **{f"{n} {each}": _unmapped(stage, n, each, batch) for n in answering for each in stage.unmapped(n)},
        }
        played: list[Records] = []
        handed = {pattern: [] for pattern in patterns}
        for turn in range(len(batch[0])):
            items = [talk[turn].item for talk in batch]
            played.append({key: {**record, "turn": turn + 1} for key, record in empty_records(items).items()})
            for name, player in players.items():
                prepared, given = next(player)
                if given is not None:
                    handed[name].append(given)
                add_scores(played[-1], name, prepared, items, None)
        records += [record for row in zip(*(turn.values() for turn in played), strict=True) for record in row]
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
    transfers = {direction: stage.transfers[direction] for direction in PATTERNS[pattern]}
    talk = Conversation(stage.models, transfers, stage.max_hops)
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


def _unmapped(stage: Stage, name: str, control: str, batch: Sequence[Talk]) -> Iterator[tuple[Prepared, None]]:
    """One model that is handed all but the last tokens of what was said without any map (``conditions.unmapped``).

    Without context it reads the turn's own text, after the first token.
    """
    said = torch.zeros(len(batch), 0, dtype=torch.int64)
    transfer = stage.to(name)
    for turn in range(len(batch[0])):
        text, reply = _said(batch, turn)
        before, said = said, torch.cat([said, text], dim=1)
        head, tail = transfer.split(said)
        if control == "no_context":
            yield without_context(transfer.pair, said, text if before.shape[1] else text[:, 1:]), None
        else:
            exact, read = transfer.pair.target.prefill(head), transfer.pair.source.prefill(head)
            own = exact.span(0, transfer.plan.mapped_span(said.shape[1])[0])
            yield Prepared(stage.models[name], unmapped(transfer.pair, exact, read, own)[control], tail), None
        said = torch.cat([said, reply], dim=1)


def _prepared(talk: Conversation, name: str) -> Prepared:
    """The model, what it has, and what it still has to read."""
    held = talk.held(name)
    return Prepared(talk.models[name], held.kv, talk.ids[:, held.tokens :])


@dataclass(frozen=True)
class Multiturn(MultiturnSpec, Evaluation):
    """``eval=multiturn``: what it measures."""

    def needs_reverse(self, reverse: bool) -> bool:
        """Whether a pattern hands over in the other direction than the run's own."""
        wanted = {direction for pattern in self.patterns for direction in PATTERNS[pattern]}
        return bool(wanted - {DOWN if reverse else UP})

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        toy = corpus.kind == "toy"
        longest = self.turns * (self.segment + 4) if toy else (self.turns + 1) * self.segment
        pair.check_length(longest, "eval.turns, eval.segment")

    def measure(self, subject: Subject) -> dict[str, Any]:
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        self.check(pair, subject.corpus, subject.plan)
        if toy:
            talks = toy_talks(self.stories, self.turns, self.segment, pair.tokenizer, self.seed)
        else:
            talks = text_talks(subject.corpus, self.rows, self.turns, self.segment, pair.tokenizer)
        with progress(f"multiturn {pair.name}", len(talks), "conversations") as advance:
            records, handed = play(self._stage(subject), talks, self.patterns, self.batch_size, advance)
        found = {pattern: summarise_pattern(records, pattern, handed[pattern]) for pattern in self.patterns}
        models = {"small": pair.source.name, "large": pair.target.name}
        if pair.spec.reverse:
            models = {"small": pair.target.name, "large": pair.source.name}
        setting = {"turns": self.turns, "segment": self.segment, "max_hops": self.max_hops, "models": models}
        return {**setting, "conversations": len(talks), "answers": toy, "patterns": found, "items": records}

    def _stage(self, subject: Subject) -> Stage:
        own, other = (DOWN, UP) if subject.pair.spec.reverse else (UP, DOWN)
        transfers = {own: subject.transfer}
        if subject.reverse is not None:
            transfers[other] = subject.reverse
        models = dict(zip(own, (subject.pair.source, subject.pair.target), strict=True))
        return Stage(models, transfers, self.max_hops)


def summarise_pattern(records: Sequence[Mapping[str, Any]], pattern: str, handed: Sequence[Handed]) -> dict[str, Any]:
    """One pattern against the answering model's own prefill (``ceiling``) and the small model alone (``source``)."""
    by_turn: list[list[dict[str, Any]]] = [[] for _ in handed]
    answering = {given.answering for given in handed}
    # A pruned model has no ancestors in the whole one: turns are pooled over what every model that answers has.
    shared = [each for each in NOTHING_HANDED if all(f"{name} {each}" in records[0]["nats"] for name in answering)]
    for record in records:
        number = record["turn"] - 1
        by_turn[number].append(_compared(record, pattern, handed[number].answering, shared))
    turns = [
        {"turn": number + 1, **asdict(given), **_without_kinds(summarise(items))}
        for number, (given, items) in enumerate(zip(handed, by_turn, strict=True))
    ]
    slopes = {f"slope_{measure}": _slope(by_turn, handed, measure) for measure in ("nats", "correct")}
    return {"turns": turns, "pooled": _without_kinds(summarise([i for items in by_turn for i in items])), **slopes}


def _compared(record: Mapping[str, Any], pattern: str, answering: str, controls: Sequence[str]) -> dict[str, Any]:
    """The record with the conditions that a turn of a pattern is compared with."""
    names = {"ceiling": answering, "source": SMALL, "mapped": pattern}
    names |= {each: f"{answering} {each}" for each in controls}
    scores = {
        measure: {condition: record[measure][name] for condition, name in names.items()}
        for measure in ("nats", "correct")
        if record.get(measure)
    }
    return {**record, **scores}


def _without_kinds(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "by_kind"}


def _slope(
    by_turn: Sequence[Sequence[Mapping[str, Any]]], handed: Sequence[Handed], measure: str
) -> dict[str, float | int] | None:
    """How much the drift grows each turn: the mean over conversations of each one's least-squares slope.

    Turns are centred for each answering model by itself, so that the difference between two models is no slope. Turns
    before anything was mapped have no drift and are left out. None if that leaves no model with two turns.
    """
    chosen = [n for n, given in enumerate(handed) if given.mapped]
    if measure not in by_turn[0][0] or not chosen:
        return None
    x = np.array(chosen, dtype=np.float64)
    for name in (SMALL, LARGE):
        own = [n for n, turn in enumerate(chosen) if handed[turn].answering == name]
        if own:
            x[own] -= x[own].mean()
    if not np.any(x):
        return None
    drift: Float[np.ndarray, "conversations turns"] = np.array(
        [[_drift(item, measure) for item in by_turn[turn]] for turn in chosen], dtype=np.float64
    ).T
    slopes = drift @ x / (x @ x)
    return paired_difference(slopes, np.zeros_like(slopes), [item["document"] for item in by_turn[0]])


def _drift(item: Mapping[str, Any], measure: str) -> float:
    per = item["tokens"] if measure == "nats" else 1
    return (float(item[measure]["mapped"]) - float(item[measure]["ceiling"])) / per
