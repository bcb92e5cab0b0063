"""Do two tokenizers mean the same by every id? Told by content and sample text, never by the size of a vocabulary."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvxfer.errors import KvxferError

SAMPLES = (
    "The quick brown fox jumps over the lazy dog, and then it's 5 o'clock.",
    "def mean(xs):\n    return sum(xs) / len(xs)  # 0.5\n\n\tif x != y: {a: [1, 2]}\n",
    "0 1 12 123 1234 1234567890 3.14159 -2e-10 1,000,000",
    "Ünïcödé: straße, naïve café, 你好世界, こんにちは, مرحبا, привет, 🙂👩‍🔬",
    "  two  spaces,   three; trailing \n\n\n newlines \r\n and\ttabs  ",
)


def compare_tokenizers(source: Any, target: Any) -> str:
    """SHA-256 of what the two tokenizers have in common, once nothing that text can meet differs.

    Compared are all vocabulary entries that are not special tokens, the ids of the first and last special tokens, and
    the ids of sample texts. Special tokens beyond those may differ in name: plain text never gives them. Raises
    KvxferError naming the first difference.
    """
    ours, theirs = _plain_entries(source), _plain_entries(target)
    special = special_ids(source) | special_ids(target)
    for entry in sorted((ours.keys() | theirs.keys()) - special):
        if ours.get(entry) != theirs.get(entry):
            raise _differ(f"vocabulary entry {entry}", ours.get(entry), theirs.get(entry))
    marks, other_marks = _marks(source), _marks(target)
    for field, index in marks.items():
        if index != other_marks[field]:
            raise _differ(field, index, other_marks[field])
    encoded = []
    for text in SAMPLES:
        left, right = (list(each.encode(text, add_special_tokens=False)) for each in (source, target))
        if left != right:
            raise _differ(f"ids of the sample text {text[:20]!r}", left[:8], right[:8])
        encoded.append(left)
    shared = {index: ours[index] for index in sorted(ours.keys() - special)}
    content = [list(shared.items()), marks, encoded]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _plain_entries(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def special_ids(tokenizer: Any) -> set[int]:
    """The ids that plain text does not give."""
    try:
        added = tokenizer.added_tokens_decoder
    except (AttributeError, NotImplementedError):  # not every backend keeps such a list
        added = {}
    return set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}


def _marks(tokenizer: Any) -> dict[str, int | None]:
    """The ids of the tokens that open and close a text."""
    return {field: getattr(tokenizer, field, None) for field in ("bos_token_id", "eos_token_id")}


def _differ(what: str, ours: object, theirs: object) -> KvxferError:
    return KvxferError(
        f"pair: the tokenizers differ in {what}: {ours!r} in pair.source, {theirs!r} in pair.target; "
        "a cache can only move between models that read the same ids"
    )
