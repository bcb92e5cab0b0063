"""The engine of every closed form: one design solved for all outputs that share it, settings chosen out of sample."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.choice import Choice, near
from kvxfer.fitting.closed.design import Design
from kvxfer.fitting.closed.judges import judge_for
from kvxfer.fitting.closed.linalg import reduce
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.fitting.closed.solver import Form, Splits
from kvxfer.fitting.dials import Setting
from kvxfer.maps.blocks import KINDS, Block, Features, Output
from kvxfer.maps.linear import LinearLayer

Solved = dict[Output, tuple[LinearLayer, dict[str, Any]]]

EDGE_GAIN = 1e-4
"""R² by which the last step towards a grid's end must still gain for the end to be called too near."""

AUTO_LOSS = 0.005
"""``rank.r=auto`` takes the smallest rank whose validation R² is within this of the full map's."""

ROUNDING = 1e-9
"""R² that two ways to solve the same equations may differ by."""


def sharing(features: Features, chosen: dict[Output, tuple[int, ...]]) -> dict[tuple[Block, ...], list[Output]]:
    """Outputs by the design that they share."""
    shared: dict[tuple[Block, ...], list[Output]] = defaultdict(list)
    for output, layers in chosen.items():
        shared[features.blocks(output[1], layers)].append(output)
    return shared


