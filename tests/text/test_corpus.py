"""Rows: disjoint by document whatever the settings, exact in length, and the same everywhere."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from small_corpora import Stream, hub_spec, install_hub, make_documents, text_spec, tokenizer_of, write, write_folder
from tokenizers.processors import TemplateProcessing

from kvxfer.errors import KvxferError
from kvxfer.experiment.identity import identity
from kvxfer.text import corpus
from kvxfer.text.corpus import document_key, leading_bos, load_rows, split_of, toy_stories
from kvxfer.text.spec import SPLITS, CorpusSpec, RowCounts
from kvxfer.toy.tokenizer import build_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs" / "corpus"


def all_rows(spec: CorpusSpec, tokenizer: Any, split: str) -> corpus.Rows:
    """Every row that a split has, which the refusal of too many tells."""
    whole = dataclasses.replace(spec, num_shards=1, shard_index=0)
    with pytest.raises(KvxferError) as refusal:
        load_rows(whole, tokenizer, split, 10_000)
    found = re.search(r"has only (\d+) rows", str(refusal.value))
    assert found
    return load_rows(spec, tokenizer, split, int(found[1]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["text", "hub"])
def test_splits_share_no_document(kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    documents = make_documents(rng)
    tokenizer = tokenizer_of(documents, eos=rng.random() < 0.7, bos=rng.random() < 0.5)
    owner = {tokenizer.convert_tokens_to_ids(word): text for text in documents for word in text.split()}
    if kind == "text":
        path = write_folder(tmp_path / "corpus", documents, rng)
    else:
        install_hub(monkeypatch, Stream([{"text": text} for text in [*documents, *rng.sample(documents, 20), " ", ""]]))
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    for _ in range(2):  # two runs with settings of their own
        shards = rng.randint(1, 3)
        settings = {
            "length": rng.choice((2, 5, 16, 33)),
            "seed": rng.randint(0, 2),
            "num_shards": shards,
            "shard_index": rng.randrange(shards),
            "skip_first": rng.randint(0, 1),
        }
        spec = text_spec(path, **settings) if kind == "text" else hub_spec(**settings)
        for split in SPLITS:
            rows = all_rows(spec, tokenizer, split)
            words = [token for token in rows.tokens.flatten().tolist() if token in owner]
            assert len(words) == len(set(words)), "a copy was read as well"
            for ids, keys in zip(rows.tokens.tolist(), rows.documents, strict=True):
                texts = {owner[token] for token in ids if token in owner}
                # A row that begins with the EOS of a document names that document too.
                assert {document_key(text) for text in texts} <= set(keys)
                assert {split_of(key) for key in keys} == {split}
                seen[split] |= texts
    assert all(seen.values())
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))


@pytest.mark.parametrize(("kind", "seed"), [("toy", 0), ("toy", 1), ("toy", 2), ("toy_shuffled", 3)])
def test_toy_splits_share_no_story(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = build_tokenizer()
    draw = rng.choice((0, 7))
    keys: dict[str, set[str]] = {split: set() for split in SPLITS}
    contents: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for length in rng.sample((64, 96, 128), 2):
        spec = CorpusSpec("toy", kind, length, seed=draw)
        for split in SPLITS:
            rows = load_rows(spec, tokenizer, split, rng.randint(5, 20))
            assert rows.tokens.shape == (len(rows), length)
            keys[split] |= {key for row in rows.documents for key in row}
            contents[split] |= {tuple(row) for row in rows.tokens.tolist()}
            stories = toy_stories(split, 10, length, draw)
            assert [split_of(f"toy/{story.seed}") for story in stories] == [split] * 10
            assert len({story.seed for story in stories}) == 10
            keys[split] |= {f"toy/{story.seed}" for story in stories}
    for group in (keys, contents):
        assert sum(map(len, group.values())) == len(set().union(*group.values()))


def test_the_split_of_a_document_never_changes() -> None:
    """Maps and results made by older versions are compared with new ones: a document that moved would leak."""
    assert [split_of(f"toy/{seed}") for seed in range(10)] == [
        "fit", "fit", "evaluation", "fit", "evaluation", "fit", "fit", "fit", "held_out", "validation",
    ]  # fmt: skip
    splits = [split_of(str(number)) for number in range(20_000)]
    assert [splits.count(split) / 20_000 for split in SPLITS] == pytest.approx([0.6, 0.1, 0.1, 0.2], abs=0.01)


def test_copies_with_other_white_space_are_one_document() -> None:
    assert document_key("a b\n c\n") == document_key("  a\r\n\tb c")
    assert document_key("a b") != document_key("ab")


def test_documents_are_packed_and_joined_by_eos(tmp_path: Path) -> None:
    documents = [f"a{i} b{i} c{i}" for i in range(40)]
    for index, text in enumerate(documents):
        write(tmp_path / f"{index}.txt", text)
    tokenizer = tokenizer_of(documents)
    fit = [text for text in documents if split_of(document_key(text)) == "fit"]
    rows = all_rows(text_spec(tmp_path, length=8), tokenizer, "fit")
    assert len(rows) == 4 * len(fit) // 8
    words = " ".join(tokenizer.convert_ids_to_tokens(rows.tokens.flatten().tolist()))
    found = [text.strip() for text in words.removesuffix("</s>").split("</s>")]
    assert len(found) == len(set(found)) == 2 * len(rows)
    assert set(found) <= set(fit)
    assert found != sorted(found), "the order is drawn, it is not that of the files"
    assert all(len(keys) == 2 for keys in rows.documents)
    assert rows.domain == "text"


@pytest.mark.parametrize("bos", [False, True])
def test_a_row_to_evaluate_on_is_of_one_document(bos: bool, tmp_path: Path) -> None:
    """The first row of every document, in the drawn order; then the second of those that have one, and so on."""
    words = {index: [f"d{index}w{word}" for word in range(2 + 7 * (index % 5))] for index in range(60)}
    for index, own in words.items():
        write(tmp_path / f"{index}.txt", " ".join(own))
    tokenizer = tokenizer_of([" ".join(own) for own in words.values()], bos=bos)
    keys = {document_key(" ".join(own)): index for index, own in words.items()}
    room = 7 if bos else 8
    rows = all_rows(text_spec(tmp_path, length=8), tokenizer, "evaluation")
    assert all(len(names) == 1 for names in rows.documents)
    found = [(keys[names[0]], row) for names, row in zip(rows.documents, rows.tokens.tolist(), strict=True)]
    order = list(dict.fromkeys(index for index, _ in found))
    expected = [
        (index, words[index][turn * room : (turn + 1) * room])
        for turn in range(5)
        for index in order
        if len(words[index]) >= (turn + 1) * room
    ]
    said = [(index, tokenizer.convert_ids_to_tokens(row)[bos:]) for index, row in found]
    assert said == expected
    enough = {index for key, index in keys.items() if split_of(key) == "evaluation" and len(words[index]) >= room}
    assert set(order) == enough
    few = load_rows(text_spec(tmp_path, length=8), tokenizer, "evaluation", len(enough))
    assert few.tokens.equal(rows.tokens[: len(enough)])
    # What is fitted on is packed, whatever is read beside it.
    packed = all_rows(text_spec(tmp_path, length=8), tokenizer, "validation")
    assert any(len(names) > 1 for names in packed.documents)


def test_that_documents_are_too_short_to_evaluate_on_is_said(tmp_path: Path) -> None:
    texts = [f"a{index} b{index} c{index}" for index in range(40)]
    for index, text in enumerate(texts):
        write(tmp_path / f"{index}.txt", text)
    with pytest.raises(KvxferError, match=r"only 0 rows of 8 tokens .*, each row of a single document; lower corpus"):
        load_rows(text_spec(tmp_path, length=8), tokenizer_of(texts), "evaluation", 2)


@pytest.mark.parametrize(("adds", "first"), [(True, 0), (False, None)])
def test_bos_begins_every_row_if_the_tokenizer_adds_it(adds: bool, first: int | None, tmp_path: Path) -> None:
    documents = make_documents(random.Random(0))
    path = write_folder(tmp_path / "corpus", documents, random.Random(0))
    rows = all_rows(text_spec(path), tokenizer_of(documents, bos=adds), "fit")
    assert rows.tokens.shape[1] == 16
    assert [0 in row for row in rows.tokens[:, 1:].tolist()] == [False] * len(rows)
    assert {row[0] == 0 for row in rows.tokens.tolist()} == {first == 0}


@pytest.mark.parametrize(("template", "found"), [("$A </s>", []), ("</s> $A </s>", [1]), ("</s> $A", [1]), (None, [])])
def test_an_end_of_text_is_no_begin_of_text_where_one_token_is_both(template: str | None, found: list[int]) -> None:
    tokenizer = tokenizer_of(["a b"])
    tokenizer.bos_token = tokenizer.eos_token
    if template is not None:
        processor = TemplateProcessing(single=template, special_tokens=[("</s>", 1)])
        tokenizer.backend_tokenizer.post_processor = processor
    assert leading_bos(tokenizer) == found


def test_the_caller_may_ask_for_another_length_and_count(tmp_path: Path) -> None:
    documents = make_documents(random.Random(1))
    path = write_folder(tmp_path / "corpus", documents, random.Random(1))
    spec = text_spec(path, rows=RowCounts(fit=3))
    tokenizer = tokenizer_of(documents)
    assert load_rows(spec, tokenizer, "fit").tokens.shape == (3, 16)
    assert load_rows(spec, tokenizer, "fit", 2, 40).tokens.shape == (2, 40)
    assert load_rows(spec, tokenizer, "fit", 0).tokens.shape == (0, 16)


@pytest.mark.parametrize("kind", ["toy", "text"])
def test_shards_share_the_rows(kind: str, tmp_path: Path) -> None:
    documents = make_documents(random.Random(2))
    if kind == "toy":
        spec, tokenizer = CorpusSpec("toy", "toy", 64), build_tokenizer()
    else:
        spec = text_spec(write_folder(tmp_path / "corpus", documents, random.Random(2)))
        tokenizer = tokenizer_of(documents)
    whole = load_rows(spec, tokenizer, "fit", 11)
    shares = [load_rows(dataclasses.replace(spec, num_shards=4, shard_index=i), tokenizer, "fit", 11) for i in range(4)]
    assert [len(share) for share in shares] == [3, 3, 3, 2]
    for index, share in enumerate(shares):
        assert share.tokens.equal(whole.tokens[index::4])
        assert share.documents == whole.documents[index::4]


def test_rows_are_the_same_wherever_the_folder_is(tmp_path: Path) -> None:
    documents = make_documents(random.Random(3))
    here = write_folder(tmp_path / "here", documents, random.Random(3))
    there = tmp_path / "there"
    for file in sorted((f for f in here.rglob("*") if f.is_file()), reverse=True):
        (there / file.relative_to(here)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there / file.relative_to(here))
    tokenizer = tokenizer_of(documents)
    one, two = (load_rows(text_spec(path), tokenizer, "fit", 5) for path in (here, there))
    assert one.digest == two.digest
    assert one.documents == two.documents
    assert load_rows(text_spec(here, seed=1), tokenizer, "fit", 5).digest != one.digest


def test_hidden_files_and_other_types_are_left_out_and_one_file_is_a_corpus(tmp_path: Path) -> None:
    write(tmp_path / ".cache" / "x.txt", "hidden")
    write(tmp_path / "image.png", "binary")
    write(tmp_path / "lines.jsonl", "\n".join(json.dumps({"body": f"w{i} \u2028 v{i}"}) for i in range(30)))
    names = [f"w{i} \u2028 v{i}" for i in range(30)]
    tokenizer = tokenizer_of(names)
    whole = all_rows(text_spec(tmp_path, column="body", length=2, skip_first=0), tokenizer, "fit")
    alone = all_rows(text_spec(tmp_path / "lines.jsonl", column="body", length=2, skip_first=0), tokenizer, "fit")
    assert whole.digest == alone.digest
    assert len(whole) == 3 * sum(split_of(document_key(name)) == "fit" for name in names) // 2


def test_identity_is_content_not_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "a.txt", "some text")
        write(tmp_path / name / "b.md", "more text")
    one = identity(text_spec(tmp_path / "one"))
    assert one == identity(text_spec(tmp_path / "two", num_shards=4, shard_index=2))
    assert json.loads(json.dumps(one)) == one
    assert str(tmp_path) not in json.dumps(one)
    for key, value in {"length": 32, "skip_first": 2, "seed": 1, "column": "body"}.items():
        assert identity(text_spec(tmp_path / "one", **{key: value})) != one
    write(tmp_path / "two" / "b.md", "more text.")
    assert identity(text_spec(tmp_path / "two")) != one
    (tmp_path / "one" / "b.md").rename(tmp_path / "one" / "c.md")
    assert identity(text_spec(tmp_path / "one")) != one


def test_identity_of_the_other_kinds() -> None:
    toy = CorpusSpec("toy", "toy", 64)
    assert identity(CorpusSpec("toy", "toy", 64, column="x")) == identity(dataclasses.replace(toy, path="/x"))
    assert identity(hub_spec(revision="main")) != identity(hub_spec(revision="v1"))
    assert {"dataset": "someone/web", "subset": None, "revision": None}.items() <= identity(hub_spec()).items()


@pytest.mark.parametrize("name", ["toy", "toy_shuffled", "text", "fineweb_edu"])
def test_the_options_are_specs(name: str, tmp_path: Path) -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    assert isinstance(values, dict)
    values["rows"] = RowCounts(**values["rows"])
    if name == "text":
        values["path"] = str(tmp_path)
    assert CorpusSpec(**{str(key): value for key, value in values.items()}).name == name
