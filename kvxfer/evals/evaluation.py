"""One evaluation of a map: what it is set to, and what it measures.

An evaluation is one small dataclass in a file of its own. Its fields are the keys of its options (``configs/eval``);
``measure`` gives plain JSON. All that a reader sees is made from that JSON alone, in ``kvxfer.report``, so that reports
of finished runs can be made again and set side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvxfer.errors import KvxferError
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.text.corpus import CorpusSpec

Data = Mapping[str, Any]


Shared = Callable[[str, Mapping[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]
"""Gives a result that does not depend on the map: its name, all that decides it beside pair and text as plain JSON, and
a function that finds it. What was found under that name for these is not found again."""


def calculate(name: str, asked: Mapping[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
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
class Evaluation(ABC):
    """The base of every evaluation.

    ``kind`` is its name in ``kvxfer.evals.kinds``; ``version`` is raised whenever its numbers may change. One that is
    ``timed`` asks another question on another machine.
    """

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    timed: ClassVar[bool] = False

    name: str

    def at_least(self, **least: int) -> None:
        """Refuse a field below the least that it may be; None is allowed where a field may be it."""
        for key, lowest in least.items():
            if (value := getattr(self, key)) is not None and value < lowest:
                raise KvxferError(f"eval.{key}={value} must be {lowest} or more")

    def identity(self) -> dict[str, Any]:
        """What decides the numbers, as plain JSON types; the option's name does not."""
        fields = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        return {"kind": self.kind, "version": self.version, **{k: v for k, v in fields.items() if k != "name"}}

    def needs_reverse(self, reverse: bool) -> bool:
        """Whether the map of the other direction is needed too; ``reverse`` is the run's ``pair.reverse``."""
        return False

    @abstractmethod
    def measure(self, subject: Subject) -> dict[str, Any]:
        """Everything that was measured, as plain JSON types."""
