"""What all closed forms share: choose source layers, solve each distinct design once, choose settings out of sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.fitting.closed.attention import map_scores
from kvxfer.fitting.closed.by_kl import fit_by_kl, steps_by_kl
from kvxfer.fitting.closed.engine import Engine, sharing
from kvxfer.fitting.closed.selection import (
    Selection,
    check_k,
    choose_greedily,
    choose_top_k,
    counts,
    ranked,
    single_layer_scores,
)
from kvxfer.fitting.closed.solver import Fit, Form, Splits
from kvxfer.maps.blocks import KINDS, Output
from kvxfer.maps.linear import LinearLayer
from kvxfer.moments.moments import Moments


@dataclass(frozen=True)
class ClosedForm(Form):
    """A solver that is one closed form."""

    def steps(self, moments: Moments) -> int:
        if self.needs_models:
            return steps_by_kl(self, moments)
        return len(moments.layout.source_layers) * len(KINDS) + len(moments.layout.outputs)

    def fit(self, splits: Splits, advance: Callable[[], None] = lambda: None) -> Fit:
        """Choose source layers, then solve each distinct design once for all outputs that share it."""
        if self.criterion == "kl":
            return fit_by_kl(self, splits, advance)
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
        for k in counts(most):
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
