"""Toy conversations: exact lengths, and questions that what was told so far answers."""

from __future__ import annotations

import pytest

from kvxfer.text.corpus import split_of, toy_conversations
from kvxfer.toy.conversation import SMALLEST_TURN, Turn, make_conversation
from kvxfer.toy.world import BOS, DOT, MAX_TURNS, SEP, VERBS, VOCABULARY

SHAPES = [(1, 13), (2, 14), (6, 16), (MAX_TURNS, 13), (MAX_TURNS, 15), (4, 60)]


def facts(turns: tuple[Turn, ...]) -> dict[tuple[str, ...], tuple[str, ...]]:
    words = [word for turn in turns for word in turn.words if word not in (BOS, SEP)]
    sentences = [tuple(sentence.split()) for sentence in " ".join(words).split(DOT)]
    return {sentence[:2]: sentence[2:] for sentence in sentences if len(sentence) == 3 and sentence[0] in VERBS}


@pytest.mark.parametrize(("turns", "tokens"), SHAPES)
def test_turns_have_their_exact_length_and_known_words(turns: int, tokens: int) -> None:
    for seed in range(60):
        told = make_conversation(seed, turns, tokens)
        assert [len(turn.words) for turn in told] == [tokens] * turns
        assert [turn.words[0] == BOS for turn in told] == [True] + [False] * (turns - 1)
        assert all(turn.words[-1] == SEP and set(turn.words) <= set(VOCABULARY) for turn in told)
        # The one filler word that calibration rows hardly ever have.
        assert not any("well" in turn.words for turn in told)


@pytest.mark.parametrize(("turns", "tokens"), SHAPES)
def test_every_question_is_answered_by_what_was_told_so_far(turns: int, tokens: int) -> None:
    for seed in range(60):
        told = make_conversation(seed, turns, tokens)
        assert len({turn.question.prompt for turn in told}) == turns
        for number, turn in enumerate(told):
            known, asked = facts(told[: number + 1]), turn.question
            at = asked.prompt if asked.hops == 1 else ("where", *known["who", asked.prompt[1]])
            assert known[at] == asked.answer
            assert len(asked.answer) == 1
            assert asked.answer in asked.candidates
            assert len(set(asked.candidates)) == len(asked.candidates) >= 2
            values = {answer for (verb, _), answer in known.items() if verb == asked.prompt[0]}
            names = {(key,) for verb, key in known if verb == "where"} if asked.prompt[0] == "who" else set()
            assert set(asked.candidates) <= values | names


def test_many_questions_take_two_hops() -> None:
    asked = [turn.question.hops for seed in range(60) for turn in make_conversation(seed, 6, 16)]
    assert 0.2 < asked.count(2) / len(asked) < 0.5


def test_conversations_belong_to_a_split_and_to_a_seed() -> None:
    first = toy_conversations("evaluation", 5, 3, 16)
    assert {split_of(key) for key in first} == {"evaluation"}
    assert first == toy_conversations("evaluation", 5, 3, 16)
    assert not set(first) & set(toy_conversations("evaluation", 5, 3, 16, seed=1))


@pytest.mark.parametrize(("turns", "tokens"), [(0, 16), (MAX_TURNS + 1, 16), (3, SMALLEST_TURN - 1)])
def test_what_cannot_be_told_is_refused(turns: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"ask for 1 to {MAX_TURNS} of {SMALLEST_TURN} or more"):
        make_conversation(0, turns, tokens)
