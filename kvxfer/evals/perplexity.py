"""Perplexity of text that follows a handed-over prefix, at several prefix lengths and in several domains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.corpus import CorpusSpec, load_rows
from kvxfer.errors import KvxferError
from kvxfer.evals.base import Data, Evaluation, Subject
from kvxfer.evals.conditions import Prepared, given_conditions, mapped_conditions, own_conditions
from kvxfer.evals.evaluation import evaluate_items
from kvxfer.evals.items import Batch, Item, batches
from kvxfer.evals.markdown import table
from kvxfer.evals.statistics import summarise
from kvxfer.evals.tables import number, p_value, percent, perplexity
from kvxfer.evals.verdict import Verdict, verdict
from kvxfer.progress import progress

CONDITIONS = ("ceiling", "source", "floor", "mapped")


@dataclass(frozen=True)
class Perplexity(Evaluation):
    """``eval=perplexity``: the ``scored`` tokens after prefixes of each length, of the same rows of each domain.

    ``prefixes`` are in tokens; none means the length of the run's rows, half of it, and eight times it.
    """

    kind = "perplexity"
    heading = "Perplexity after a prefix"

    prefixes: tuple[int, ...] = ()
    scored: int = 64
    rows: int = 64
    domains: tuple[str, ...] = ()
    batch_size: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("scored", "rows", "batch_size"):
            if getattr(self, key) < 1:
                raise KvxferError(f"eval.{key}={getattr(self, key)} must be 1 or more")
        if any(prefix < 2 for prefix in self.prefixes):
            raise KvxferError(f"eval.prefixes={list(self.prefixes)} must all be 2 tokens or more")

    def lengths(self, calibrated: int) -> tuple[int, ...]:
        """The prefix lengths: those given, or from half the calibrated length to eight times it."""
        return self.prefixes or (calibrated // 2, calibrated, 8 * calibrated)

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Conditions and tests for every domain and prefix length."""
        found = []
        for corpus in subject.texts:
            for prefix in self.lengths(subject.corpus.length):
                subject.pair.check_length(prefix + self.scored, "eval.prefixes")
                found.append({"domain": corpus.name, "prefix": prefix, **self._at(subject, corpus, prefix)})
        return {"calibrated_length": subject.corpus.length, "points": found}

    def _at(self, subject: Subject, corpus: CorpusSpec, prefix: int) -> dict[str, Any]:
        items = list(self._items(subject, corpus, prefix))
        pair, plan = subject.pair, subject.plan

        def conditions(batch: Batch) -> dict[str, Prepared]:
            given = {
                **own_conditions(pair, batch.prompt, batch.context),
                **given_conditions(pair, plan, batch.prompt),
                **mapped_conditions(pair, subject.mapper, plan, batch.prompt, batch.donors, ("mapped",)),
            }
            return {name: given[name] for name in CONDITIONS}

        with progress(f"perplexity {corpus.name} {prefix}", len(items), "rows") as advance:
            records = evaluate_items(list(batches(items, self.batch_size)), conditions, None, advance)
        return {**summarise(list(records.values())), "items": list(records.values())}

    def _items(self, subject: Subject, corpus: CorpusSpec, prefix: int) -> Iterator[Item]:
        rows = load_rows(corpus, subject.pair.tokenizer, "evaluation", self.rows, prefix + self.scored)
        for n, (tokens, documents) in enumerate(zip(rows.tokens.tolist(), rows.documents, strict=True)):
            yield Item(str(n), documents[0], rows.domain, tuple(tokens[:prefix]), prefix, tuple(tokens[prefix:]))

    @classmethod
    def verdict(cls, data: Data) -> Verdict:
        """At the longest prefix of the run's own text: against the source."""
        own = data["points"][0]["domain"]
        last = max((point for point in data["points"] if point["domain"] == own), key=lambda point: point["prefix"])
        return verdict(last["conditions"], last["tests"], subject=f"After {last['prefix']} tokens the mapped cache")

    @classmethod
    def sections(cls, data: Data) -> list[str]:
        """One table, a row per domain and length."""
        header = ("Text", "Prefix", "Ceiling", "Source", "Mapped", "Zeroed", "Gap recovered (nats)", "Δ nats", "p")
        rows = []
        for point in data["points"]:
            conditions, test = point["conditions"], point["tests"]["mapped_vs_source"]
            cells = [perplexity(conditions[name]["perplexity"]) for name in ("ceiling", "source", "mapped", "floor")]
            gap, delta = conditions["mapped"]["gap_recovered_nats"], number(test["nll_difference"], sign=True)
            rows.append((point["domain"], str(point["prefix"]), *cells, percent(gap), delta, p_value(test["nll_p"])))
        return [*table(header, rows)]

    @classmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """Nats of every condition by domain and length."""
        return {
            f"{point['domain']}/{point['prefix']}/{name}/nats": row["nats"]
            for point in data["points"]
            for name, row in point["conditions"].items()
        }

    @classmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Nothing yet."""
