"""The engine of every closed form: one design solved for all outputs that share it, settings chosen out of sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import KINDS, Block, Features
from kvxfer.judges import Judge, PlainR2, QueryR2
from kvxfer.linalg import Gram
from kvxfer.metrics import Metrics
from kvxfer.moments import Moments, Output
from kvxfer.penalties import Setting
from kvxfer.r2 import HeldOut
from kvxfer.ranks import AUTO_LOSS, reduce
from kvxfer.solvers.base import LinearLayer, Splits

if TYPE_CHECKING:
    from kvxfer.solvers.closed import ClosedForm

Solved = dict[Output, tuple[LinearLayer, dict[str, Any]]]
Solve = Callable[[Gram, Tensor, "Part", Output], tuple[Tensor, float]]

EDGE_GAIN = 1e-4
"""R² by which the last step towards a grid's end must still gain for the end to be called too near."""


@dataclass(frozen=True)
class Part:
    """One independent solve: feature columns of a design, and the columns and heads of an output that they give."""

    features: Tensor
    columns: slice
    heads: list[int]


def sharing(features: Features, chosen: dict[Output, tuple[int, ...]]) -> dict[tuple[Block, ...], list[Output]]:
    """Outputs by the design that they share."""
    shared: dict[tuple[Block, ...], list[Output]] = defaultdict(list)
    for output, layers in chosen.items():
        shared[features.blocks(output[1], layers)].append(output)
    return shared


