"""Which penalty setting each output of a design gets: the best on the validation split."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.design import Design
from kvxfer.fitting.closed.linalg import NOT_FINITE
from kvxfer.fitting.dials import Setting

Chosen = list[tuple[Setting, float]]
"""For each output its setting, and the λ that was really used."""

Curve = list[tuple[Setting, list[float]]]
"""Every setting with the outputs' scores."""

NEAR = 10.0
"""Once the best λ of ridge is known, how far from it λ is looked for at the other α: at most this factor."""


def near(lam: float, best: float) -> bool:
    """Whether λ is worth trying where ridge does best at ``best``."""
    if lam == 0 or best == 0:
        return lam == best
    return abs(math.log10(lam / best)) <= math.log10(NEAR) * (1 + 1e-9)


class Choice:
    """The best setting so far of every output of a design."""

    def __init__(self, design: Design) -> None:
        count = len(design.outputs)
        self.design = design
        self.curve: Curve = []
        self.best_ridge = [0.0] * count
        self._best = torch.full((count,), -torch.inf, dtype=torch.float64)
        self._chosen: Chosen = [({}, 0.0)] * count
        self._weight = torch.zeros_like(design.cross)
        self._pending: list[int] = []

    def knows(self, setting: Setting) -> bool:
        """Whether a setting was scored."""
        return any(setting == known for known, _ in self.curve)

    def score(
        self,
        setting: Setting,
        scores: Float[Tensor, " outputs"],
        weight: Float[Tensor, "features columns"] | None = None,
        used: list[float] | None = None,
        candidate: bool = True,
    ) -> None:
        """Take a setting's scores, and its weights unless they are to be solved for at the end.

        Args:
            candidate: whether the setting may be chosen; the others are for the curve alone.
        """
        scores = scores.nan_to_num(nan=-torch.inf)
        self.curve.append((setting, scores.tolist()))
        if not candidate:
            return
        for n in torch.nonzero(scores > self._best).flatten().tolist():
            self._chosen[n] = (setting, setting["lam"] if used is None else used[n])
            if not setting.get("alpha"):
                self.best_ridge[n] = setting["lam"]
            if weight is None:
                self._pending = [*self._pending, n] if n not in self._pending else self._pending
            else:
                columns = self.design.columns(n)
                self._weight[:, columns] = weight[:, columns]
                self._pending = [each for each in self._pending if each != n]
        self._best = torch.maximum(self._best, scores)

    def finish(self) -> tuple[Float[Tensor, "features columns"], Chosen, Curve]:
        """The weights at the chosen settings, those settings, and the curve."""
        if not all(setting for setting, _ in self._chosen):
            raise KvxferError(NOT_FINITE)
        for lam in sorted({self._chosen[n][0]["lam"] for n in self._pending}):
            own = [n for n in self._pending if self._chosen[n][0]["lam"] == lam]
            solution, spent = self.design.ridge(lam, own)
            for n in own:
                columns = self.design.columns(n)
                self._weight[:, columns] = solution[:, columns]
                self._chosen[n] = (self._chosen[n][0], spent[n])
        return self._weight, self._chosen, self.curve
