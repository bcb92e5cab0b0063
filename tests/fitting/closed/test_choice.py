"""λ at an α above 0 is looked for near the best λ of ridge, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvxfer.fitting.closed import Ridge
from kvxfer.fitting.closed.choice import near
from kvxfer.fitting.dials import ALPHA_GRID, LAM_GRID, Attention
from kvxfer.maps.blocks import DESIGNS
from tests.samples import make_samples, make_splits

BOTH = DESIGNS["both"]


@dataclass(frozen=True)
class Everything(Attention):
    """The penalty with its whole grid."""

    @property
    def narrows(self) -> bool:
        return False


def test_only_neighbours_of_ridges_best_are_tried_and_the_choice_is_that_of_the_whole_grid() -> None:
    splits = make_splits(make_samples(BOTH, tokens=160, noise=1.0))
    narrow, whole = (Ridge(k=2, features=BOTH, penalty=p).fit(splits) for p in (Attention(), Everything()))
    for ours, theirs in zip(narrow.diagnostics, whole.diagnostics, strict=True):
        curve = {tuple(place): score for *place, score in narrow.curves["penalty"][f"{ours['kind']}.{ours['layer']}"]}
        ridge = {lam: score for (lam, alpha), score in curve.items() if alpha == 0}
        best = max(ridge, key=lambda lam: ridge[lam])
        tried = {alpha: sorted(lam for lam, a in curve if a == alpha) for alpha in ALPHA_GRID}
        assert tried[0.0] == sorted(LAM_GRID)
        for alpha in ALPHA_GRID[1:]:
            assert tried[alpha] == [lam for lam in sorted(LAM_GRID) if near(lam, best)]
        assert {key: ours[key] for key in ("lam", "alpha")} == {key: theirs[key] for key in ("lam", "alpha")}
        assert ours["r2_held_out"] == pytest.approx(theirs["r2_held_out"])


@pytest.mark.parametrize(
    ("lam", "best", "expected"),
    [
        (1e-3, 1e-3, True),
        (1e-2, 1e-3, True),
        (1e-4, 1e-3, True),
        (1e-1, 1e-3, False),
        (0.0, 0.0, True),
        (1e-3, 0.0, False),
    ],
)
def test_near_is_a_factor_of_ten(lam: float, best: float, expected: bool) -> None:
    assert near(lam, best) == expected
