"""A small generated world: stories of facts and filler, and questions that only the story answers.

Every fact is ``verb key answer .`` and stands next to its key, so that a tiny model can learn to look it up:
``where anna kitchen .``, ``who key anna .``, ``color key red .``, ``count coins four .``, ``likes anna hot tea .``.
A question is the fact's first two words. ``where key`` takes two hops: who has the key, and where that person is.
Filler sentences use words of their own and bring a story to an exact number of tokens.

Seeds: stories and rows that train the toy models use seeds from `TRAINING_SEEDS_FROM` on. Everything else (calibration,
evaluation, tests) stays below, so that no evaluation story was ever trained on. A story, a row and a conversation
of the same seed are unrelated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"
SEP = "|"
DOT = "."
KINDS = ("where", "who", "color", "count", "likes", "two_hop")
MAX_TURNS = 10
TRAINING_SEEDS_FROM = 2**40
# Three two-hop questions to five of one hop: following only one hop then gets well below what following both gets.
ONE_HOP_PER_TWO_HOP = 5 / 3


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("anna ben carla david emma frank grace henry iris jack karen leo mary nick olga paul")
PLACES = _words(
    "kitchen garden cellar attic office market library station harbor museum school bakery chapel stable theater tower"
)
OBJECTS = _words("key lamp book ring knife map bag hat cup rope bell flute coat drum ladder mirror")
COLORS = _words("red blue green yellow black white purple orange brown grey")
COUNTABLES = _words("coins apples candles stones letters buttons nails shells")
NUMBERS = _words("two three four five six seven eight nine")
FLAVORS = _words("hot cold sweet sour fresh spicy salty baked")
FOODS = _words("tea soup bread cake fish rice plums cheese")
VERBS = ("where", "who", "color", "count", "likes")

_OPENERS = ("then", "later", "meanwhile", "today")
_ARTICLE = ("the",)
_ADJECTIVES = ("old", "quiet", "distant", "little")
_NOUNS = ("rain", "wind", "dog", "clock", "river", "cloud", "train", "moon")
_ACTIONS = ("fell", "passed", "slept", "turned", "moved", "waited", "rose", "stopped")
_ADVERBS = ("softly", "slowly", "again", "outside", "nearby", "early")
_ASIDE = "well"
FILLER = (*_OPENERS, *_ARTICLE, *_ADJECTIVES, *_NOUNS, *_ACTIONS, *_ADVERBS, _ASIDE)
SHORTEST_FILLER, _LONGEST_FILLER = 3, 7

VOCABULARY: tuple[str, ...] = (
    PAD, BOS, EOS, UNK, SEP, DOT, *VERBS, *NAMES, *PLACES, *OBJECTS, *COLORS, *COUNTABLES, *NUMBERS, *FLAVORS, *FOODS,
    *FILLER,
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A two-word prompt, its answer, and the values of the story among which the answer must be found."""

    kind: str
    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    candidates: tuple[tuple[str, ...], ...]
    hops: int


@dataclass(frozen=True)
class Story:
    """The words of a story, from BOS to SEP, and what can be asked about it, in shuffled order."""

    seed: int
    words: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Fact:
    """``verb key answer``: the kind is the verb."""

    kind: str
    key: str
    answer: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return (self.kind, self.key, *self.answer, DOT)


@dataclass(frozen=True)
class Size:
    """How many facts of each kind a story has (as many people like something as `likes` says: none or all)."""

    people: int = 3
    objects: int = 3
    colors: int = 0
    counts: int = 0
    likes: int = 0

    @property
    def tokens(self) -> int:
        """Words of a story without filler."""
        return 2 + 4 * (self.people + self.objects + self.colors + self.counts) + 5 * self.likes


def make_story(seed: int, tokens: int) -> Story:
    """The story of this seed, of exactly this many words, BOS and SEP included."""
    rng = generator_of(seed, 0)
    facts, questions = _plan(rng, tokens, objects=3)
    return Story(seed, tuple(_tell(rng, facts, tokens)), tuple(questions))


