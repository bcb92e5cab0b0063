"""The tokenizer: one word, one token, and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvxfer.toy import SOURCE_DIR, TARGET_DIR
from kvxfer.toy.tokenizer import build_tokenizer
from kvxfer.toy.world import VOCABULARY, make_row


@pytest.fixture(params=["built", "source", "target"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if request.param == "built":
        return build_tokenizer()
    folder: Path = {"source": SOURCE_DIR, "target": TARGET_DIR}[request.param]
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_one_word_is_one_token_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    words = make_row(1, 512, 10)
    ids = tokenizer(" ".join(words))["input_ids"]
    assert ids == [VOCABULARY.index(word) for word in words]
    assert tokenizer.decode(ids) == " ".join(words)


def test_special_words(tokenizer: PreTrainedTokenizerBase) -> None:
    special = (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    assert special == VOCABULARY[:4]
    assert len(tokenizer) == len(VOCABULARY)
    assert tokenizer("where nobody")["input_ids"][1] == tokenizer.unk_token_id
