"""Perplexity of text that follows a prefix, in several domains, the same scored tokens at every length of the prefix.

So lengths are paired: does a map hold at prefixes longer than the rows it was calibrated on?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from kvxfer.errors import KvxferError
from kvxfer.evals.conditions import prefix_conditions
from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.items import Batch, Item, equal_lengths
from kvxfer.evals.scoring import evaluate_items
from kvxfer.evals.specs import PerplexitySpec
from kvxfer.evals.statistics import outcome, paired_difference, ratio_difference, summarise
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.progress import progress
from kvxfer.text import toy
from kvxfer.text.corpus import leading_bos, load_rows
from kvxfer.text.spec import CorpusSpec

Ends = dict[int, list[Item]]
"""Items by prefix length: the n-th item of every length is the same row with the same answer."""


def same_ends(corpus: CorpusSpec, tokenizer: Any, rows: int, lengths: Sequence[int], scored: int) -> Ends:
    """At most so many rows of the evaluation split whose last ``scored`` tokens follow prefixes of all lengths.

    Of text, a shorter prefix is the end of a longer one, after the BOS that the tokenizer puts before every text. In
    the toy world that would cut off the facts that are asked about, so there a longer prefix is the shortest one with
    filler sentences between its sentences. A row's document, for statistics, is the one that its scored tokens end in.
    """
    shortest, longest = min(lengths), max(lengths)
    is_toy = corpus.kind in toy.KINDS
    length = (shortest if is_toy else longest) + scored
    try:
        found = load_rows(replace(corpus, length=length), tokenizer, "evaluation", rows, fewer=True)
    except KvxferError as error:
        raise KvxferError(f"eval.prefixes={sorted(lengths)} and eval.scored={scored} ask for {error}") from error
    bos = leading_bos(tokenizer)
    items: dict[int, list[Item]] = {length: [] for length in sorted(lengths)}
    for n, (tokens, documents) in enumerate(zip(found.tokens.tolist(), found.documents, strict=True)):
        head, answer = tokens[:-scored], tokens[-scored:]
        for length in items:
            if is_toy:
                prefix = toy.lengthened(tokenizer, head, documents[-1], length)
            else:
                prefix = [*bos, *head[len(head) - length + len(bos) :]]
            items[length].append(Item(str(n), documents[-1], found.domain, tuple(prefix), length, tuple(answer)))
    return items


Items = Sequence[Mapping[str, Any]]


def _nats(items: Items, condition: str) -> Float[np.ndarray, " items"]:
    return np.array([item["nats"][condition] for item in items])


def gap(items: Items) -> dict[str, float | None]:
    """The source's nats per token less the ceiling's, with the paired test that says whether there is a gap at all."""
    tokens, documents = np.array([item["tokens"] for item in items]), [item["document"] for item in items]
    return _row(paired_difference(_nats(items, "source"), _nats(items, "ceiling"), documents, tokens))


def change(before: Items, after: Items) -> dict[str, dict[str, float | None]]:
    """What a longer prefix changes, second less first, on the same scored tokens.

    Returns:
        ``ceiling``: nats per token of the target itself; ``loss``: those that the mapped cache costs against it;
        ``gap_recovered``: the share of the gap between source and ceiling. Each ``difference``, ``ci_low``,
        ``ci_high``, ``p``: paired t over documents, and for the share its delta-method form.
    """
    documents, tokens = [item["document"] for item in after], np.array([item["tokens"] for item in after])
    shorter, longer = ({c: _nats(items, c) for c in ("ceiling", "source", "mapped")} for items in (before, after))
    loss, loss_before = (nats["mapped"] - nats["ceiling"] for nats in (longer, shorter))
    shares, shares_before = (
        (nats["source"] - nats["mapped"], nats["source"] - nats["ceiling"]) for nats in (longer, shorter)
    )
    return {
        "ceiling": _row(paired_difference(longer["ceiling"], shorter["ceiling"], documents, tokens)),
        "loss": _row(paired_difference(loss, loss_before, documents, tokens)),
        "gap_recovered": ratio_difference(shares, shares_before, documents),
    }


def compared(points: Sequence[Mapping[str, Any]], calibrated: int | None) -> dict[str, Any]:
    """What every length of one domain changes from the reference: the calibrated length, or else the shortest.

    Args:
        points: of one domain, by ascending prefix, with their items.
    """
    lengths = [point["prefix"] for point in points]
    known = calibrated in lengths
    reference = calibrated if known else lengths[0]
    before = points[lengths.index(reference)]["items"]
    found = []
    for point in points:
        test = gap(point["items"])
        row = {"prefix": point["prefix"], "gap": test, "has_gap": has_gap(test)}
        if point["prefix"] != reference:
            row["change"] = change(before, point["items"])
        found.append(row)
    documents = {item["document"] for item in before}
    about = {"domain": points[0]["domain"], "rows": len(before), "documents": len(documents)}
    return {**about, "reference": reference, "reference_is_calibrated": known, "lengths": found}


def _row(test: Mapping[str, float | int]) -> dict[str, float | None]:
    return {**{key: float(test[key]) for key in ("difference", "ci_low", "ci_high")}, "p": float(test["t_p"])}


def has_gap(test: Mapping[str, Any]) -> bool:
    """Whether the ceiling is shown to beat the source: only there can a map do so."""
    ci = (test["ci_low"], test["ci_high"])
    return outcome(test["p"], test["difference"], ci, higher_is_better=True) == "better"


FEWEST_ROWS = 8
"""An automatic length is left out of a text with fewer rows of it (or than ``eval.rows``, if that is less)."""


@dataclass(frozen=True)
class Perplexity(PerplexitySpec, Evaluation):
    """``eval=perplexity``: what it measures."""

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        if self.prefixes:
            pair.check_length(max(self.prefixes) + self.scored, "eval.prefixes")

    def measure(self, subject: Subject) -> dict[str, Any]:
        self.check(subject.pair, subject.corpus, subject.plan)
        calibrated = subject.calibrated_length
        found: dict[str, Any] = {"calibrated_length": calibrated, "scored": self.scored}
        found |= {"points": [], "domains": [], "notes": []}
        for corpus in subject.texts:
            drawn = replace(corpus, seed=corpus.seed + self.seed)
            ends = self._ends(subject, drawn, self._lengths(calibrated), found["notes"])
            if ends is None:
                continue
            points = [self._point(subject, corpus.name, prefix, items) for prefix, items in ends.items()]
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
            ends = same_ends(corpus, tokenizer, self.rows, lengths, self.scored)
            if (count := len(ends[lengths[0]])) < self.rows:
                raise KvxferError(
                    f"eval.rows={self.rows}: {corpus.name} has only {count} rows of {lengths[-1] + self.scored} "
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
                count = len(ends[longest])
                has = f"{corpus.name} has only {count} rows of {needed} tokens for evaluation"
                if count >= min(FEWEST_ROWS, self.rows):
                    notes += [f"{has}."] if count < self.rows else []
                    return ends
                notes.append(f"No prefix of {longest} tokens of {corpus.name}: {has}.")
            lengths = lengths[:-1]
        if corpus.name == subject.corpus.name:
            raise KvxferError(f"eval.prefixes: {notes[-1]} Give shorter ones, as eval.prefixes=[64]")
        return None

    def _point(self, subject: Subject, name: str, prefix: int, items: list[Item]) -> dict[str, Any]:
        parts = equal_lengths(items, max(1, self.batch_tokens // (prefix + self.scored)), lambda item: len(item.prompt))
        prompts = [(part, torch.tensor([item.prompt for item in part])) for part in parts]
        batches = [Batch(part, prompt, prefix, prompt) for part, prompt in prompts]
        with progress(f"perplexity {name} {prefix}", len(items), "rows") as advance:
            found = evaluate_items(batches, lambda b: prefix_conditions(subject.transfer, b.prompt), None, advance)
        records = list(found.values())
        summary = {key: value for key, value in summarise(records).items() if key in ("conditions", "tests")}
        return {"domain": name, "prefix": prefix, **summary, "items": records}
