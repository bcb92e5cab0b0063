"""One evaluation of a map: what it is set to, what it measures, and how a reader is told.

An evaluation is one small dataclass in a file of its own. Its fields are the keys of its options (``configs/eval``);
``measure`` gives plain JSON, and everything a reader sees is made from that JSON alone, so that reports of finished
runs can be made again and set side by side. Questions with answers and text that follows a prefix (``items``) have a
stage of their own, since their baselines are shared between maps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvxfer.evals.statistics import scored_lists
from kvxfer.handoff.transfer import Transfer
from kvxfer.maps.apply import Mapper
from kvxfer.maps.artifact import CacheMap
from kvxfer.maps.plan import Plan
from kvxfer.models.pair import Pair
from kvxfer.report.verdict import Verdict
from kvxfer.text.corpus import CorpusSpec

Data = Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and what it may be asked about.

    Attributes:
        mapper: the map, ready to run on the target's device.
        directory: where the map lies, with what its fit recorded beside it.
        corpus: the run's own text; only its evaluation split is read.
        domains: more texts, as ``eval.domains`` names them.
        outputs: where other runs are.
        reverse: the handover the other way round, with the map of that direction; None unless ``needs_reverse``.
    """

    pair: Pair
    cache_map: CacheMap
    mapper: Mapper
    directory: Path
    plan: Plan
    corpus: CorpusSpec
    domains: tuple[CorpusSpec, ...]
    outputs: Path
    reverse: Transfer | None = None

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
    """The base of every evaluation but ``items``.

    ``kind`` is its name in ``kvxfer.evals.kinds``, ``heading`` what a report calls it; ``version`` is raised whenever
    its numbers may change. One that is ``timed`` asks another question on another machine.
    """

    kind: ClassVar[str]
    heading: ClassVar[str]
    version: ClassVar[int] = 1
    timed: ClassVar[bool] = False

    name: str

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

    @classmethod
    @abstractmethod
    def verdict(cls, data: Data) -> Verdict:
        """What it comes to, in a sentence with its numbers."""

    @classmethod
    @abstractmethod
    def sections(cls, data: Data) -> list[str]:
        """Markdown: tables, what they mean, and the figures by the paths that ``figures`` gives them."""

    @classmethod
    @abstractmethod
    def metrics(cls, data: Data) -> dict[str, float]:
        """The numbers to log, flat."""

    @classmethod
    def by_task(cls, data: Data) -> dict[str, Mapping[str, Any]]:
        """The ``conditions`` of every task that has answers, by its name, for the figure of all tasks; none here."""
        return {}

    @classmethod
    def paired(cls, data: Data) -> dict[str, list[Mapping[str, Any]]]:
        """Lists of single items (``paired_item``) by name, on which two runs are tested; here by their nats."""
        return scored_lists(data)

    @classmethod
    @abstractmethod
    def figures(cls, data: Data, folder: Path) -> None:
        """Draw into ``folder`` (``figures/`` beside the report) as ``<kind>_<name>.png``."""
