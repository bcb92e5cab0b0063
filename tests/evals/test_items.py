"""Questions about running text: which continuation follows?"""

from __future__ import annotations

import random

import pytest

from kvxfer.errors import KvxferError
from kvxfer.evals.items import batches, choice_items, text_items
from kvxfer.evals.questions import Questions
from kvxfer.text.spec import CorpusSpec, RowCounts
from tests.small_corpora import make_documents, tokenizer_of, write_folder


@pytest.fixture
def text(tmp_path):
    documents = make_documents(random.Random(0))
    folder = write_folder(tmp_path / "texts", documents, random.Random(1))
    counts = RowCounts(fit=1, validation=1, held_out=1, evaluation=30)
    spec = CorpusSpec(name="text", kind="text", length=24, path=str(folder), glob="**/*", rows=counts)
    return spec, tokenizer_of(documents)


def _documents(tokenizer, ids) -> set[str]:
    words = [word for word in tokenizer.convert_ids_to_tokens(list(ids)) if word.startswith("d")]
    return {word.partition("w")[0] for word in words}


def test_the_right_choice_goes_on_and_the_others_are_from_other_documents(text):
    spec, tokenizer = text
    items = choice_items(spec, tokenizer, 24, choices=4, answer=5, questions=3)
    assert len(items) == 30 * 3
    assert {len(item.prompt) for item in items} == {12, 16, 19}
    for item in items:
        assert len(item.candidates) == 4
        assert item.candidates[0] == item.answer
        assert len(item.candidates) == 4
        own = _documents(tokenizer, item.prompt)
        for other in item.candidates[1:]:
            assert other != item.answer
            assert len(other) == 5
            assert not own & _documents(tokenizer, other)
    assert all(len(batch.items) >= 2 for batch in batches(items, 25))


def test_choices_that_cannot_be_asked_are_refused(text):
    spec, tokenizer = text
    with pytest.raises(KvxferError, match=r"eval\.answer=13 does not fit"):
        choice_items(spec, tokenizer, 24, choices=2, answer=13)
    with pytest.raises(KvxferError, match=r"eval\.choices=1 must be 0"):
        Questions(choices=1)
    with pytest.raises(KvxferError, match=r"raise corpus\.rows\.evaluation"):
        choice_items(spec, tokenizer, 24, choices=60, answer=5)


def test_with_the_rest_scored_an_item_is_the_text_item_with_a_question(text):
    spec, tokenizer = text
    asked = choice_items(spec, tokenizer, 24, choices=4, answer=5, questions=1, score_rest=True)
    plain = text_items(spec, tokenizer, 24)
    assert [(item.prompt, item.answer) for item in asked] == [(item.prompt, item.answer) for item in plain]
    assert all(item.candidates[item.right] == item.answer[:5] for item in asked)