class Engine:
    """A solver at work on some moments."""

    def __init__(self, solver: ClosedForm, splits: Splits) -> None:
        self.solver, self.splits = solver, splits
        if solver.needs_metrics and splits.metrics is None:
            raise KvxferError(
                "these settings weigh errors by the target's attention, but the calibration kept no metrics: "
                "set calibration.metrics=true"
            )
        self.metrics: Metrics | None = splits.metrics
        self.judge: Judge = PlainR2()
        if solver.criterion == "query" and splits.metrics is not None:
            self.judge = QueryR2(splits.metrics)
        self.layout = splits.fit.layout

    def quick_score(self, layers: tuple[int, ...]) -> dict[str, Float[Tensor, " targets"]]:
        """Validation scores, by kind, of every target layer from these source layers, at ``selection_lam``."""
        lam = self.solver.selection_lam
        # A target layer that does not keep all of these source layers cannot be scored.
        scores: dict[Output, Tensor] = dict.fromkeys(self.layout.outputs, torch.tensor(-torch.inf, dtype=torch.float64))
        readers = [o for o in self.layout.outputs if set(layers) <= set(self.layout.candidates(o[0]))]
        for blocks, outputs in sharing(self.solver.features, dict.fromkeys(readers, layers)).items():
            design = _Design(self, blocks, outputs, self.splits.moments)
            weight, _ = design.weights(lambda gram, right, part, output: gram.ridge(right, lam), together=True)
            found = self.judge(design.held["validation"], weight, design.bias(weight))
            scores |= dict(zip(outputs, found, strict=True))
        return {kind: torch.stack([scores[o] for o in self.layout.outputs if o[1] == kind]) for kind in KINDS}

    def solve(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Solved:
        """Solve one design for the outputs that share it, each with its own best setting on the validation split."""
        result: Solved = {}
        for group in self.solver.apart(outputs):
            result |= self._solve(blocks, group)
        return result

    def _solve(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Solved:
        """The same for outputs that are solved together."""
        design = _Design(self, blocks, outputs, partial(self.solver.moments, self.splits))
        notes = self.solver.notes(self.splits, outputs, len(design.cross))
        weight, chosen, curve = self._choose_setting(design)
        layers, ranks = zip(*(self._restrict(design, n, weight) for n in range(len(outputs))), strict=True)
        dense = torch.cat([layer.dense() for layer in layers], dim=1)
        bias = design.bias(dense)
        scores = self._scores(design, dense, bias)
        result: Solved = {}
        for n, output in enumerate(outputs):
            columns = design.columns(n)
            layer = _stored(layers[n], bias[columns])
            if not (torch.isfinite(layer.weight).all() and torch.isfinite(layer.bias).all()):
                raise KvxferError("a map is not finite: raise penalty.lam or calibrate on more rows (corpus.rows.fit)")
            own = [(setting, score[n]) for setting, score in curve]
            record = {
                "layer": output[0],
                "kind": output[1],
                "source_layers": " ".join(str(x) for x in sorted({block.layer for block in blocks if block.is_source})),
                "features": layer.weight.shape[1],
                **_setting_record(own, *chosen[n]),
                **ranks[n],
                **{name: float(values[n]) for name, values in scores.items()},
                **notes,
            }
            result[output] = (layer, record)
        return result

    def _choose_setting(
        self, design: _Design
    ) -> tuple[Tensor, list[tuple[Setting, float]], list[tuple[Setting, list[float]]]]:
        """The weights at every output's best setting, those settings with the λ really used, and the whole curve."""
        penalty, validation = self.solver.penalty, design.held["validation"]
        best = torch.full((len(design.outputs),), -torch.inf, dtype=torch.float64)
        weight = torch.zeros_like(design.cross)
        chosen: list[tuple[Setting, float]] = [({}, 0.0)] * len(design.outputs)
        curve = []
        known = [setting for setting in penalty.references if setting not in penalty.candidates]
        for setting in (*penalty.candidates, *known):

            def solve(
                gram: Gram, right: Tensor, part: Part, output: Output, setting: Setting = setting
            ) -> tuple[Tensor, float]:
                metric = self.metrics.by_output[output] if self.metrics else None
                return penalty.solve(gram, right, setting, part.heads, metric)

            solution, spent = design.weights(solve, together=setting.get("alpha", 0.0) == 0)
            score = self.judge(validation, solution, design.bias(solution))
            curve.append((setting, score.tolist()))
            if setting in known:
                continue
            for n in torch.nonzero(score > best).flatten().tolist():
                weight[:, design.columns(n)] = solution[:, design.columns(n)]
                chosen[n] = (setting, spent[n])
            best = torch.maximum(best, score)
        return weight, chosen, curve

    def _restrict(
        self, design: _Design, n: int, weights: Float[Tensor, "features columns"]
    ) -> tuple[LinearLayer, dict[str, Any]]:
        """One output's layer at the rank that the rank option asks for; the bias follows."""
        weight = weights[:, design.columns(n)]
        inner = design.parts[0].columns.stop - design.parts[0].columns.start
        pieces = [weight[part.features][:, part.columns] for part in design.parts]
        nothing = torch.zeros_like(weight[0])
        layer = LinearLayer(design.blocks, torch.stack(pieces), nothing)
        tried = self.solver.rank.ranks(inner)
        if not tried:
            return layer, {"rank": inner, "rank_curve": []}
        metric = None
        if self.metrics and self.solver.rank.needs_metric:
            metric = self.metrics.by_output[design.outputs[n]]
        options, curve = [], []
        for rank in tried:
            if rank == inner:
                options.append(layer)
                curve.append([rank, self._score_one(design, n, weight)])
                continue
            factors = [
                reduce(piece, gram.matrix, rank, metric, part.heads)
                for piece, gram, part in zip(pieces, design.grams, design.parts, strict=True)
            ]
            left, right = (torch.stack(side) for side in zip(*factors, strict=True))
            options.append(LinearLayer(design.blocks, left, nothing, right))
            curve.append([rank, self._score_one(design, n, options[-1].dense())])
        # Ranks ascend, and an automatic choice ends with the whole width.
        enough = curve[-1][1] - AUTO_LOSS
        pick = next(i for i, (_, score) in enumerate(curve) if score >= enough)
        return options[pick], {"rank": tried[pick], "rank_curve": curve}

    def _score_one(self, design: _Design, n: int, weight: Float[Tensor, "features width"]) -> float:
        """The validation score of one output with some weight."""
        bias = design.held["fit"].mean_y[design.columns(n)] - design.held["fit"].mean_x @ weight
        return float(self.judge(design.held["validation"].only(n), weight, bias)[0])

    def _scores(self, design: _Design, weight: Tensor, bias: Tensor) -> dict[str, Float[Tensor, " outputs"]]:
        """R² on all three splits, and in the outputs' metrics where there are any."""
        scores = {f"r2_{name}": held.r2(weight, bias) for name, held in design.held.items()}
        if self.metrics is not None:
            metrics = self.metrics
            scores |= {f"metric_r2_{name}": held.metric_r2(weight, bias, metrics) for name, held in design.held.items()}
        scores["validation"] = self.judge(design.held["validation"], weight, bias)
        return scores


class _Design:
    """One design and the outputs that share it: their moments, gathered once."""

    def __init__(
        self,
        engine: Engine,
        blocks: tuple[Block, ...],
        outputs: list[Output],
        moments: Callable[[str, list[Output]], Moments],
    ) -> None:
        self.blocks, self.outputs, self.width = blocks, outputs, engine.layout.width
        self.held = {
            name: HeldOut(moments(name, outputs), blocks, outputs) for name in ("fit", "validation", "held_out")
        }
        self.cross = self.held["fit"].cross
        self.parts = engine.solver.parts(blocks, engine.layout)
        matrix = self.held["fit"].gram
        self.grams = [Gram(matrix if len(self.parts) == 1 else matrix[p.features][:, p.features]) for p in self.parts]

    def columns(self, n: int) -> slice:
        """The columns of output n among those side by side."""
        return slice(n * self.width, (n + 1) * self.width)

    def bias(self, weight: Float[Tensor, "features columns"]) -> Float[Tensor, " columns"]:
        """What makes the fit split's mean error zero."""
        return self.held["fit"].mean_y - self.held["fit"].mean_x @ weight

    def weights(self, solve: Solve, together: bool) -> tuple[Float[Tensor, "features columns"], list[float]]:
        """Dense weights of all outputs side by side, part by part, and the largest λ that each output needed.

        Args:
            together: solve all outputs' columns at once (no output's metric matters).
        """
        count = len(self.outputs)
        weight, used = torch.zeros_like(self.cross), [0.0] * count
        for part, gram in zip(self.parts, self.grams, strict=True):
            own = torch.arange(part.columns.start, part.columns.stop)
            for group in [list(range(count))] if together else [[n] for n in range(count)]:
                wanted = torch.cat([own + n * self.width for n in group])
                solution, spent = solve(gram, self.cross[part.features][:, wanted], part, self.outputs[group[0]])
                weight[part.features[:, None], wanted] = solution
                for n in group:
                    used[n] = max(used[n], spent)
        return weight, used


def _stored(layer: LinearLayer, bias: Float[Tensor, " width"]) -> LinearLayer:
    """The layer with its bias, in float32."""
    right = None if layer.right is None else layer.right.float().contiguous()
    return LinearLayer(layer.blocks, layer.weight.float().contiguous(), bias.float().contiguous(), right)


def beyond_grid(scores: list[float]) -> bool:
    """Whether a wider grid may score better: the best λ is at an end, and the one before it clearly worse."""
    if len(scores) < 2:
        return False
    best = max(scores)
    return max(scores[0] - scores[1], scores[-1] - scores[-2]) > EDGE_GAIN and best in (scores[0], scores[-1])


def _setting_record(curve: list[tuple[Setting, float]], setting: Setting, used: float) -> dict[str, Any]:
    """What was chosen, and whether that is a reason to look closer."""
    own_alpha = sorted((s["lam"], score) for s, score in curve if s.get("alpha", 0.0) == setting.get("alpha", 0.0))
    isotropic = [score for s, score in curve if s.get("alpha", 0.0) == 0]
    reached = next(score for s, score in curve if s == setting)
    return {
        "lam": setting["lam"],
        "alpha": setting.get("alpha", 0.0),
        "lam_used": used,
        "raised": used > setting["lam"],
        "at_grid_edge": beyond_grid([score for _, score in own_alpha]),
        "worse_than_isotropic": bool(isotropic) and max(isotropic) > reached,
        "penalty_curve": [[s["lam"], s.get("alpha", 0.0), score] for s, score in curve],
    }
