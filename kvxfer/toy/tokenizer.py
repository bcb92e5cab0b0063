"""The toy models' tokenizer: one word, one token."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvxfer.toy.world import BOS, EOS, PAD, UNK, VOCABULARY


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer over VOCABULARY; a word's id is its place there. It adds no special tokens by itself."""
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,  # "kitchen ." must come back as two words
    )
