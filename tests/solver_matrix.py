"""The table that puts every solver through ``tests/fitting/closed/test_matrix.py``. A new solver is one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from kvxfer.fitting.closed import Auto, HeadLocal, Ridge, Solver, Weighted
from kvxfer.fitting.closed.auto import CLOSED_FORMS
from kvxfer.fitting.closed.closed_form import ClosedForm
from kvxfer.fitting.dials import Attention, Full, Isotropic, Penalty, Rank, Reduced
from kvxfer.maps.blocks import DESIGNS, Features
from kvxfer.moments.query_metric import Metric
from tests.samples import reference_map

Reference = Callable[[Tensor, Tensor, float, Metric], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """How the suite makes a solver, and what it may expect.

    Attributes:
        solver: its name in ``SOLVERS``.
        build: a solver of a design, λ (a number or ``auto``), k and the selection's mode.
        reference: float64 weight and bias from raw rows, λ and the output's metric, where there is a plain answer.
        tolerance: how far the map may lie from the reference, relative to its largest number.
        automatic: whether λ may be ``auto`` and decides the validation score alone.
        raises: whether λ is raised where a Gram is singular; otherwise such directions get no weight.
        designs: the designs that the suite tries.
        alpha: of the penalty.
    """

    solver: str
    build: Callable[[Features, float | str, int, str], Solver]
    reference: Reference | None = None
    tolerance: float = 1e-6
    automatic: bool = True
    raises: bool = True
    designs: tuple[str, ...] = tuple(DESIGNS)
    alpha: float = 0.0


SOURCE_DESIGNS = tuple(name for name, design in DESIGNS.items() if not design.extras)


def _auto(choose: str) -> Case:
    """The settings of a candidate are its own; which candidate wins depends on them."""

    def build(features: Features, lam: float | str, k: int, selection: str) -> Solver:
        return Auto(k=k, selection=selection, features=features, penalty=Isotropic(lam), choose=choose)

    # Its candidates have every design themselves.
    return Case("auto", build, automatic=False, designs=("same", "both"))


def _case(solver: type[ClosedForm], alpha: float | None, rank: Rank, per_block: bool = False) -> Case:
    local, reduced = solver is HeadLocal, isinstance(rank, Reduced)

    def penalty(lam: float | str) -> Penalty:
        return Isotropic(lam, None, per_block) if alpha is None else Attention(lam, alpha, per_block)

    def build(features: Features, lam: float | str, k: int, selection: str) -> Solver:
        return solver(k=k, selection=selection, features=features, penalty=penalty(lam), rank=rank)

    def reference(x: Tensor, y: Tensor, lam: float, metric: Metric) -> tuple[Tensor, Tensor]:
        number = int(rank.r) if isinstance(rank, Reduced) else None  # type: ignore[arg-type]
        # The matrix gives a penalty per block the design "both" alone, whose blocks are as wide as an output.
        blocks = x.shape[1] // y.shape[1] if per_block else 1
        return reference_map(x, y, lam, metric, local, alpha or 0.0, number, rank.needs_metric, blocks)

    plain = alpha is None and not reduced and not per_block
    designs = SOURCE_DESIGNS if local else tuple(DESIGNS)
    return Case(
        solver.name,
        build,
        reference,
        tolerance=3e-6 if reduced else 1e-6,
        automatic=not reduced,
        raises=not alpha,
        designs=designs if plain else ("both",),
        alpha=alpha or 0.0,
    )


FORMS: dict[str, tuple[float | None, Rank] | tuple[float | None, Rank, bool]] = {
    "": (None, Full()),
    "-rank": (None, Reduced(2)),
    "-alpha_0": (0.0, Full()),
    "-alpha_1": (1.0, Full()),
    "-alpha_1-metric_rank": (1.0, Reduced(2, "attention")),
    "-per_block": (None, Full(), True),
    "-alpha_1-per_block": (1.0, Full(), True),
}

SOLVER_MATRIX = {
    f"{solver.name}{form}": _case(solver, *dials) for solver in (Ridge, HeadLocal) for form, dials in FORMS.items()
}
SOLVER_MATRIX |= {f"auto-{choose}": _auto(choose) for choose in ("layer", "one")}
# The suite's tokens weigh 1, so its reference is that of ridge.
SOLVER_MATRIX["weighted"] = replace(_case(Weighted, *FORMS[""]), designs=("same", "both", "rich"))
# One that has no row of its own has no plain answer to be compared with.
for name, solver in CLOSED_FORMS.items():
    SOLVER_MATRIX.setdefault(name, replace(_case(solver, *FORMS[""]), reference=None))


def pairwise(*dials: tuple[Any, ...]) -> list[Any]:
    """Cases such that every solver meets every design of its own and every value of every dial.

    Not all combinations: the values of a dial come in turn, from another one on for every solver and dial, so that over
    all solvers every two values meet too.
    """
    found = []
    for number, (name, case) in enumerate(SOLVER_MATRIX.items()):
        for turn in range(max(len(case.designs), *map(len, dials))):
            design = case.designs[turn % len(case.designs)]
            values = [dial[(turn + number * place) % len(dial)] for place, dial in enumerate(dials)]
            named = "-".join(map(str, (name, design, *values)))
            found.append(pytest.param(case, DESIGNS[design], *values, id=named))
    return found
