"""Which moments are kept: the blocks of features, the outputs, and the pairs of them that some map may read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvxfer.features import KINDS, Block, Features

Output = tuple[int, str]
"""A target layer and the kind (keys or values) that is predicted."""


@dataclass(frozen=True)
class Layout:
    """Which blocks, outputs and products of them are kept.

    Attributes:
        blocks: the feature blocks, whose columns lie side by side in this order.
        widths: columns of each block.
        outputs: the target's layers and kinds, each ``heads * dim`` columns.
        products: for every block, the blocks (itself and later ones) that it is multiplied with, ascending.
        targets: for every block, the outputs that it is multiplied with, ascending.
    """

    blocks: tuple[Block, ...]
    widths: tuple[int, ...]
    outputs: tuple[Output, ...]
    products: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    heads: int
    dim: int

    @staticmethod
    def of(
        features: Features,
        source_layers: list[int],
        target_layers: int,
        width: int,
        heads: int,
        extra_widths: Mapping[str, int] | None = None,
    ) -> Layout:
        """The layout that serves every choice among ``source_layers`` under ``features``.

        Args:
            width: columns of one source layer's keys (all KV heads); the target's are as many for a compatible pair.
            heads: KV heads.
            extra_widths: columns of the blocks that no source layer gives, by kind.
        """
        outputs = tuple((layer, kind) for kind in KINDS for layer in range(target_layers))
        designs = {kind: features.blocks(kind, source_layers) for kind in KINDS}
        blocks = tuple(sorted(set().union(*designs.values())))
        index = {block: i for i, block in enumerate(blocks)}
        products: list[set[int]] = [set() for _ in blocks]
        targets: list[set[int]] = [set() for _ in blocks]
        for kind, design in designs.items():
            members = sorted(index[block] for block in design)
            for i in members:
                products[i].update(j for j in members if j >= i)
                targets[i].update(o for o, output in enumerate(outputs) if output[1] == kind)
        return Layout(
            blocks,
            tuple(width if block.is_source else (extra_widths or {})[block.kind] for block in blocks),
            outputs,
            tuple(tuple(sorted(p)) for p in products),
            tuple(tuple(sorted(t)) for t in targets),
            heads,
            width // heads,
        )

    @property
    def width(self) -> int:
        """Columns of one output, and of one source block."""
        return self.heads * self.dim

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first column of each block, and the number of all columns."""
        return (0, *itertools.accumulate(self.widths))

    def columns(self, chosen: Sequence[int]) -> list[int]:
        """The columns of some blocks, side by side."""
        return [c for i in chosen for c in range(self.starts[i], self.starts[i + 1])]

    def width_of(self, blocks: Sequence[Block]) -> int:
        """Columns of a design."""
        widths = dict(zip(self.blocks, self.widths, strict=True))
        return sum(widths[block] for block in blocks)

    @property
    def source_layers(self) -> list[int]:
        """The candidate source layers."""
        return sorted({block.layer for block in self.blocks if block.is_source})

    def _products_per_token(self) -> int:
        """Multiplications that one token costs, which is also the numbers kept (but for sums)."""
        pairs = 0
        for width, products, targets in zip(self.widths, self.products, self.targets, strict=True):
            pairs += width * (sum(self.widths[j] for j in products) + len(targets) * self.width)
        return pairs + len(self.outputs) * self.width * self.dim

    @property
    def bytes(self) -> int:
        """Bytes of the moments of one split."""
        return 8 * (self._products_per_token() + 2 * (self.starts[-1] + len(self.outputs) * self.width))

    @property
    def flops_per_token(self) -> float:
        """FLOPs that one kept token costs."""
        return 2.0 * self._products_per_token()

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {
            "blocks": [block.name for block in self.blocks],
            "widths": list(self.widths),
            "outputs": [[layer, kind] for layer, kind in self.outputs],
            "products": [list(p) for p in self.products],
            "targets": [list(t) for t in self.targets],
            "heads": self.heads,
            "dim": self.dim,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Layout:
        """The layout of its JSON form."""
        return Layout(
            tuple(Block.parse(name) for name in data["blocks"]),
            tuple(data["widths"]),
            tuple((layer, kind) for layer, kind in data["outputs"]),
            tuple(tuple(p) for p in data["products"]),
            tuple(tuple(t) for t in data["targets"]),
            data["heads"],
            data["dim"],
        )