def make_row(seed: int, tokens: int, turns: int | None = None) -> list[str]:
    """A story, asked and answered for some turns (drawn, up to ten, if None), exactly this many words in all."""
    return make_marked_row(seed, tokens, turns)[0]


def make_marked_row(seed: int, tokens: int, turns: int | None = None) -> tuple[list[str], list[int]]:
    """The row's words and, for each, the index in KINDS of the question it answers (-1 for all other words)."""
    rng = generator_of(seed, 1)
    if turns is None:
        room = tokens - Size(objects=4).tokens
        most = max([1, *(count for count in range(1, MAX_TURNS + 1) if _longest(count) <= room)])
        turns = rng.randint(min(4, most), most)
    if not 1 <= turns <= MAX_TURNS:
        raise ValueError(f"turns is {turns}: ask for 1 to {MAX_TURNS} turns")
    # three objects give eight questions, four give eleven
    facts, questions = _plan(rng, tokens - _longest(turns), objects=3 if turns <= 8 else 4)
    asked: list[str] = []
    marks: list[int] = []
    for question in questions[:turns]:
        asked += [*question.prompt, *question.answer, DOT]
        marks += [-1, -1, *[KINDS.index(question.kind)] * len(question.answer), -1]
    words = _tell(rng, facts, tokens - len(asked))
    return words + asked, [-1] * len(words) + marks


def make_shuffled_row(seed: int, tokens: int) -> list[str]:
    """The sentences of a row in random order, questions with their answers among them and no SEP; so many words."""
    _, *words = (word for word in make_row(seed, tokens + 1) if word != SEP)
    sentences: list[list[str]] = [[]]
    for word in words:
        sentences[-1].append(word)
        if word == DOT:
            sentences.append([])
    generator_of(seed, 2).shuffle(sentences)
    return [BOS, *(word for sentence in sentences for word in sentence)]


def filler_between(key: str, tokens: int, places: int) -> list[list[str]]:
    """Filler sentences of so many words together, each at a random one of so many places; the same for the same key."""
    rng = random.Random(f"filler {key}")
    found: list[list[str]] = [[] for _ in range(places)]
    for sentence in filler(rng, tokens):
        found[rng.randrange(places)] += sentence
    return found


def _longest(turns: int) -> int:
    """The most words that so many turns take: four each, and one more for each of the at most four dishes liked."""
    return 4 * turns + min(turns, 4)


def generator_of(seed: int, stream: int) -> random.Random:
    """The random numbers of a seed; each stream of it is unrelated to the others."""
    if seed < 0:
        raise ValueError(f"seed is {seed}: use a seed of 0 or more")
    # a text is hashed as a whole; of integers, distinct ones may give the same numbers
    return random.Random(f"{stream} {seed}")


def _plan(rng: random.Random, tokens: int, objects: int) -> tuple[list[Fact], list[Question]]:
    """Facts that fit into a story of this many tokens, and the questions about them."""
    smallest = Size(objects=objects)
    if tokens < smallest.tokens:
        raise ValueError(
            f"{tokens} tokens are left for the story and the smallest has {smallest.tokens}: "
            f"ask for at least {smallest.tokens - tokens} tokens more, or for fewer turns"
        )
    facts = draw_facts(rng, _choose_size(rng, tokens, smallest))
    return facts, draw_questions(rng, facts)