class Engine:
    """A solver at work on some moments."""

    def __init__(self, solver: Form, splits: Splits) -> None:
        self.solver, self.splits = solver, splits
        if solver.needs_metrics and splits.metrics is None:
            raise KvxferError(
                "these settings weigh errors by the target's attention, but the calibration kept no metrics: "
                "set calibration.metrics=true"
            )
        self.metrics = splits.metrics
        self.judge = judge_for(solver.criterion, splits.metrics, splits.probe)
        self.layout = splits.fit.layout

    def quick_score(self, layers: tuple[int, ...]) -> dict[str, Float[Tensor, " targets"]]:
        """Validation scores, by kind, of every target layer from these source layers, at ``selection_lam``."""
        lams = self.solver.selection_lams
        return {kind: scores.amax(0) for kind, scores in self.lam_scores(layers, lams).items()}

    def lam_scores(self, layers: tuple[int, ...], lams: tuple[float, ...]) -> dict[str, Float[Tensor, "lams targets"]]:
        """Validation scores, by kind, of every target layer from these source layers by ridge, at every λ.

        A target layer that does not keep all of them cannot be scored: its score is minus infinity.
        """
        nothing = torch.full((len(lams),), -torch.inf, dtype=torch.float64)
        scores: dict[Output, Tensor] = dict.fromkeys(self.layout.outputs, nothing)
        readers = [o for o in self.layout.outputs if set(layers) <= set(self.layout.candidates(o[0]))]
        for blocks, outputs in sharing(self.solver.features, dict.fromkeys(readers, layers)).items():
            design = Design(self.solver, self.layout, blocks, outputs, self.splits.moments)
            known, rows = self._path(design, lams), []
            for lam in lams:
                if lam not in known:
                    weight, _ = design.ridge(lam, list(range(len(outputs))))
                    known[lam] = self.judge(design.held["validation"], weight, design.bias(weight))
                rows.append(known[lam])
            scores |= dict(zip(outputs, torch.stack(rows, dim=1), strict=True))
        return {kind: torch.stack([scores[o] for o in self.layout.outputs if o[1] == kind], dim=1) for kind in KINDS}

    def solve(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Solved:
        """Solve one design for the outputs that share it, each with its own best setting on the validation split."""
        result: Solved = {}
        for group in self.solver.apart(outputs):
            result |= self._solve(blocks, group)
        return result

    def _solve(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Solved:
        """The same for outputs that are solved together."""
        design = Design(self.solver, self.layout, blocks, outputs, partial(self.solver.moments, self.splits))
        notes = self.solver.notes(self.splits, outputs, len(design.cross))
        weight, chosen, curve = self.choose_setting(design)
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
            own = [(setting, score[n]) for setting, score in curve if score[n] > -torch.inf]
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

    def _path(self, design: Design, lams: tuple[float, ...]) -> dict[float, Float[Tensor, " outputs"]]:
        """Validation scores of ridge at the λ that need no weights for it: plain R² alone can do without."""
        return design.path(lams) if self.solver.criterion == "r2" else {}

    def choose_setting(
        self, design: Design
    ) -> tuple[Tensor, list[tuple[Setting, float]], list[tuple[Setting, list[float]]]]:
        """The weights at every output's best setting, those settings with the λ really used, and the whole curve.

        Where a path of λ is scored without weights, they are solved for at the end, at the λ that were chosen. In the
        curve an output that did not try a setting has minus infinity.
        """
        penalty = self.solver.penalty
        everyone = list(range(len(design.outputs)))
        choice = Choice(design)
        path = self._path(design, tuple(s["lam"] for s in penalty.candidates if not s.get("alpha")))
        for setting in (*penalty.candidates, *penalty.references):
            if choice.knows(setting):
                continue
            if not setting.get("alpha") and setting["lam"] in path:
                choice.score(setting, path[setting["lam"]])
                continue
            outputs = everyone
            if setting.get("alpha") and penalty.narrows:
                outputs = [n for n in everyone if near(setting["lam"], choice.best_ridge[n])]
            if not outputs:
                continue
            groups = [[n] for n in outputs] if setting.get("alpha") else [outputs]
            solution, spent = design.weights(setting, groups, self.metrics)
            score = torch.full((len(everyone),), -torch.inf, dtype=torch.float64)
            for n, found in zip(outputs, self._of_some(design, outputs, solution), strict=True):
                score[n] = found
            choice.score(setting, score, solution, spent, candidate=setting in penalty.candidates)
        return choice.finish()

    def _of_some(
        self, design: Design, outputs: list[int], solution: Float[Tensor, "features columns"]
    ) -> Float[Tensor, " outputs"]:
        """Validation scores of some outputs' own columns."""
        validation, bias = design.held["validation"], design.bias(solution)
        if len(outputs) == len(design.outputs):
            return self.judge(validation, solution, bias)
        places = [design.columns(n) for n in outputs]
        own = [self.judge(validation.only(n), solution[:, p], bias[p]) for n, p in zip(outputs, places, strict=True)]
        return torch.cat(own)

    def _restrict(
        self, design: Design, n: int, weights: Float[Tensor, "features columns"]
    ) -> tuple[LinearLayer, dict[str, Any]]:
        """One output's layer at the rank that the rank option asks for; the bias follows."""
        weight = weights[:, design.columns(n)]
        inner = design.parts[0].columns.stop - design.parts[0].columns.start
        pieces = [weight[part.features][:, part.columns] for part in design.parts]
        nothing = torch.zeros_like(weight[0])
        layer = LinearLayer(design.blocks, torch.stack(pieces), nothing)
        tried = self.solver.rank.ranks(inner, len(pieces[0]))
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

    def _score_one(self, design: Design, n: int, weight: Float[Tensor, "features width"]) -> float:
        """The validation score of one output with some weight."""
        bias = design.held["fit"].mean_y[design.columns(n)] - design.held["fit"].mean_x @ weight
        return float(self.judge(design.held["validation"].only(n), weight, bias)[0])

    def _scores(self, design: Design, weight: Tensor, bias: Tensor) -> dict[str, Float[Tensor, " outputs"]]:
        """R² on all three splits, and in the outputs' metrics where there are any."""
        plain: dict[str, Float[Tensor, " outputs"]] = {}
        weighed: dict[str, Float[Tensor, " outputs"]] = {}
        for name in ("fit", "validation", "held_out"):
            # What a map was fitted and chosen on may weigh tokens; what is reported never does.
            held = None if self.solver.needs_weights else design.held.get(name)
            if held is None:
                held = HeldOut(self.splits.moments(name, design.outputs), design.blocks, design.outputs)
            errors = held.errors(weight, bias)
            plain[f"r2_{name}"] = held.r2_of_errors(errors)
            if self.metrics is not None:
                weighed[f"metric_r2_{name}"] = held.metric_r2_of_errors(errors, self.metrics)
        if self.solver.criterion == "r2" and not self.solver.needs_weights:
            chosen_by = plain["r2_validation"]
        else:
            chosen_by = self.judge(design.held["validation"], weight, bias)
        return {**plain, **weighed, "validation": chosen_by}


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
        "worse_than_isotropic": bool(isotropic) and max(isotropic) - reached > ROUNDING,
        "penalty_curve": [[s["lam"], s.get("alpha", 0.0), score] for s, score in curve],
    }
