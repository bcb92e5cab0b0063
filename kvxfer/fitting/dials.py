"""The settings of closed forms: what all of them share, and their two dials, penalty and rank.

``kvxfer.text.spec`` says what a field's metadata may.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import DESIGNS, Features

LAM_GRID = tuple(10.0**power for power in range(-9, 1))
"""What ``penalty.lam=auto`` chooses from, on the validation split."""

ALPHA_GRID = (0.0, 0.25, 0.5, 0.75, 1.0)
"""What ``penalty.alpha=auto`` chooses from."""

AUTO_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
"""Shares of the output width that ``rank.r=auto`` chooses from."""

_OPTIONS = {
    "method": ("topk", "greedy", "all"),
    "selection": ("shared", "separate"),
    "criterion": ("r2", "query", "attention", "kl"),
    "k_per": ("pair", "layer"),
}

Setting = dict[str, float]
"""λ and, where the penalty has one, α."""


@dataclass(frozen=True)
class Isotropic:
    """Ridge: the same penalty in every direction.

    Args:
        lam: λ relative to the mean diagonal of the centred Gram (so 0.001 is a thousandth of a feature's mean
            variance), or ``auto``: chosen for every target layer and kind on the validation split.
        alpha: not read; it is there so that grids over both penalties compose.
        per_block: λ is relative to the mean diagonal of each block's own part of the Gram, as if all blocks had been
            brought to the same mean variance first.

    Attributes:
        convention: what λ is relative to, for manifests.
    """

    lam: float | str = "auto"
    alpha: float | str | None = field(default=None, metadata={"id": False})
    per_block: bool = False
    name: str = "isotropic"
    convention: str = field(init=False)

    needs_metric = False

    def __post_init__(self) -> None:
        known = self.lam == "auto" if isinstance(self.lam, str) else math.isfinite(self.lam) and self.lam >= 0
        if not known:
            raise KvxferError(f"penalty.lam={self.lam} must be a number of 0 or more, or auto")
        of = "each block of the centred Gram" if self.per_block else "the centred Gram"
        object.__setattr__(self, "convention", f"relative to the mean diagonal of {of}")

    @property
    def lams(self) -> tuple[float, ...]:
        """Every λ to try."""
        return LAM_GRID if isinstance(self.lam, str) else (float(self.lam),)

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """The settings to try; the best on the validation split is kept."""
        return tuple({"lam": lam} for lam in self.lams)

    @property
    def references(self) -> tuple[Setting, ...]:
        """Settings that are scored beside the candidates, for the report, and never chosen: none."""
        return ()

    @property
    def narrows(self) -> bool:
        """Whether λ at an α above 0 is looked for only near the best λ of ridge."""
        return False


@dataclass(frozen=True)
class Attention(Isotropic):
    """A penalty that is light where the target's attention looks: λ / Λⱼ^α in the eigenbasis of the output's metric.

    Minimises the sum of squared errors plus the penalty; α = 0 is ridge exactly. Λ has mean 1 per head.

    Args:
        lam: as for ridge.
        alpha: 0 to 1, or ``auto``.
        per_block: as for ridge.
    """

    alpha: float | str | None = "auto"
    name: str = "attention"

    needs_metric = True

    def __post_init__(self) -> None:
        super().__post_init__()
        number = not isinstance(self.alpha, str | None) and 0 <= self.alpha <= 1
        if self.alpha != "auto" and not number:
            raise KvxferError(f"penalty.alpha={self.alpha} must be a number from 0 to 1, or auto")

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """Every λ with every α, ridge first; equal scores favour the smaller α."""
        alphas = ALPHA_GRID if isinstance(self.alpha, str) else (float(self.alpha or 0.0),)
        return tuple({"lam": lam, "alpha": alpha} for alpha, lam in itertools.product(alphas, self.lams))

    @property
    def narrows(self) -> bool:
        """Where both are chosen: a full grid of both would cost five times as much for the same choice."""
        return isinstance(self.lam, str) and isinstance(self.alpha, str)

    @property
    def references(self) -> tuple[Setting, ...]:
        """Ridge at every λ, which a fixed α is compared with."""
        return () if isinstance(self.alpha, str) else tuple({"lam": lam, "alpha": 0.0} for lam in self.lams)


Penalty = Isotropic
PENALTIES = {"isotropic": Isotropic, "attention": Attention}


@dataclass(frozen=True)
class Full:
    """No restriction. ``r`` and ``metric`` are not read; they are there so that grids over both options compose."""

    r: int | float | str | None = field(default=None, metadata={"id": False})
    metric: str | None = field(default=None, metadata={"id": False})
    name: str = "full"

    needs_metric = False
    chooses = False

    def ranks(self, width: int, inputs: int | None = None) -> tuple[int, ...]:
        """The ranks to try for ``width`` output columns, ascending: none."""
        return ()


@dataclass(frozen=True)
class Reduced:
    """Reduced-rank regression on the map's output (Izenman 1975), stored as two factors.

    Args:
        r: an integer, a fraction of the output width (below 1), or ``auto``: the smallest without loss on validation
            whose factors are smaller than the dense map, else that.
        metric: ``isotropic`` keeps the directions of most predicted variance, ``attention`` those that the output's
            metric weighs most.
    """

    r: int | float | str | None = "auto"
    metric: str | None = "isotropic"
    name: str = "reduced"

    def __post_init__(self) -> None:
        if self.r == 1.0 and isinstance(self.r, float):
            raise KvxferError(
                "rank.r=1.0 is the whole output width: use rank=full instead, or rank.r=1 for one direction"
            )
        if isinstance(self.r, float) and self.r.is_integer():
            object.__setattr__(self, "r", int(self.r))
        known = self.r == "auto" if isinstance(self.r, str) else self.r is not None and self.r > 0
        whole = isinstance(self.r, int) or (isinstance(self.r, float) and self.r < 1)
        if not known or not (whole or self.r == "auto"):
            raise KvxferError(f"rank.r={self.r} must be an integer of 1 or more, a fraction below 1, or auto")
        if self.metric not in ("isotropic", "attention"):
            raise KvxferError(f"rank.metric={self.metric!r} is neither 'isotropic' nor 'attention'")

    @property
    def needs_metric(self) -> bool:
        """Whether the output's metric decides which directions are kept."""
        return self.metric == "attention"

    @property
    def chooses(self) -> bool:
        """Whether the rank is chosen on the validation split."""
        return isinstance(self.r, str)

    def ranks(self, width: int, inputs: int | None = None) -> tuple[int, ...]:
        """The ranks to try for ``width`` output columns; the automatic choice ends with the width itself.

        Args:
            inputs: how many columns are read, if it is known. The automatic choice then leaves out ranks whose two
                factors would hold as many numbers as the dense map, which is the better map.
        """
        if isinstance(self.r, str):
            shares = {max(1, round(share * width)) for share in AUTO_SHARES}
            dense = math.inf if inputs is None else inputs * width
            return tuple(r for r in sorted(shares) if r == width or r * ((inputs or 0) + width) < dense)
        rank = max(1, round(self.r * width)) if isinstance(self.r, float) else int(self.r or 0)
        if rank >= width:
            raise KvxferError(f"rank.r={self.r} must be below the {width} output columns: use rank=full instead")
        return (rank,)


