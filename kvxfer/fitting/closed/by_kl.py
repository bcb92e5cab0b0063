"""One k, λ and rank for a whole map, by what the target's next tokens make of it (``solver.criterion=kl``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.selection import counts
from kvxfer.fitting.closed.solver import Fit, Form, Splits
from kvxfer.fitting.dials import Full, Reduced
from kvxfer.maps.blocks import KINDS
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import Moments

LOSS = 0.005
"""Nats a token by which a lower rank's KL may be above the whole map's for ``rank.r=auto`` to take it."""

_DIALS = ("k", "lam", "rank")

Curve = list[tuple[int | float, float]]
"""Values of a dial, each with the KL of its map."""


def steps_by_kl(solver: Form, moments: Moments) -> int:
    """How often ``fit_by_kl`` calls ``advance``."""
    plain = replace(solver, criterion="r2")
    fits = sum(len(list(_options(dial, plain, moments.layout))) for dial in _DIALS)
    return max(fits, 1) * plain.steps(moments)


def fit_by_kl(solver: Form, splits: Splits, advance: Callable[[], None]) -> Fit:
    """Choose k, then λ, then the rank, each if it is ``auto``; what is not chosen yet is meanwhile as R² has it.

    The fit's ``curves`` hold what was tried under ``kl``, by dial.
    """
    now = replace(solver, criterion="r2")
    if not solver.needs_models:
        return now.fit(splits, advance)
    if splits.divergence is None:
        raise KvxferError(
            "solver.criterion=kl reads both models, which are not at hand here: set solver.criterion=attention"
        )
    left, curves, best = steps_by_kl(solver, splits.fit), {}, None

    def count() -> None:
        nonlocal left
        left -= 1
        advance()

    for dial in _DIALS:
        curve: Curve = []
        for value, option in _options(dial, now, splits.fit.layout):
            fit = option.fit(splits, count)
            found = splits.divergence(fit.layers)
            if _kept(dial, found, curve):
                best, chosen = fit, option
            curve.append((value, found))
        if curve:
            now, curves[dial] = chosen, sorted(curve)
    # How many ranks are worth trying was not known before k was.
    for _ in range(left):
        advance()
    assert best is not None
    return replace(best, curves={**best.curves, "kl": curves})


def _kept(dial: str, found: float, before: Curve) -> bool:
    """Whether a map of this KL is kept for now; of ranks, from the whole map's down, the lowest that will do is."""
    if not before:
        return True
    return found <= before[0][1] + LOSS if dial == "rank" else found < min(kl for _, kl in before)


def _options(dial: str, solver: Form, layout: Layout) -> Iterator[tuple[int | float, Form]]:
    """The solvers to try for one dial, each with its value; none where it is set."""
    if dial == "k" and solver.chooses_k:
        yield from ((k, replace(solver, k=k)) for k in counts(_fewest(layout)))
    elif dial == "lam" and isinstance(solver.penalty.lam, str):
        yield from ((lam, replace(solver, penalty=replace(solver.penalty, lam=lam))) for lam in solver.penalty.lams)
    elif dial == "rank" and isinstance(solver.rank, Reduced) and solver.rank.chooses:
        width = solver.rank_width(layout.width, layout.heads)
        for r in reversed(solver.rank.ranks(width, _inputs(solver, layout))):
            yield r, replace(solver, rank=Full() if r == width else Reduced(r, solver.rank.metric))


def _fewest(layout: Layout) -> int:
    """How many source layers every target layer has to choose from."""
    return min(len(layout.candidates(layer)) for layer, _ in layout.outputs)


def _inputs(solver: Form, layout: Layout) -> int | None:
    """The fewest columns that a solve of some output reads; None while k is not known."""
    if solver.chooses_k:
        return None
    layers = layout.candidates(0)[: _fewest(layout) if solver.method == "all" else int(solver.k)]
    designs = (solver.features.blocks(kind, layers) for kind in KINDS)
    return min(len(solver.parts(blocks, layout)[0].features) for blocks in designs)
