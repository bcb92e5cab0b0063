"""Committed results (see ``tools.collect``) as arrays, and which of a pair's maps may be compared with one another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from kvxfer.evals.statistics import gap_recovered, gap_recovered_nats
from kvxfer.fitting.trained.specs import TRAINED, TrainerSpec
from kvxfer.text.spec import RowCounts

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """Nats of every item (summed over its tokens), and whether it was answered right, where there are answers."""

    nats: Float[np.ndarray, " items"]
    correct: Bool[np.ndarray, " items"] | None

    @staticmethod
    def read(data: Json) -> Scores:
        """Scores as ``tools.collect`` writes them."""
        right = data["correct"]
        flags = None if right is None else np.array([letter == "1" for letter in right], dtype=bool)
        return Scores(np.array(data["nats"], dtype=np.float64), flags)

    @property
    def accuracy(self) -> float | None:
        """Share of right answers."""
        return None if self.correct is None else float(self.correct.mean())


@dataclass(frozen=True)
class Baseline:
    """The items of an evaluation and their scores under every condition that needs no map.

    ``asked`` is what a command says to ask for them: ``eval=mapped``.
    """

    id: str
    documents: list[str]
    tokens: Float[np.ndarray, " items"]
    conditions: dict[str, Scores]
    asked: str

    def per_token(self, scores: Scores) -> float:
        """Nats per scored token."""
        return float(scores.nats.sum() / self.tokens.sum())

    def gap(self, scores: Scores) -> float | None:
        """Gap recovered in nats; None where the ceiling does not beat the source."""
        found = [self.per_token(each) for each in (scores, self.conditions["source"], self.conditions["ceiling"])]
        return gap_recovered_nats(*found)

    def context(self, scores: Scores) -> float | None:
        """Context recovered in nats; None where the context is worth nothing to the target."""
        found = [self.per_token(each) for each in (scores, self.conditions["no_context"], self.conditions["ceiling"])]
        return gap_recovered_nats(*found)

    def gap_accuracy(self, scores: Scores) -> float | None:
        """Gap recovered in accuracy; None without answers or without a gap."""
        own, source, ceiling = (s.accuracy for s in (scores, self.conditions["source"], self.conditions["ceiling"]))
        return None if own is None or source is None or ceiling is None else gap_recovered(own, source, ceiling)


_DEFAULTS = {
    "method": "topk",
    "selection": "shared",
    "selection_lam": 0.001,
    "criterion": "r2",
    "centred": True,
    "pool": 6,
    "k_per": "pair",
}
_UNSAID = {**_DEFAULTS, "per_block": False, "candidates": ["ridge", "head_local", "weighted"], "choose": "layer"}
"""What a command need not say."""

_CONTENT = {"attention": 0.0, "mse": 1.0}
_PRESETS: dict[str, dict[str, Any]] = {"mlp": _CONTENT, "mlp_small": {**_CONTENT, "hidden": 256, "share": True}}
"""What options of trained solvers set and their classes have otherwise."""

_NOT_ASKED = ("name", "convention")
"""What an option says of itself beside its settings."""

_GROUPS = ("solver", "penalty", "rank", "features")


@dataclass(frozen=True)
class MapResult:
    """One map: what was asked for, what it costs and what it scored."""

    data: Json
    scores: Scores

    def name(self, group: str) -> str:
        """The option of ``solver``, ``penalty``, ``rank`` or ``features``."""
        return str(self.data["settings"][group]["name"])

    def dial(self, group: str, key: str) -> Any:
        """A value of an option, as it was asked for; None if the option has no such key."""
        return self.data["settings"][group].get(key)

    @property
    def key(self) -> tuple[str, ...]:
        """Its row: solver, penalty, rank and features."""
        return tuple(self.name(group) for group in _GROUPS)

    @property
    def trained(self) -> bool:
        """Whether its map was trained, on the map of a closed form."""
        return "trainer" in self.data

    @property
    def share(self) -> float:
        """Cost per token as a share of the target's prefill."""
        return float(self.data["cost"]["share_of_prefill_flops"])

    @property
    def handoff(self) -> float:
        """FLOPs of a whole handoff under the plan, as a share of the target's prefill."""
        return float(self.data["cost"]["handoff_share_of_prefill_flops"])

    @property
    def r2(self) -> float:
        """Mean held-out R² of keys and values."""
        return (self.data["r2_held_out"]["keys"] + self.data["r2_held_out"]["values"]) / 2

    @property
    def corpus(self) -> str:
        """The text that it was calibrated on, as a text to compare."""
        return json.dumps(self.data["calibration"]["corpus"], sort_keys=True)

    @property
    def tuned(self) -> bool:
        """Whether λ, α and rank were left to the validation split, as far as its options have them."""
        dials = (self.dial("penalty", "lam"), self.dial("penalty", "alpha"), self.dial("rank", "r"))
        plain = self.dial("rank", "metric") in (None, "isotropic") and not self.dial("penalty", "per_block")
        return plain and all(value in (None, "auto") for value in dials)

    def settings_without(self, *left_out: tuple[str, str]) -> str:
        """All settings but some ``(group, key)``, and the calibration's text, as a text to compare."""
        kept = {
            group: {k: value for k, value in values.items() if (group, k) not in left_out and k != "convention"}
            for group, values in self.data["settings"].items()
            if (group, "*") not in left_out
        }
        return json.dumps([kept, self.data["calibration"]["settings"]], sort_keys=True) + self.corpus

    @property
    def overrides(self) -> str:
        """The command line that asks for this map, less its pair and what is usual."""
        found = []
        for group in _GROUPS:
            option, *changed = self.name(group).split()
            found += [f"{group}={option}", *(f"{group}.{each}" for each in changed)]
            unsaid = self._unsaid if group == "solver" else _UNSAID
            for key, value in self.data["settings"][group].items():
                dial = (group, key) in (("penalty", "lam"), ("penalty", "alpha"), ("rank", "r")) and value == "auto"
                usual = dial or key in _NOT_ASKED or group == "features" or value in (None, unsaid.get(key))
                if not usual and (key, value) != ("metric", "isotropic"):
                    found.append(f"{group}.{key}={json.dumps(value).replace(' ', '')}")
        found += [
            f"trainer.{key}={json.dumps(value)}"
            for key, value in self.data.get("trainer", {}).items()
            if key not in _NOT_ASKED and value != self._usual_trainer(key)
        ]
        if self.trained and (rows := self.data["training"]["corpus"]["rows"]["training"]) != RowCounts.training:
            found.append(f"corpus.rows.training={rows}")
        found += [
            f"calibration.{key}={json.dumps(value)}" for key, value in self.data["calibration"]["settings"].items()
        ]
        return " ".join(part.replace('"', "") for part in found)

    def _usual_trainer(self, key: str) -> Any:
        """The value of a trainer's key that goes without saying."""
        return TRAINED[self.name("solver")].lr if key == "lr" else getattr(TrainerSpec, key)

    @property
    def _unsaid(self) -> dict[str, Any]:
        """The values of ``solver`` that go without saying."""
        if not self.trained:
            return _UNSAID
        name = self.name("solver")
        own = {item.name: item.default for item in fields(TRAINED[name])}
        return {**_UNSAID, "base": "ridge", **own, **_PRESETS.get(name, {})}