Rank = Full | Reduced
RANKS = {"full": Full, "reduced": Reduced}


@dataclass(frozen=True)
class Dials:
    """The hyperparameters that all solvers from moments share.

    Args:
        k: how many source layers feed a target layer, or ``auto``: the k in 1, 2, 4, 8, ... whose maps score best on
            the validation split. With ``method=all`` it is not read.
        k_per: whether ``auto`` is one k for the ``pair``, or one for every target ``layer`` (and kind, if they are
            selected separately).
        method: ``topk`` (the best single layers), ``greedy`` (forward selection) or ``all``.
        selection: ``shared`` (keys and values read the same layers) or ``separate``.
        selection_lam: λ of the fits that rank source layers, or ``auto``: every target layer has each source layer at
            its own best λ of ``LAM_GRID`` on the validation split.
        criterion: what selection and automatic choices of k, λ, α and rank maximise: ``r2``, ``query`` (R² in the
            output's metric) or ``attention`` (what is right of the attention's output on the probe). With ``kl`` k, λ
            and rank, where they are automatic, are each one for the whole map, of the lowest next-token KL on a few
            validation rows, which reads both models; all else is chosen by R².
        centred: whether the metric of keys leaves the queries' mean out, wherever it is read (penalty, rank, criterion
            and what is reported).
        pool: how many of the best single layers greedy selection considers.
        features: the design.
        penalty: how the map shrinks.
        rank: what the map may span.
    """

    k: int | float | str = field(metadata={"id": lambda dials: None if dials.method == "all" else dials.k})
    method: str = "topk"
    selection: str = "shared"
    selection_lam: float | str = 1e-3
    criterion: str = "r2"
    centred: bool = True
    pool: int = 6
    k_per: str = field(default="pair", metadata={"id": lambda dials: dials.k_per if dials.chooses_k else None})
    features: Features = DESIGNS["same"]
    penalty: Penalty = field(default_factory=Isotropic)
    rank: Rank = field(default_factory=Full)

    def __post_init__(self) -> None:
        k = self.k
        if k != "auto" if isinstance(k, str) else not (math.isfinite(k) and k == int(k) and k >= 1):
            raise KvxferError(f"solver.k={self.k} must be 1 or more source layers (a whole number), or auto")
        if isinstance(k, float):
            object.__setattr__(self, "k", int(k))
        for key, options in _OPTIONS.items():
            if getattr(self, key) not in options:
                raise KvxferError(f"solver.{key}={getattr(self, key)!r} is none of {', '.join(options)}")
        lam = self.selection_lam
        if lam != "auto" if isinstance(lam, str) else not 0 <= lam < math.inf:
            raise KvxferError(f"solver.selection_lam={lam} must be a number of 0 or more, or auto")
        if self.pool < 1:
            raise KvxferError(f"solver.pool={self.pool} must be 1 or more source layers")

    @property
    def chooses_k(self) -> bool:
        """Whether how many source layers are read is chosen on the validation split."""
        return self.k == "auto" and self.method != "all"

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
    def needs_models(self) -> bool:
        """Whether a choice is made by ``splits.divergence``."""
        return self.criterion == "kl" and (self.chooses_k or isinstance(self.penalty.lam, str) or self.rank.chooses)

    @property
    def needs_weights(self) -> bool:
        """Whether the solver reads ``splits.weighted``."""
        return False

    def rank_width(self, width: int, heads: int) -> int:
        """The columns that a rank must stay below: of an output of so many columns and heads, or of what is solved."""
        return width


@dataclass(frozen=True)
class AutoDials(Dials):
    """Those of a choice among solvers, each with the same dials.

    Args:
        candidates: names of other solvers. One that does not apply to the dials or the calibration is left out.
        choose: ``layer`` (the best for every target layer and kind, the other kind being true) or ``one`` (the best
            for all, both kinds mapped). Equal scores favour the earlier candidate.
    """

    candidates: tuple[str, ...] = ("ridge", "head_local", "weighted")
    choose: str = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.candidates or len(set(self.candidates)) < len(self.candidates):
            raise KvxferError(f"solver.candidates={list(self.candidates)} must name one or more solvers, each once")
        if self.choose not in ("layer", "one"):
            raise KvxferError(f"solver.choose={self.choose!r} is none of layer, one")
