"""A conversation that changes models at every turn: does what is lost add up?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from kvxfer.evals.evaluation import Evaluation, Subject
from kvxfer.evals.specs import DOWN, LARGE, PATTERNS, SMALL, UP, MultiturnSpec
from kvxfer.evals.statistics import paired_difference, summarise
from kvxfer.evals.turns import Handed, Stage, play, text_talks, toy_talks
from kvxfer.progress import progress


@dataclass(frozen=True)
class Multiturn(MultiturnSpec, Evaluation):
    """``eval=multiturn``: what it measures."""

    def needs_reverse(self, reverse: bool) -> bool:
        """Whether a pattern hands over in the other direction than the run's own."""
        wanted = {direction for pattern in self.patterns for direction in PATTERNS[pattern]}
        return bool(wanted - {DOWN if reverse else UP})

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Every conversation under every pattern."""
        pair = subject.pair
        toy = subject.corpus.kind == "toy"
        longest = self.turns * (self.segment + 4) if toy else (self.turns + 1) * self.segment
        pair.check_length(longest, "eval.turns, eval.segment")
        if toy:
            talks = toy_talks(self.stories, self.turns, self.segment, pair.tokenizer, self.seed)
        else:
            talks = text_talks(subject.corpus, self.rows, self.turns, self.segment, pair.tokenizer)
        with progress(f"multiturn {pair.name}", len(talks), "conversations") as advance:
            records, handed = play(self._stage(subject), talks, self.patterns, self.batch_size, advance)
        found = {pattern: summarise_pattern(records, pattern, handed[pattern]) for pattern in self.patterns}
        models = {"small": pair.source.name, "large": pair.target.name}
        if pair.spec.reverse:
            models = {"small": pair.target.name, "large": pair.source.name}
        setting = {"turns": self.turns, "segment": self.segment, "max_hops": self.max_hops, "models": models}
        return {**setting, "conversations": len(talks), "answers": toy, "patterns": found, "items": records}

    def _stage(self, subject: Subject) -> Stage:
        own, other = (DOWN, UP) if subject.pair.spec.reverse else (UP, DOWN)
        transfers = {own: subject.transfer}
        if subject.reverse is not None:
            transfers[other] = subject.reverse
        models = dict(zip(own, (subject.pair.source, subject.pair.target), strict=True))
        return Stage(models, transfers, self.max_hops)


def summarise_pattern(records: Sequence[Mapping[str, Any]], pattern: str, handed: Sequence[Handed]) -> dict[str, Any]:
    """One pattern against the answering model's own prefill (``ceiling``) and the small model alone (``source``)."""
    by_turn: list[list[dict[str, Any]]] = [[] for _ in handed]
    for record in records:
        number = record["turn"] - 1
        by_turn[number].append(_compared(record, pattern, handed[number].answering))
    turns = [
        {"turn": number + 1, **asdict(given), **_without_kinds(summarise(items))}
        for number, (given, items) in enumerate(zip(handed, by_turn, strict=True))
    ]
    slopes = {f"slope_{measure}": _slope(by_turn, handed, measure) for measure in ("nats", "correct")}
    return {"turns": turns, "pooled": _without_kinds(summarise([i for items in by_turn for i in items])), **slopes}


def _compared(record: Mapping[str, Any], pattern: str, answering: str) -> dict[str, Any]:
    """The record with the conditions that a turn of a pattern is compared with."""
    names = {"ceiling": answering, "source": SMALL, "mapped": pattern}
    scores = {
        measure: {condition: record[measure][name] for condition, name in names.items()}
        for measure in ("nats", "correct")
        if record.get(measure)
    }
    return {**record, **scores}


def _without_kinds(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "by_kind"}


def _slope(
    by_turn: Sequence[Sequence[Mapping[str, Any]]], handed: Sequence[Handed], measure: str
) -> dict[str, float | int] | None:
    """How much the drift grows each turn: the mean over conversations of each one's least-squares slope.

    Turns are centred for each answering model by itself, so that the difference between two models is no slope. Turns
    before anything was mapped have no drift and are left out. None if that leaves no model with two turns.
    """
    chosen = [n for n, given in enumerate(handed) if given.mapped]
    if measure not in by_turn[0][0] or not chosen:
        return None
    x = np.array(chosen, dtype=np.float64)
    for name in (SMALL, LARGE):
        own = [n for n, turn in enumerate(chosen) if handed[turn].answering == name]
        if own:
            x[own] -= x[own].mean()
    if not np.any(x):
        return None
    drift: Float[np.ndarray, "conversations turns"] = np.array(
        [[_drift(item, measure) for item in by_turn[turn]] for turn in chosen], dtype=np.float64
    ).T
    slopes = drift @ x / (x @ x)
    return paired_difference(slopes, np.zeros_like(slopes), [item["document"] for item in by_turn[0]])


def _drift(item: Mapping[str, Any], measure: str) -> float:
    per = item["tokens"] if measure == "nats" else 1
    return (float(item[measure]["mapped"]) - float(item[measure]["ceiling"])) / per
