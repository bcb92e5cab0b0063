"""One design and the outputs that share it: what is solved, at which λ, and what a path of λ scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.fitting.closed.linalg import Gram, penalised
from kvxfer.fitting.closed.r2 import HeldOut
from kvxfer.fitting.closed.solver import Form
from kvxfer.fitting.closed.spectral import is_cheaper, path_residuals
from kvxfer.fitting.dials import Setting
from kvxfer.maps.blocks import Block, Output
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments
from kvxfer.moments.query_metric import Metrics


class Design:
    """The moments of one design and the outputs that share it, gathered once.

    Args:
        moments: those of a split and some outputs; of ``fit`` and ``validation``, all that a choice reads.
    """

    def __init__(
        self,
        form: Form,
        layout: Layout,
        blocks: tuple[Block, ...],
        outputs: list[Output],
        moments: Callable[[str, list[Output]], Moments],
    ) -> None:
        self.blocks, self.outputs, self.width = blocks, outputs, layout.width
        self.held = {name: HeldOut(moments(name, outputs), blocks, outputs) for name in ("fit", "validation")}
        self.cross = self.held["fit"].cross
        self.parts = form.parts(blocks, layout)
        matrix = self.held["fit"].gram
        number: Tensor | None = None
        if form.penalty.per_block and len(blocks) > 1:
            widths = torch.tensor([layout.width_of([block]) for block in blocks])
            number = torch.arange(len(blocks)).repeat_interleave(widths)
        self.grams = [
            Gram(
                matrix if len(self.parts) == 1 else matrix[p.features][:, p.features],
                None if number is None else number[p.features],
            )
            for p in self.parts
        ]

    def columns(self, n: int) -> slice:
        """The columns of output n among those side by side."""
        return slice(n * self.width, (n + 1) * self.width)

    def bias(self, weight: Float[Tensor, "features columns"]) -> Float[Tensor, " columns"]:
        """What makes the fit split's mean error zero."""
        return self.held["fit"].mean_y - self.held["fit"].mean_x @ weight

    def path(self, lams: tuple[float, ...]) -> dict[float, Float[Tensor, " outputs"]]:
        """Validation R² of ridge at those λ that one eigendecomposition serves exactly; none where it costs more."""
        part, count, heads = self.parts[0], len(self.outputs), len(self.parts[0].heads)
        columns = part.columns.stop - part.columns.start
        if not is_cheaper(len(part.features), count, count * columns, count * heads, len(lams)):
            return {}
        clear = [lam for lam in lams if all(gram.is_clear(lam) for gram in self.grams)]
        if not clear:
            return {}
        residuals = []
        for part, gram in zip(self.parts, self.grams, strict=True):
            fit, validation = (
                self.held[name].part(part.features, part.columns, part.heads) for name in ("fit", "validation")
            )
            residuals.append(path_residuals(gram, fit, validation, torch.tensor(clear, dtype=torch.float64)))
        scores = self.held["validation"].r2_of_heads(torch.cat(residuals, dim=-1))
        return dict(zip(clear, scores, strict=True))

    def ridge(self, lam: float, group: list[int]) -> tuple[Float[Tensor, "features columns"], list[float]]:
        """Weights of some outputs at one λ; the others' are zero."""
        return self.weights({"lam": lam}, [group])

    def weights(
        self, setting: Setting, groups: list[list[int]], metrics: Metrics | None = None
    ) -> tuple[Float[Tensor, "features columns"], list[float]]:
        """Dense weights of all outputs side by side, part by part, and the largest λ that each output needed.

        Args:
            groups: outputs whose columns are solved together (no output's metric matters within a larger group).
        """
        if len(self.parts) == 1 and len(groups[0]) == len(self.outputs):
            metric = metrics.by_output[self.outputs[0]] if metrics else None
            weight, spent = penalised(self.grams[0], self.cross, setting, self.parts[0].heads, metric)
            return weight, [spent] * len(self.outputs)
        weight, used = torch.zeros_like(self.cross), [0.0] * len(self.outputs)
        for part, gram in zip(self.parts, self.grams, strict=True):
            own = torch.arange(part.columns.start, part.columns.stop)
            for group in groups:
                wanted = torch.cat([own + n * self.width for n in group])
                metric = metrics.by_output[self.outputs[group[0]]] if metrics else None
                solution, spent = penalised(gram, self.cross[part.features][:, wanted], setting, part.heads, metric)
                weight[part.features[:, None], wanted] = solution
                for n in group:
                    used[n] = max(used[n], spent)
        return weight, used
