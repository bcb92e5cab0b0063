"""Perplexity of text that follows a handed-over prefix, at several prefix lengths and in several domains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import Prepared, prefix_conditions
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.items import Batch, Item
from kvxfer.evals.lengths import compared
from kvxfer.evals.prefixes import Ends, same_ends
from kvxfer.evals.records import evaluate_items
from kvxfer.evals.specs import PerplexitySpec
from kvxfer.evals.statistics import summarise
from kvxfer.progress import progress
from kvxfer.text import toy
from kvxfer.text.spec import CorpusSpec

FEWEST_ROWS = 8
"""An automatic length is left out of a text with fewer rows of it (or than ``eval.rows``, if that is less)."""


@dataclass(frozen=True)
class Perplexity(PerplexitySpec, Evaluation):
    """``eval=perplexity``: what it measures."""

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Conditions and tests for every domain and prefix length, and what each length changes."""
        calibrated = subject.calibrated_length
        found: dict[str, Any] = {"calibrated_length": calibrated, "scored": self.scored}
        found |= {"points": [], "domains": [], "notes": []}
        for corpus in subject.texts:
            drawn = replace(corpus, seed=corpus.seed + self.seed)
            ends = self._ends(subject, drawn, self._lengths(calibrated), found["notes"])
            if ends is None:
                continue
            points = [self._point(subject, corpus.name, prefix, items) for prefix, items in ends.items.items()]
            found["points"] += points
            found["domains"].append({**compared(points, calibrated), "lengthened": corpus.kind in toy.KINDS})
        return found

    def _lengths(self, calibrated: int | None) -> tuple[int, ...]:
        if self.prefixes:
            return tuple(sorted(self.prefixes))
        if calibrated is None:
            raise KvxferError(
                "eval.prefixes is empty, and nothing beside the map says how long the rows are that it was calibrated "
                "on: give the lengths, as eval.prefixes=[128,1024]"
            )
        return max(2, calibrated // 2), calibrated, 8 * calibrated

    def _ends(self, subject: Subject, corpus: CorpusSpec, lengths: tuple[int, ...], notes: list[str]) -> Ends | None:
        """The rows of a text; lengths that were not asked for by name give way, from the longest on, with a note."""
        tokenizer = subject.pair.tokenizer
        if self.prefixes:
            subject.pair.check_length(lengths[-1] + self.scored, "eval.prefixes")
            ends = same_ends(corpus, tokenizer, self.rows, lengths, self.scored)
            if len(ends) < self.rows:
                raise KvxferError(
                    f"eval.rows={self.rows}: {corpus.name} has only {len(ends)} rows of {lengths[-1] + self.scored} "
                    "tokens for evaluation; lower eval.rows or the longest of eval.prefixes"
                )
            return ends
        while lengths:
            longest, limit = lengths[-1], subject.pair.longest_context
            needed = longest + self.scored
            if needed > limit:
                notes.append(f"No prefix of {longest} tokens: the models reach {limit} tokens, scored ones included.")
            else:
                ends = same_ends(corpus, tokenizer, self.rows, lengths, self.scored)
                has = f"{corpus.name} has only {len(ends)} rows of {needed} tokens for evaluation"
                if len(ends) >= min(FEWEST_ROWS, self.rows):
                    notes += [f"{has}."] if len(ends) < self.rows else []
                    return ends
                notes.append(f"No prefix of {longest} tokens of {corpus.name}: {has}.")
            lengths = lengths[:-1]
        if corpus.name == subject.corpus.name:
            raise KvxferError(f"eval.prefixes: {notes[-1]} Give shorter ones, as eval.prefixes=[64]")
        return None

    def _point(self, subject: Subject, name: str, prefix: int, items: list[Item]) -> dict[str, Any]:
        def conditions(batch: Batch) -> dict[str, Prepared]:
            return prefix_conditions(subject.transfer, batch.prompt)

        rows = max(1, self.batch_tokens // (prefix + self.scored))
        with progress(f"perplexity {name} {prefix}", len(items), "rows") as advance:
            records = list(evaluate_items(list(_batches(items, rows)), conditions, None, advance).values())
        summary = {key: value for key, value in summarise(records).items() if key in ("conditions", "tests")}
        return {"domain": name, "prefix": prefix, **summary, "items": records}


def _batches(items: list[Item], rows: int) -> Iterator[Batch]:
    for start in range(0, len(items), rows):
        part = items[start : start + rows]
        prompts = torch.tensor([item.prompt for item in part])
        yield Batch(part, prompts, part[0].context, prompts)