@dataclass(frozen=True)
class PairResults:
    """The maps of a pair that were asked the same: those of the baseline that most of them share.

    Attributes:
        maps: closed forms.
        trained: the others.
        beside: trained maps of a file of their own that were asked the very same items.
    """

    name: str
    baseline: Baseline
    maps: list[MapResult]
    trained: list[MapResult] = field(default_factory=list)
    beside: list[MapResult] = field(default_factory=list)

    @property
    def option(self) -> str:
        """The pair's option, without what it was asked."""
        return self.name.partition("/")[0]

    @property
    def asked(self) -> str:
        """How a command begins that evaluates a map of the pair on these very items."""
        return f"pair={self.option} {self.baseline.asked}"

    def command(self, one: MapResult) -> str:
        """What gives a map and its scores again."""
        calibration = one.data["calibration"]
        # Which source layers a small pass keeps depends on the designs that it is to serve.
        said = "keep_layers" in calibration["settings"] and "=" not in calibration["features"]
        kept = f" calibration.features={calibration['features']}" if said else ""
        return f"python evaluate.py {self.asked} {one.overrides}{kept}"

    @cached_property
    def calibrated_alike(self) -> list[MapResult]:
        """The maps of the text that most of them were calibrated on."""
        usual = commonest(one.corpus for one in self.maps)
        return [one for one in self.maps if one.corpus == usual]

    @property
    def rivals(self) -> list[MapResult]:
        """What may be the best for its cost: closed forms of the usual text, and trained maps."""
        return [*self.calibrated_alike, *self.beside]

    @cached_property
    def rows(self) -> dict[tuple[str, ...], MapResult]:
        """One map for each solver, penalty, rank and features: dials left to validation, the rest as in most maps.

        Which one it is does not depend on any score: picking the best would favour rows with more tries.
        """
        return one_each([one for one in self.calibrated_alike if one.tuned])


def one_each(maps: Sequence[MapResult]) -> dict[tuple[str, ...], MapResult]:
    """For each row the map whose k, method, selection and criterion are those of most maps; others have no row."""
    usual = {key: commonest(str(one.dial("solver", key)) for one in maps) for key in ("k", *_DEFAULTS)}
    alike = [one for one in maps if all(str(one.dial("solver", key)) == value for key, value in usual.items())]
    found: dict[tuple[str, ...], MapResult] = {}
    for one in sorted(alike, key=MapResult.settings_without):
        found.setdefault(one.key, one)
    return found


def shared_overrides(maps: Sequence[MapResult]) -> list[str]:
    """What the command lines of some maps have in common."""
    first, *others = [one.overrides.split() for one in maps]
    return [part for part in first if all(part in other for other in others)]


def commonest(values: Iterable[str]) -> str:
    """The commonest of some texts; of equally common ones the first in the alphabet."""
    counts = Counter(values)
    return min(counts, key=lambda text: (-counts[text], text), default="")
