"""One evaluation of a map: what it is set to, and what it measures.

An evaluation is one small class in a file of its own, on top of its settings (``specs``). ``measure`` gives plain
JSON. All that a reader sees is made from that JSON alone, in ``kvxfer.report``, so that reports of finished runs can be
made again and set side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.evals.specs import EvaluationSpec
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.text.spec import CorpusSpec

Data = Mapping[str, Any]


Shared = Callable[[str, Collection[str], Mapping[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]
"""Gives a result that does not depend on the map: its name, the evaluation's fields that do not decide it, what else
does beside pair, text and plan as plain JSON, and a function that finds it. What was found under that name for these is
not found again."""


def calculate(
    name: str, unread: Collection[str], asked: Mapping[str, Any], find: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A ``Shared`` that remembers nothing."""
    return find()


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and what it may be asked about.

    Attributes:
        mapper: the map, ready to run on the target's device.
        directory: where the map lies, with what its fit recorded beside it.
        corpus: the run's own text; only its evaluation split is read.
        domains: more texts, as ``eval.domains`` names them.
        reverse: the handover the other way round, with the map of that direction; None unless ``needs_reverse``.
        shared: what other evaluations of this pair and text may have found already (``Shared``).
        fit_seconds: how long the map's calibration and fit took; None where that is unknown.
    """

    pair: Pair
    cache_map: CacheMap
    mapper: Mapper
    directory: Path
    plan: Plan
    corpus: CorpusSpec
    domains: tuple[CorpusSpec, ...]
    reverse: Transfer | None = None
    shared: Shared = calculate
    fit_seconds: float | None = None

    @property
    def transfer(self) -> Transfer:
        """The handover that is evaluated."""
        return Transfer(self.pair, self.mapper, self.plan)

    @property
    def calibrated_length(self) -> int | None:
        """Tokens of the rows that the map was calibrated on; None where it does not say."""
        found = self.cache_map.manifest.get("calibrated_on")
        return None if found is None else int(found["length"])

    @property
    def texts(self) -> tuple[CorpusSpec, ...]:
        """The run's own text, then the others, each once."""
        known = {self.corpus.name}
        return (self.corpus, *(each for each in self.domains if each.name not in known))


@dataclass(frozen=True)
class Evaluation(EvaluationSpec, ABC):
    """The base of every evaluation."""

    def needs_reverse(self, reverse: bool) -> bool:
        """Whether the map of the other direction is needed too; ``reverse`` is the run's ``pair.reverse``."""
        return False

    def check(self, pair: Pair, corpus: CorpusSpec, plan: Plan) -> None:
        """Refuse what this pair can't be asked, as far as it is known before there is a map (none is made for it)."""

    @abstractmethod
    def measure(self, subject: Subject) -> dict[str, Any]:
        """Everything that was measured, as plain JSON types."""
