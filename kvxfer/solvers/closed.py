"""What all closed forms share: choose source layers, solve each distinct design once, choose settings out of sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.features import DESIGNS, KINDS, Block, Features
from kvxfer.judges import CRITERIA
from kvxfer.layout import Layout
from kvxfer.moments import Moments, Output
from kvxfer.penalties import Isotropic, Penalty
from kvxfer.ranks import Full, Rank
from kvxfer.selection import (
    METHODS,
    Selection,
    check_k,
    choose_greedily,
    choose_top_k,
    ranked,
    single_layer_scores,
)
from kvxfer.solvers.base import Fit, LinearLayer, Splits
from kvxfer.solvers.engine import Engine, Part, sharing


@dataclass(frozen=True)
class ClosedForm:
    """A solver from moments.

    Args:
        k: how many source layers feed a target layer, or ``auto``: the k in 1, 2, 4, 8, ... whose maps score best on
            the validation split.
        method: ``topk`` (the best single layers), ``greedy`` (forward selection) or ``all``.
        selection: ``shared`` (keys and values read the same layers) or ``separate``.
        selection_lam: λ of the fits that rank source layers.
        criterion: what selection and automatic choices maximise: ``r2``, or ``query`` (R² in the output's metric).
        pool: how many of the best single layers greedy selection considers.
        features: the design.
        penalty: how the map shrinks.
        rank: what the map may span.
    """

    k: int | float | str
    method: str = "topk"
    selection: str = "shared"
    selection_lam: float = 1e-3
    criterion: str = "r2"
    pool: int = 6
    features: Features = DESIGNS["same"]
    penalty: Penalty = field(default_factory=Isotropic)
    rank: Rank = field(default_factory=Full)
    name: str = "closed"

    def __post_init__(self) -> None:
        if self.k != "auto" if isinstance(self.k, str) else self.k != int(self.k) or self.k < 1:
            raise KvxferError(f"solver.k={self.k} must be 1 or more source layers (a whole number), or auto")
        for key, options in (("method", METHODS), ("selection", ("shared", "separate")), ("criterion", CRITERIA)):
            if getattr(self, key) not in options:
                raise KvxferError(f"solver.{key}={getattr(self, key)!r} is none of {', '.join(options)}")
        if not self.selection_lam >= 0:
            raise KvxferError(f"solver.selection_lam={self.selection_lam} must be 0 or more")
        if self.pool < 1:
            raise KvxferError(f"solver.pool={self.pool} must be 1 or more source layers")

    @property
    def needs_metrics(self) -> bool:
        """Whether penalty, rank or criterion read the outputs' metrics."""
        return self.penalty.needs_metric or self.rank.needs_metric or self.criterion == "query"

    @property
    def needs_weights(self) -> bool:
        """Whether the solver reads ``splits.weighted``."""
        return False

    def parts(self, blocks: tuple[Block, ...], layout: Layout) -> list[Part]:
        """The independent solves that make up one output from a design."""
        raise NotImplementedError

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
        if self.k == "auto":
            k, curves["k"] = self._choose_k(engine, order, candidates)
        else:
            k = _fewest(order) if self.method == "all" else int(self.k)
        selection = Selection(candidates, scores, self._choose(engine, order, k, candidates))
        layers: dict[Output, LinearLayer] = {}
        records: dict[Output, dict[str, Any]] = {}
        for blocks, outputs in sharing(self.features, selection.chosen).items():
            for output, (layer, record) in engine.solve(blocks, outputs).items():
                layers[output], records[output] = layer, record
                advance()
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
    ) -> tuple[int, list[tuple[int, float]]]:
        """The k whose maps score best on validation, averaged over outputs, and the whole curve."""
        most = _fewest(order)
        tried = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        curve = []
        for k in tried:
            chosen = self._choose(engine, order, k, candidates)
            scores = [
                record["validation"]
                for blocks, outputs in sharing(self.features, chosen).items()
                for _, record in engine.solve(blocks, outputs).values()
            ]
            curve.append((k, sum(scores) / len(scores)))
        return max(curve, key=lambda point: point[1])[0], curve


def _fewest(order: dict[Output, list[int]]) -> int:
    """How many source layers every target layer has to choose from."""
    return min(len(layers) for layers in order.values())
