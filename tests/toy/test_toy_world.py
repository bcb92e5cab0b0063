"""The generated world: exact lengths, answers that follow from the story alone, determinism."""

from __future__ import annotations

from collections import Counter

import pytest

from kvxfer.toy.world import (
    BOS,
    FILLER,
    KINDS,
    MAX_TURNS,
    SEP,
    TRAINING_SEEDS_FROM,
    VERBS,
    VOCABULARY,
    Size,
    Story,
    make_marked_row,
    make_row,
    make_story,
)

SMALLEST = Size().tokens
LENGTHS = (SMALLEST, 27, 28, 29, 44, 64, 100, 128, 256, 500, 1000)


def facts_of(story: Story) -> dict[tuple[str, str], tuple[str, ...]]:
    """Read the facts back from the story's text: what stands between a verb with its key and the dot."""
    told = [word for word in story.words[1:-1] if word not in FILLER]
    sentences = " ".join(told).split(".")
    facts = [tuple(sentence.split()) for sentence in sentences]
    return {(fact[0], fact[1]): fact[2:] for fact in facts if len(fact) > 2 and fact[0] in VERBS}


@pytest.mark.parametrize("tokens", LENGTHS)
def test_story_has_its_exact_length_and_known_words(tokens: int) -> None:
    for seed in range(20):
        words = make_story(seed, tokens).words
        assert len(words) == tokens
        assert words[0] == BOS
        assert words[-1] == SEP
        assert words.count(SEP) == 1
        assert set(words) <= set(VOCABULARY)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_answer_follows_from_the_story(tokens: int) -> None:
    for seed in range(20):
        story = make_story(seed, tokens)
        facts = facts_of(story)
        for question in story.questions:
            verb, key = question.prompt
            if question.kind == "two_hop":
                assert (verb, question.hops) == ("where", 2)
                assert (verb, key) not in facts
                assert facts["where", facts["who", key][0]] == question.answer
            else:
                assert (verb, question.hops) == (question.kind, 1)
                assert facts[verb, key] == question.answer


@pytest.mark.parametrize("tokens", LENGTHS)
def test_candidates_are_the_story_s_values(tokens: int) -> None:
    for seed in range(20):
        story = make_story(seed, tokens)
        facts = facts_of(story)
        for question in story.questions:
            values = {answer for (verb, _), answer in facts.items() if verb == question.prompt[0]}
            if question.kind == "who":
                values = {(name,) for verb, name in facts if verb == "where"}
            assert question.answer in question.candidates
            assert set(question.candidates) == values
            assert len(question.candidates) == len(values)
            assert 3 <= len(values) <= 4
            assert {len(value) for value in values} == {2 if question.kind == "likes" else 1}


def test_no_question_is_asked_twice() -> None:
    for seed in range(200):
        prompts = [question.prompt for question in make_story(seed, 128).questions]
        assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("tokens", [64, 128, 500])
def test_more_than_a_third_of_the_questions_take_two_hops(tokens: int) -> None:
    kinds = Counter(question.kind for seed in range(200) for question in make_story(seed, tokens).questions)
    assert set(kinds) == set(KINDS)
    assert 0.35 <= kinds["two_hop"] / kinds.total() <= 0.40


def test_filler_says_nothing_that_is_asked() -> None:
    assert not set(FILLER) & {w for q in make_story(0, 500).questions for w in (*q.prompt, *q.answer)}
    assert len(set(VOCABULARY)) == len(VOCABULARY)


def test_same_seed_same_story() -> None:
    assert make_story(7, 128) == make_story(7, 128)
    assert make_row(7, 128) == make_row(7, 128)
    assert make_story(7, 128).words != make_story(8, 128).words


@pytest.mark.parametrize(("tokens", "turns"), [(64, None), (64, 1), (96, 8), (128, 10), (512, None), (512, 10)])
def test_row_is_a_story_with_answered_turns(tokens: int, turns: int | None) -> None:
    for seed in range(20):
        row = make_row(seed, tokens, turns)
        assert len(row) == tokens
        assert row[-1] == "."
        end = row.index(SEP) + 1
        facts = facts_of(Story(seed, tuple(row[:end]), ()))
        asked = [turn.split() for turn in " ".join(row[end:]).rstrip(" .").split(" . ")]
        assert len(asked) == turns if turns else 1 <= len(asked) <= MAX_TURNS
        for verb, key, *answer in asked:
            expected = facts.get((verb, key)) or facts["where", facts["who", key][0]]
            assert expected == tuple(answer)


def test_marks_stand_on_the_answers() -> None:
    words, marks = make_marked_row(3, 128, 10)
    start = words.index(SEP) + 1
    assert len(marks) == len(words)
    assert set(marks[:start]) == {-1}
    turns = " ".join(words[start:]).rstrip(" .").split(" . ")
    expected = [mark for turn in turns for mark in (False, False, *[True] * (len(turn.split()) - 2), False)]
    assert [mark >= 0 for mark in marks[start:]] == expected


def test_training_shares_no_story_with_the_rest() -> None:
    training = {tuple(make_row(TRAINING_SEEDS_FROM + seed, 64)) for seed in range(500)}
    others = {tuple(make_row(seed, 64)) for seed in range(500)}
    assert len(training) == len(others) == 500
    assert not training & others


def test_a_row_is_unrelated_to_the_story_of_its_seed() -> None:
    row = make_row(5, 512, 10)
    story = make_story(5, row.index(SEP) + 1)
    assert tuple(row[: row.index(SEP) + 1]) != story.words


def test_too_short_a_story_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for at least 1 tokens more"):
        make_story(0, SMALLEST - 1)
    with pytest.raises(ValueError, match="fewer turns"):
        make_row(0, 64, 10)
    with pytest.raises(ValueError, match="1 to 10 turns"):
        make_row(0, 512, 11)
    with pytest.raises(ValueError, match="seed"):
        make_story(-1, 64)
