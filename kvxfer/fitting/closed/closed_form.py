"""What all closed forms share: choose source layers, solve each distinct design once, choose settings out of sample."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.attention import map_scores
from kvxfer.fitting.closed.design import Part
from kvxfer.fitting.closed.engine import Engine, sharing
from kvxfer.fitting.closed.judges import CRITERIA
from kvxfer.fitting.closed.penalties import LAM_GRID, Isotropic, Penalty
from kvxfer.fitting.closed.ranks import Full, Rank
from kvxfer.fitting.closed.selection import (
    METHODS,
    Selection,
    check_k,
    choose_greedily,
    choose_top_k,
    ranked,
    single_layer_scores,
)
from kvxfer.fitting.closed.solver import Fit, LinearLayer, Splits
from kvxfer.maps.blocks import DESIGNS, KINDS, Block, Features
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments, Output

_OPTIONS = {
    "method": METHODS,
    "selection": ("shared", "separate"),
    "criterion": CRITERIA,
    "k_per": ("pair", "layer"),
}


@dataclass(frozen=True)
class Dials:
    """The hyperparameters that all solvers from moments share.

    Args:
        k: how many source layers feed a target layer, or ``auto``: the k in 1, 2, 4, 8, ... whose maps score best on
            the validation split.
        k_per: whether ``auto`` is one k for the ``pair``, or one for every target ``layer`` (and kind, if they are
            selected separately).
        method: ``topk`` (the best single layers), ``greedy`` (forward selection) or ``all``.
        selection: ``shared`` (keys and values read the same layers) or ``separate``.
        selection_lam: λ of the fits that rank source layers, or ``auto``: every target layer has each source layer at
            its own best λ of ``LAM_GRID`` on the validation split.
        criterion: what selection and automatic choices maximise: ``r2``, ``query`` (R² in the output's metric) or
            ``attention`` (what is right of the attention's output on the probe).
        pool: how many of the best single layers greedy selection considers.
        features: the design.
        penalty: how the map shrinks.
        rank: what the map may span.
    """

    k: int | float | str
    method: str = "topk"
    selection: str = "shared"
    selection_lam: float | str = 1e-3
    criterion: str = "r2"
    pool: int = 6
    k_per: str = "pair"
    features: Features = DESIGNS["same"]
    penalty: Penalty = field(default_factory=Isotropic)
    rank: Rank = field(default_factory=Full)

    def __post_init__(self) -> None:
        k = self.k
        if k != "auto" if isinstance(k, str) else not (math.isfinite(k) and k == int(k) and k >= 1):
            raise KvxferError(f"solver.k={self.k} must be 1 or more source layers (a whole number), or auto")
        for key, options in _OPTIONS.items():
            if getattr(self, key) not in options:
                raise KvxferError(f"solver.{key}={getattr(self, key)!r} is none of {', '.join(options)}")
        lam = self.selection_lam
        if lam != "auto" if isinstance(lam, str) else not 0 <= lam < math.inf:
            raise KvxferError(f"solver.selection_lam={lam} must be a number of 0 or more, or auto")
        if self.pool < 1:
            raise KvxferError(f"solver.pool={self.pool} must be 1 or more source layers")

    @property
    def needs_metrics(self) -> bool:
        """Whether penalty, rank or criterion read the outputs' metrics."""
        return self.penalty.needs_metric or self.rank.needs_metric or self.criterion == "query"

    @property
    def selection_lams(self) -> tuple[float, ...]:
        """Every λ at which source layers are scored."""
        return LAM_GRID if isinstance(self.selection_lam, str) else (float(self.selection_lam),)

    @property
    def needs_probe(self) -> bool:
        """Whether the criterion is measured on the probe."""
        return self.criterion == "attention"

    @property
    def needs_weights(self) -> bool:
        """Whether the solver reads ``splits.weighted``."""
        return False

    def rank_width(self, width: int, heads: int) -> int:
        """The columns that a rank must stay below: of an output of so many columns and heads, or of what is solved."""
        return width


@dataclass(frozen=True)
class ClosedForm(Dials, ABC):
    """A solver that is one closed form."""

    name: str = "closed"

    @abstractmethod
    def parts(self, blocks: tuple[Block, ...], layout: Layout) -> list[Part]:
        """The independent solves that make up one output from a design."""

    def moments(self, splits: Splits, split: str, outputs: list[Output]) -> Moments:
        """The moments that outputs are fitted, chosen or reported on; source layers are ranked by the plain ones."""
        return splits.moments(split, outputs)

    def apart(self, outputs: list[Output]) -> list[list[Output]]:
        """The outputs of one design in groups that may share a solve."""
        return [outputs]

    def notes(self, splits: Splits, outputs: list[Output], features: int) -> dict[str, Any]:
        """What else a record says of outputs that were solved together from so many features."""
        return {}

    def steps(self, moments: Moments) -> int:
        """Single-layer fits, then one fit per target layer and kind."""
        return len(moments.layout.source_layers) * len(KINDS) + len(moments.layout.outputs)

    def fit(self, splits: Splits, advance: Callable[[], None] = lambda: None) -> Fit:
        """Choose source layers, then solve each distinct design once for all outputs that share it."""
        engine = Engine(self, splits)
        candidates = splits.fit.layout.source_layers
        scores = single_layer_scores(engine.quick_score, candidates, advance)
        order = ranked(scores, candidates, self.selection == "shared")
        curves: dict[str, Any] = {}
        if self.k == "auto" and self.method != "all":
            chosen, curves = self._choose_k(engine, order, candidates)
        else:
            k = _fewest(order) if self.method == "all" else int(self.k)
            chosen = self._choose(engine, order, k, candidates)
        selection = Selection(candidates, scores, chosen)
        layers: dict[Output, LinearLayer] = {}
        records: dict[Output, dict[str, Any]] = {}
        for blocks, outputs in sharing(self.features, selection.chosen).items():
            for output, (layer, record) in engine.solve(blocks, outputs).items():
                layers[output], records[output] = layer, record
                advance()
        if splits.probe is not None:
            for output, found in map_scores(layers, splits.probe).items():
                records[output] |= found
        outputs = sorted(layers, key=lambda output: (KINDS.index(output[1]), output[0]))
        for name in ("penalty", "rank"):
            curves[name] = {f"{o[1]}.{o[0]}": records[o].pop(f"{name}_curve") for o in outputs}
        return Fit({o: layers[o] for o in outputs}, selection, [records[o] for o in outputs], curves)

    def _choose(
        self, engine: Engine, order: dict[Output, list[int]], k: int, candidates: list[int]
    ) -> dict[Output, tuple[int, ...]]:
        check_k(k, candidates, None if engine.layout.kept is None else _fewest(order))
        if self.method == "greedy":
            return choose_greedily(engine.quick_score, order, k, self.pool, self.selection == "shared")
        return choose_top_k(order, k)

    def _choose_k(
        self, engine: Engine, order: dict[Output, list[int]], candidates: list[int]
    ) -> tuple[dict[Output, tuple[int, ...]], dict[str, Any]]:
        """The source layers at the k whose maps score best on validation, and the whole curve or curves."""
        choices, scores, most = {}, {}, _fewest(order)
        for k in sorted({min(2**power, most) for power in range(most.bit_length() + 1)}):
            choices[k] = self._choose(engine, order, k, candidates)
            scores[k] = {
                output: record["validation"]
                for blocks, outputs in sharing(self.features, choices[k]).items()
                for output, (_, record) in engine.solve(blocks, outputs).items()
            }
        if self.k_per == "pair":
            curve = [(k, sum(found.values()) / len(found)) for k, found in scores.items()]
            return choices[_best(curve)], {"k": curve}
        chosen, curves = {}, {}
        for layer, kind in order:
            kinds = KINDS if self.selection == "shared" else (kind,)
            curve = [(k, sum(found[layer, each] for each in kinds) / len(kinds)) for k, found in scores.items()]
            chosen[layer, kind], curves[f"{kind}.{layer}"] = choices[_best(curve)][layer, kind], curve
        return chosen, {"k_outputs": curves}


def _best(curve: list[tuple[int, float]]) -> int:
    """The value of the best score; equal scores favour the smaller."""
    return max(curve, key=lambda point: point[1])[0]


def _fewest(order: dict[Output, list[int]]) -> int:
    """How many source layers every target layer has to choose from."""
    return min(len(layers) for layers in order.values())