def _choose_size(rng: random.Random, tokens: int, size: Size) -> Size:
    """Grow the smallest story in random directions; up to a quarter of the room is left to filler even if short."""
    room = tokens - rng.randint(0, tokens // 4)
    people = rng.choice((3, 4))
    objects = rng.randint(max(people, size.objects), 6)
    growths = [
        {"people": people, "objects": max(people, size.objects)},
        {"people": people, "objects": objects},
        {"colors": rng.choice((3, min(4, objects)))},
        {"counts": rng.choice((3, 4))},
        {"likes": 1},
    ]
    rng.shuffle(growths)
    for growth in growths:
        values = {**vars(size), **growth}
        values["objects"] = max(values["objects"], size.objects)
        values["colors"] = min(values["colors"], values["objects"])
        values["likes"] = values["people"] if values["likes"] else 0
        grown = Size(**values)
        if grown.tokens <= room:
            size = grown
    return size


def draw_facts(rng: random.Random, size: Size) -> list[Fact]:
    """Within a kind all answers differ, except that a person may own several things or none.

    Owners are drawn one by one: were each to own one thing, answers already given would tell of those to come.
    """
    names, objects = rng.sample(NAMES, size.people), rng.sample(OBJECTS, size.objects)
    singles: list[tuple[str, Sequence[str], Sequence[str]]] = [
        ("where", names, rng.sample(PLACES, size.people)),
        ("who", objects, rng.choices(names, k=size.objects)),
        ("color", rng.sample(objects, size.colors), rng.sample(COLORS, size.colors)),
        ("count", rng.sample(COUNTABLES, size.counts), rng.sample(NUMBERS, size.counts)),
    ]
    facts = [
        Fact(kind, key, (value,)) for kind, keys, values in singles for key, value in zip(keys, values, strict=True)
    ]
    flavors, foods = rng.sample(FLAVORS, size.likes), rng.sample(FOODS, size.likes)
    dishes = zip(names[: size.likes], flavors, foods, strict=True)
    return facts + [Fact("likes", name, (flavor, food)) for name, flavor, food in dishes]


def draw_questions(
    rng: random.Random, facts: list[Fact], one_hop_per_two_hop: float = ONE_HOP_PER_TWO_HOP
) -> list[Question]:
    """Every two-hop question, and of one hop, from all kinds alike, so many to each."""
    values = {kind: [fact.answer for fact in facts if fact.kind == kind] for kind in VERBS}
    values["who"] = [(fact.key,) for fact in facts if fact.kind == "where"]  # everybody may be an owner
    places = {fact.key: fact.answer for fact in facts if fact.kind == "where"}

    by_kind = [
        [Question(kind, (kind, f.key), f.answer, _shuffled(rng, values[kind]), 1) for f in facts if f.kind == kind]
        for kind in VERBS
    ]
    two_hop = [
        Question("two_hop", ("where", f.key), places[f.answer[0]], _shuffled(rng, values["where"]), 2)
        for f in facts
        if f.kind == "who"
    ]
    for group in by_kind:
        rng.shuffle(group)
    rng.shuffle(by_kind)
    in_turns = [group[i] for i in range(max(map(len, by_kind))) for group in by_kind if i < len(group)]
    questions = two_hop + in_turns[: round(one_hop_per_two_hop * len(two_hop))]
    rng.shuffle(questions)
    return questions


def _shuffled(rng: random.Random, answers: list[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(rng.sample(answers, len(answers)))


def _tell(rng: random.Random, facts: list[Fact], tokens: int) -> list[str]:
    """The facts in random order, with filler between them that makes up the length, from BOS to SEP."""
    sentences = [fact.words for fact in facts]
    sentences += filler(rng, tokens - 2 - sum(map(len, sentences)))
    rng.shuffle(sentences)
    return [BOS, *(word for sentence in sentences for word in sentence), SEP]


def filler(rng: random.Random, tokens: int) -> Iterator[tuple[str, ...]]:
    """Sentences that say nothing that is asked, of exactly this many tokens together."""
    if 0 < tokens < SHORTEST_FILLER:
        yield (_ASIDE, DOT)[:tokens]
        return
    while tokens > 0:
        length = tokens
        if tokens > _LONGEST_FILLER:
            length = rng.randint(SHORTEST_FILLER, min(_LONGEST_FILLER, tokens - SHORTEST_FILLER))
        yield _filler_sentence(rng, length)
        tokens -= length


def _filler_sentence(rng: random.Random, length: int) -> tuple[str, ...]:
    """Noun, verb and dot, with as many of the four optional words as the length asks for."""
    optional = set(rng.sample((_OPENERS, _ARTICLE, _ADJECTIVES, _ADVERBS), length - SHORTEST_FILLER))
    parts = (_OPENERS, _ARTICLE, _ADJECTIVES, _NOUNS, _ACTIONS, _ADVERBS)
    kept = [part for part in parts if part in optional or part in (_NOUNS, _ACTIONS)]
    return (*(rng.choice(part) for part in kept), DOT)
