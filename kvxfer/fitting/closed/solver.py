"""The one interface of every closed-form solver: moments in, a linear map out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kvxfer.fitting.closed.selection import Selection
from kvxfer.maps.blocks import Block
from kvxfer.moments.moments import Moments, Output
from kvxfer.moments.probe import Probe
from kvxfer.moments.query_metric import Metrics


@dataclass(frozen=True)
class Splits:
    """Moments of the three calibration splits: fit on the first, choose on the second, report on the third.

    ``weighted`` are those whose tokens are weighed by each target layer's attention, by split and target layer.
    """

    fit: Moments
    validation: Moments
    held_out: Moments
    metrics: Metrics | None = None
    probe: Probe | None = None
    weighted: Mapping[str, Mapping[int, Moments]] | None = None

    def moments(self, split: str, outputs: list[Output]) -> Moments:
        """The moments that some outputs are fitted, chosen or reported on, without weights."""
        return getattr(self, split)


@dataclass(frozen=True)
class LinearLayer:
    """One target layer's keys or values as a linear function of blocks; float32 once it is fitted.

    With one group, x are the columns of ``blocks`` side by side and the output is ``x @ weight[0] + bias``. With as
    many groups as heads, group h reads the columns of head h of every block and gives head h. A reduced-rank map keeps
    its second factor in ``right``: the group's weight is then ``weight[g] @ right[g]``.
    """

    blocks: tuple[Block, ...]
    weight: Float[Tensor, "groups features inner"]
    bias: Float[Tensor, " width"]
    right: Float[Tensor, "groups inner columns"] | None = None

    @property
    def groups(self) -> int:
        """1, or the number of heads."""
        return self.weight.shape[0]

    @property
    def parameters(self) -> int:
        """Numbers in the layer."""
        return self.weight.numel() + self.bias.numel() + (0 if self.right is None else self.right.numel())

    @property
    def flops(self) -> int:
        """FLOPs per token: two per weight, one per bias."""
        return 2 * self.parameters - self.bias.numel()

    def dense(self) -> Float[Tensor, "features width"]:
        """The weight over all columns of the blocks, with zeros where a group does not read."""
        product = self.weight if self.right is None else self.weight @ self.right
        if self.groups == 1:
            return product[0]
        heads, inner, dim = product.shape
        spread = product.new_zeros(len(self.blocks), heads, inner // len(self.blocks), heads, dim)
        for head in range(heads):
            spread[:, head, :, head] = product[head].view(len(self.blocks), -1, dim)
        return spread.flatten(0, 2).flatten(1)


@dataclass(frozen=True)
class Fit:
    """What a solver returns.

    Attributes:
        layers: the map, for every target layer and kind.
        selection: the chosen source layers and the scores behind the choice.
        diagnostics: one flat record per target layer and kind (λ, R², notes), for tables.
        curves: quality against each value that was chosen automatically.
        candidates: what each of several solvers scored, or why it was left out, if there was a choice.
    """

    layers: dict[Output, LinearLayer]
    selection: Selection
    diagnostics: list[dict[str, Any]]
    curves: dict[str, Any] = field(default_factory=dict)
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)


@runtime_checkable
class Solver(Protocol):
    """A fitting method. Its dataclass fields are its hyperparameters; penalty, rank and features are its dials."""

    name: str

    @property
    def needs_metrics(self) -> bool:
        """Whether ``fit`` reads ``splits.metrics``."""
        ...

    @property
    def needs_probe(self) -> bool:
        """Whether ``fit`` can't do without ``splits.probe``; scores by attention are given wherever there is one."""
        ...

    @property
    def needs_weights(self) -> bool:
        """Whether ``fit`` reads ``splits.weighted``."""
        ...

    def steps(self, moments: Moments) -> int:
        """How often ``fit`` will call ``advance``."""
        ...

    def fit(self, splits: Splits, advance: Callable[[], None]) -> Fit:
        """Fit on ``splits.fit``, choose on ``splits.validation``, report R² on ``splits.held_out``."""
        ...
