"""No evaluation ever reads text that calibration or training has seen, for any corpus and any setting."""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_corpora import Stream, hub_spec, install_hub, make_documents, text_spec, tokenizer_of, write_folder
from small_runs import TEXT_ROWS, TOY_ROWS, little, run, toy_models, write_text

import kvxfer
from kvxfer.evals import kinds
from kvxfer.evals.items import Item, choice_items, text_items, toy_items
from kvxfer.text import corpus
from kvxfer.text.corpus import load_rows, split_of
from kvxfer.text.spec import KINDS, SPLITS, CorpusSpec, RowCounts
from kvxfer.text.toy import KINDS as TOY_KINDS
from kvxfer.toy import conversation, world
from kvxfer.toy.tokenizer import build_tokenizer

CALIBRATION = tuple(split for split in SPLITS if split != "evaluation")
EVALUATIONS = tuple(kinds.KINDS)
TEXTLESS = ("latency",)
"""Times tokens, whatever they say."""
# Where a split is asked for, and the place of the argument that names it.
ASKS_FOR_SPLIT = {"load_rows": 2, "toy_stories": 0, "toy_conversations": 0}
PACKAGE = Path(kvxfer.__file__).parent


class Read:
    """Which documents were read: keys by the split that they were read for, and those of toy stories by their seed."""

    def __init__(self) -> None:
        self.by_split: dict[str, set[str]] = {}

    def add(self, split: str, key: str) -> None:
        self.by_split.setdefault(split, set()).add(key)

    @property
    def keys(self) -> set[str]:
        return set().union(*self.by_split.values())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Listens where text enters the package, below everything that says which split it wants."""
    seen = Read()
    inner = corpus._documents

    def documents(spec: CorpusSpec, split: str, *more: Any) -> Iterator[tuple[str, str]]:
        for key, content in inner(spec, split, *more):
            seen.add(split, key)
            yield key, content

    monkeypatch.setattr(corpus, "_documents", documents)
    for module, name in ((world, "make_story"), (world, "make_marked_row"), (conversation, "make_conversation")):
        make = getattr(module, name)

        def made(seed: int, *args: Any, make: Any = make, **options: Any) -> Any:
            assert seed < world.TRAINING_SEEDS_FROM, "the toy models were trained on this"
            seen.add(split_of(f"toy/{seed}"), f"toy/{seed}")
            return make(seed, *args, **options)

        monkeypatch.setattr(module, name, made)
    return seen


def drawn(rng: random.Random, spec: CorpusSpec) -> CorpusSpec:
    """The same corpus at other settings."""
    shards = rng.choice((1, 1, 3))
    return dataclasses.replace(
        spec,
        length=rng.choice((56, 64, 90) if spec.kind in TOY_KINDS else (8, 14, 20)),
        seed=rng.choice((0, 0, 1, 7)),
        document_tokens=rng.choice((None, None, 5, 40)),
        skip_first=rng.randint(0, 4),
        num_shards=shards,
        shard_index=rng.randrange(shards),
    )


def asked(rng: random.Random, spec: CorpusSpec, tokenizer: Any) -> list[Item]:
    """What an evaluation of this corpus asks."""
    few = dataclasses.replace(
        spec,
        rows=RowCounts(evaluation=rng.randint(6, 9)),
        num_shards=1,
        shard_index=0,
        document_tokens=None,  # a row is of one document, which must be as long
    )
    stories, questions, seed = rng.randint(2, 5), rng.randint(1, 3), rng.randint(0, 2)
    if spec.kind == "toy":
        return toy_items(tokenizer, spec.length, stories, questions, seed)
    return [
        *text_items(few, tokenizer, spec.length),
        *choice_items(few, tokenizer, spec.length, choices=2, answer=2, questions=questions),
    ]


def some_corpus(kind: str, rng: random.Random, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CorpusSpec, Any]:
    """A corpus of the kind, and a tokenizer that reads it."""
    documents = make_documents(rng)
    if kind == "text":
        return text_spec(write_folder(folder / "text", documents, rng)), tokenizer_of(documents)
    if kind == "hub":
        install_hub(monkeypatch, Stream([{"text": text} for text in documents]))
        return hub_spec(), tokenizer_of(documents)
    return CorpusSpec(kind, kind, 32), build_tokenizer()


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_asked_was_never_calibrated_on(
    kind: str, case: int, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{kind} {case}")
    spec, tokenizer = some_corpus(kind, rng, tmp_path, monkeypatch)
    calibrated: set[str] = set()
    tokens: set[int] = set()
    for split in CALIBRATION:
        rows = load_rows(drawn(rng, spec), tokenizer, split, rng.randint(1, 2))
        calibrated |= {key for keys in rows.documents for key in keys}
        tokens |= set(rows.tokens.flatten().tolist())
    assert calibrated
    assert calibrated <= read.keys
    assert set(read.by_split) == set(CALIBRATION)
    before = set(read.keys)
    for _ in range(2):
        items = asked(rng, drawn(rng, spec), tokenizer)
        assert not {item.document for item in items} & before
        if kind in ("text", "hub"):  # a word tells its document
            words = {token for item in items for token in (*item.prompt, *item.answer, *sum(item.candidates, ()))}
            assert not words & tokens - set(tokenizer.all_special_ids)
    assert set(read.by_split) == set(SPLITS)
    assert not read.by_split["evaluation"] & before


@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_on_was_neither_fitted_on_nor_is_it_read_for_anything_else(
    kind: str, case: int, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"training {kind} {case}")
    spec, tokenizer = some_corpus(kind, rng, tmp_path, monkeypatch)
    counts, shards = RowCounts(fit=rng.randint(1, 5)), rng.randint(1, 3)
    spec = dataclasses.replace(drawn(rng, spec), rows=counts, num_shards=1, shard_index=0)
    fitted, training = (load_rows(spec, tokenizer, *which) for which in (("fit",), ("training", 4)))
    taken, ours = ({key for keys in rows.documents for key in keys} for rows in (fitted, training))
    assert len(training) == 4
    assert not ours & taken
    # They are what the split has besides, in its order, and no row is lost that might be had.
    every = load_rows(spec, tokenizer, "fit", counts.fit + (20 if kind in TOY_KINDS else 2000), fewer=True)
    assert every.tokens[: counts.fit].equal(fitted.tokens)
    free = [row for row, keys in enumerate(every.documents) if not set(keys) & taken]
    assert min(free) >= counts.fit
    assert every.tokens[free[:4]].equal(training.tokens)
    for index in range(shards):
        share = dataclasses.replace(spec, num_shards=shards, shard_index=index)
        assert load_rows(share, tokenizer, "training", 4).tokens.equal(training.tokens[index::shards])
    assert set(read.by_split) == {"fit"}
    words = set(training.tokens.flatten().tolist()) - set(tokenizer.all_special_ids)
    if kind in ("text", "hub"):  # a word tells its document
        assert not words & set(fitted.tokens.flatten().tolist())
    for split in SPLITS[1:]:
        again = drawn(rng, spec)
        if split == "evaluation":
            again = dataclasses.replace(again, document_tokens=None)  # a row is of one document
        other = load_rows(again, tokenizer, split, 2)
        assert not {key for keys in other.documents for key in keys} & ours
        if kind in ("text", "hub"):
            assert not words & set(other.tokens.flatten().tolist())


def test_the_toy_models_never_saw_a_story_of_the_last_draw() -> None:
    last = corpus.TOY_DRAWS - 1
    spec = CorpusSpec("toy", "toy", 64, seed=last)
    seeds = [
        int(keys[0].removeprefix("toy/"))
        for split in SPLITS
        for keys in load_rows(spec, build_tokenizer(), split, 3).documents
    ]
    assert min(seeds) >= last * corpus._TOY_STORIES
    assert max(seeds) < world.TRAINING_SEEDS_FROM


@pytest.fixture(scope="module")
def fitted(
    tiny_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[str]]]:
    """An outputs directory, and overrides of a run by its kind of corpus."""
    home = tmp_path_factory.mktemp("disjoint")
    models = [o for o in toy_models(tiny_folders) if o not in TOY_ROWS]
    text = ["corpus=text", f"corpus.path={write_text(home / 'text')}", *TEXT_ROWS]
    return home / "outputs", {"toy": [*models, *TOY_ROWS], "text": [*models, *text]}


@pytest.mark.parametrize("kind", EVALUATIONS)
@pytest.mark.parametrize("text", ["toy", "text"])
def test_every_kind_of_evaluation_reads_its_own_split_alone(
    kind: str, text: str, fitted: tuple[Path, dict[str, list[str]]], read: Read
) -> None:
    outputs, overrides = fitted[0], fitted[1][text]
    fit, asked = run("train", outputs, *overrides), little({"items": "standard"}.get(kind, kind), outputs, overrides)
    if read.keys:  # the map was not there yet
        assert set(read.by_split) == set(CALIBRATION)
    read.by_split.clear()
    other = [o for o in overrides if not o.startswith(("corpus.length", "corpus.rows"))]
    other += ["corpus.length=56", "corpus.seed=1", "corpus.rows.evaluation=4", f"map={fit}"]
    run("evaluate", outputs, *other, *asked)
    assert set(read.by_split) == (set() if kind in TEXTLESS else {"evaluation"})


def test_no_evaluation_names_another_split() -> None:
    """Whatever a setting is: the split that an evaluation asks for is written in its code."""
    files = [*(PACKAGE / "evals").rglob("*.py"), *(PACKAGE / "experiment" / "stages").glob("*.py")]
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if (place := ASKS_FOR_SPLIT.get(node.func.id)) is not None:
                given = [*node.args[place : place + 1], *(k.value for k in node.keywords if k.arg == "split")]
                found.setdefault(file.relative_to(PACKAGE).as_posix(), []).append([ast.unparse(one) for one in given])
    assert found.pop("experiment/stages/calibrate.py") == [["split"], ["split"]]
    assert found.pop("experiment/stages/fit.py") == [["'validation'"]]
    assert found.pop("experiment/stages/train_network.py") == [["text"], ["split"]]
    assert found
    assert {split for calls in found.values() for call in calls for split in call} == {"'evaluation'"}
    assert all(len(call) == 1 for calls in found.values() for call in calls)
