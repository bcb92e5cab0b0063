"""Conversations of the toy world: every turn tells some facts and ends with a question about all that was told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvxfer.toy.world import (
    BOS,
    MAX_TURNS,
    SEP,
    SHORTEST_FILLER,
    Fact,
    Question,
    Size,
    draw_facts,
    draw_questions,
    filler,
    generator_of,
)

SMALLEST_TURN = 13  # BOS, two facts of four words, the shortest filler, SEP


@dataclass(frozen=True)
class Turn:
    """What a turn tells (from BOS in the first one, to SEP in all), and the question that it ends with."""

    words: tuple[str, ...]
    question: Question


def make_conversation(seed: int, turns: int, tokens: int) -> tuple[Turn, ...]:
    """Turns of exactly ``tokens`` words each, every one with a question about all that was told, not asked before.

    Its candidates were told too and are two or more; its answer is one word.
    """
    if not 1 <= turns <= MAX_TURNS or tokens < SMALLEST_TURN:
        raise ValueError(f"{turns} turns of {tokens} tokens: ask for 1 to {MAX_TURNS} of {SMALLEST_TURN} or more")
    rng = generator_of(seed, 2)
    facts = draw_facts(rng, Size(people=4, objects=6, colors=4, counts=4))
    left = draw_questions(rng, facts, one_hop_per_two_hop=3.0)
    # First come two people's places and two facts of another kind: a question needs two candidates.
    kinds = rng.sample(("where", rng.choice(("color", "count"))), 2)
    first = [fact for kind in kinds for fact in [other for other in facts if other.kind == kind][:2]]
    rest = [fact for fact in facts if fact not in first]
    facts = first + rng.sample(rest, len(rest))
    each = -(-len(facts) // turns)
    told: list[Fact] = []
    made: list[Turn] = []
    for turn in range(turns):
        room = tokens - (1 if turn else 2)
        new = facts[len(told) :][: min(each, _most_facts(room))]
        told += new
        sentences = [fact.words for fact in new]
        sentences += filler(rng, room - 4 * len(new))
        rng.shuffle(sentences)
        words = [word for sentence in sentences for word in sentence]
        hops = rng.choice((1, 2))
        left.sort(key=lambda question: question.hops != hops)
        asked = next(found for question in left if (found := _told(question, told)))
        left = [question for question in left if question.prompt != asked.prompt]
        made.append(Turn((*([] if turn else [BOS]), *words, SEP), asked))
    return tuple(made)


def _most_facts(room: int) -> int:
    """As many facts as leave no rest, or one that a filler sentence fits: what fills less is a rare word."""
    return room // 4 if room % 4 in (0, SHORTEST_FILLER) else room // 4 - 1


def _told(question: Question, told: Sequence[Fact]) -> Question | None:
    """The question with the candidates told so far; None if the answer does not follow yet or is the only candidate."""
    known: dict[tuple[str, ...], tuple[str, ...]] = {(fact.kind, fact.key): fact.answer for fact in told}
    verb, key = question.prompt
    answer = known.get((verb, key) if question.hops == 1 else ("where", *known.get(("who", key), ())))
    values = {fact.answer for fact in told if fact.kind == verb}
    if verb == "who":
        values |= {(fact.key,) for fact in told if fact.kind == "where"}
    candidates = tuple(candidate for candidate in question.candidates if candidate in values)
    return replace(question, candidates=candidates) if answer and len(candidates) > 1 else None
