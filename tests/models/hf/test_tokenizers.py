"""Tokenizers are compared by what they do to text; a difference is named."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvxfer.errors import KvxferError
from kvxfer.models.hf.tokenizers import compare_tokenizers
from tests.doubles import tiny_tokenizer


def changed(**special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, **special)


def test_equal_tokenizers_have_one_digest() -> None:
    digest = compare_tokenizers(tiny_tokenizer(), tiny_tokenizer())
    assert len(digest) == 64
    assert compare_tokenizers(tiny_tokenizer(), tiny_tokenizer()) == digest


def test_special_tokens_that_text_never_gives_may_differ() -> None:
    left, right = tiny_tokenizer(), tiny_tokenizer()
    left.add_tokens([AddedToken("<reserved_1>", special=True)], special_tokens=True)
    right.add_tokens([AddedToken("<tool>", special=True), AddedToken("<pad>", special=True)], special_tokens=True)
    assert len(left) != len(right)
    assert compare_tokenizers(left, right) == compare_tokenizers(tiny_tokenizer(), tiny_tokenizer())


def test_an_entry_of_one_only_is_named() -> None:
    left = tiny_tokenizer()
    left.add_tokens(["<think>"])
    with pytest.raises(
        KvxferError, match=r"differ in vocabulary entry \d+: '<think>' in pair.source, None in pair.tar"
    ):
        compare_tokenizers(left, tiny_tokenizer())


def test_an_end_token_of_another_id_is_named() -> None:
    with pytest.raises(KvxferError, match=r"differ in eos_token_id: 2 in pair.source, 1 in pair.target"):
        compare_tokenizers(changed(eos_token="</s>"), changed(eos_token="<s>"))
    with pytest.raises(KvxferError, match=r"differ in bos_token_id: 1 in pair.source, None in pair.target"):
        compare_tokenizers(tiny_tokenizer(bos=True), tiny_tokenizer())


def test_text_split_in_another_way_is_named() -> None:
    right = tiny_tokenizer()
    right.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(KvxferError, match="ids of the sample text 'The quick brown fox ") as refused:
        compare_tokenizers(tiny_tokenizer(), right)
    assert "\n" not in str(refused.value)


def test_a_backend_without_a_list_of_added_tokens_can_be_compared() -> None:
    class Plain:
        """A tokenizer that has only what is needed."""

        def __init__(self) -> None:
            self.inner = tiny_tokenizer()
            self.all_special_ids = [0, 1, 2]
            self.eos_token_id = 2

        @property
        def added_tokens_decoder(self) -> dict[int, AddedToken]:
            raise NotImplementedError

        def get_vocab(self) -> dict[str, int]:
            return self.inner.get_vocab()

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return self.inner.encode(text, add_special_tokens=add_special_tokens)

    assert compare_tokenizers(Plain(), tiny_tokenizer()) == compare_tokenizers(tiny_tokenizer(), tiny_tokenizer())
