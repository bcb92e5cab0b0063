"""Free decoding over the mapped cache: is the answer right, and when does the text part from the ceiling's?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.evals.decoding import Decoded, Decoder
from kvxfer.evals.divergence import summarise_decoding
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.items import Item, toy_items
from kvxfer.evals.specs import GenerationSpec
from kvxfer.progress import progress
from kvxfer.text.corpus import load_rows

EXAMPLES = 3


@dataclass(frozen=True)
class Generation(GenerationSpec, Evaluation):
    """``eval=generation``: what it measures."""

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Decode everything under every condition."""
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        items = self._items(subject, toy)
        longest = max(len(item.answer) for item in items) + 1
        if toy and self.new_tokens < longest:
            raise KvxferError(f"eval.new_tokens={self.new_tokens} must be {longest} or more: an answer and its dot")
        pair.check_length(max(len(item.prompt) for item in items) + self.new_tokens, "eval.new_tokens")
        decoder = Decoder(self.new_tokens, self.samples, self.temperature, self.seed)
        with progress(f"generation {pair.name}", len(items), "prompts") as advance:
            decoded = decoder.decode(subject.transfer, items, self.batch_size, advance)
        dot = pair.tokenizer.convert_tokens_to_ids(".") if toy else None
        setting = {key: getattr(self, key) for key in ("new_tokens", "samples", "temperature")}
        examples = [_example(pair.tokenizer, items, decoded, n) for n in _spread(len(items), EXAMPLES)]
        return {**setting, "prompts": len(items), **summarise_decoding(items, decoded, dot), "examples": examples}

    def _items(self, subject: Subject, toy: bool) -> list[Item]:
        corpus, tokenizer = subject.corpus, subject.pair.tokenizer
        if toy:
            return toy_items(tokenizer, corpus.length, self.stories, self.questions, self.seed)
        prefix = corpus.length // 2 if self.prefix is None else self.prefix
        rows = load_rows(corpus, tokenizer, "evaluation", self.rows, prefix)
        named = enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True))
        return [Item(str(n), documents[0], rows.domain, tuple(row), prefix, ()) for n, (row, documents) in named]


def _spread(count: int, wanted: int) -> list[int]:
    """So many places spread over all, or all."""
    return sorted({n * count // wanted for n in range(wanted)})


def _example(tokenizer: Any, items: Sequence[Item], decoded: Mapping[str, Decoded], n: int) -> dict[str, str]:
    """The end of a prompt and what each condition writes greedily."""
    written = {name: tokenizer.decode(found.tokens[n].tolist()) for name, found in decoded.items()}
    return {"id": items[n].id, "prompt": tokenizer.decode(list(items[n].prompt[-8:])), **written}
