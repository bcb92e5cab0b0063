"""Which moments are kept: the blocks of features, the outputs, and the pairs of them that some map may read."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from kvxfer.maps.blocks import KINDS, Block, Features, Output


@dataclass(frozen=True)
class Layout:
    """Which blocks, outputs and products of them are kept.

    Attributes:
        blocks: the feature blocks, whose columns lie side by side in this order.
        widths: columns of each block.
        outputs: the target's layers and kinds, each ``heads * dim`` columns.
        products: for every block, the blocks (itself and later ones) that it is multiplied with, ascending.
        targets: for every block, the outputs that it is multiplied with, ascending.
        kept: the source layers that each target layer may read, ascending; None: every target layer reads all.
    """

    blocks: tuple[Block, ...]
    widths: tuple[int, ...]
    outputs: tuple[Output, ...]
    products: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    heads: int
    dim: int
    kept: tuple[tuple[int, ...], ...] | None = None

    @staticmethod
    def of(
        features: Features,
        source_layers: list[int],
        target_layers: int,
        width: int,
        heads: int,
        extra_widths: Mapping[str, int] | None = None,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> Layout:
        """The layout that serves every choice among ``source_layers`` under ``features``.

        Args:
            width: columns of one source layer's keys (all KV heads); the target's are as many for a compatible pair.
            heads: KV heads.
            extra_widths: columns of the blocks that no source layer gives, by kind.
            kept: those of ``source_layers`` that each target layer may read; None: all of them.
        """
        outputs = tuple((layer, kind) for kind in KINDS for layer in range(target_layers))
        designs: dict[tuple[Block, ...], list[int]] = defaultdict(list)
        for o, (layer, kind) in enumerate(outputs):
            designs[features.blocks(kind, source_layers if kept is None else kept[layer])].append(o)
        blocks = tuple(sorted(set().union(*designs)))
        index = {block: i for i, block in enumerate(blocks)}
        products: list[set[int]] = [set() for _ in blocks]
        targets: list[set[int]] = [set() for _ in blocks]
        for design, readers in designs.items():
            members = sorted(index[block] for block in design)
            for i in members:
                products[i].update(j for j in members if j >= i)
                targets[i].update(readers)
        return Layout(
            blocks,
            tuple(width if block.is_source else (extra_widths or {})[block.kind] for block in blocks),
            outputs,
            tuple(tuple(sorted(p)) for p in products),
            tuple(tuple(sorted(t)) for t in targets),
            heads,
            width // heads,
            None if kept is None else tuple(tuple(sorted(layers)) for layers in kept),
        )

    def singles(self) -> Layout:
        """The same without products of different source layers: enough for designs of one source layer."""
        near = [[j for j in p if self.blocks[j].layer == self.blocks[i].layer] for i, p in enumerate(self.products)]
        return replace(self, products=tuple(tuple(p) for p in near))

    def only(self, layer: int) -> Layout:
        """What one target layer reads of it."""
        outputs = [o for o, output in enumerate(self.outputs) if output[0] == layer]
        members = [i for i, targets in enumerate(self.targets) if not set(outputs).isdisjoint(targets)]
        block_at, output_at = ({old: new for new, old in enumerate(each)} for each in (members, outputs))
        return Layout(
            tuple(self.blocks[i] for i in members),
            tuple(self.widths[i] for i in members),
            tuple(self.outputs[o] for o in outputs),
            tuple(tuple(block_at[j] for j in self.products[i] if j in block_at) for i in members),
            tuple(tuple(output_at[o] for o in self.targets[i] if o in output_at) for i in members),
            self.heads,
            self.dim,
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
        return [c for i in chosen for c in range(self.starts[i], self.starts[i + 1])]

    def width_of(self, blocks: Sequence[Block]) -> int:
        widths = dict(zip(self.blocks, self.widths, strict=True))
        return sum(widths[block] for block in blocks)

    @property
    def source_layers(self) -> list[int]:
        """The candidate source layers: those that some target layer may read."""
        return sorted({block.layer for block in self.blocks if block.is_source})

    def candidates(self, layer: int) -> tuple[int, ...]:
        """The source layers that one target layer may read."""
        return tuple(self.source_layers) if self.kept is None else self.kept[layer]

    @property
    def pairs(self) -> int:
        """How many products of two blocks, or of a block and an output, are kept."""
        return sum(len(p) + len(t) for p, t in zip(self.products, self.targets, strict=True))

    def _products_per_token(self) -> int:
        """Multiplications that one token costs, which is also the numbers kept (but for sums)."""
        pairs = 0
        for width, products, targets in zip(self.widths, self.products, self.targets, strict=True):
            pairs += width * (sum(self.widths[j] for j in products) + len(targets) * self.width)
        return pairs + len(self.outputs) * self.width * self.dim

    @property
    def _of_columns(self) -> int:
        """Numbers kept of every single column (pilot, scale and sum), and products within a head of an output."""
        return 3 * (self.starts[-1] + len(self.outputs) * self.width) + len(self.outputs) * self.width * self.dim

    @property
    def bytes(self) -> int:
        """Of moments that are being accumulated."""
        return 8 * (self._products_per_token() + 3 * (self.starts[-1] + len(self.outputs) * self.width))

    def stored_bytes(self, width: int) -> int:
        """Of finished ones, whose products have so many bytes a number."""
        single = 8 * self._of_columns
        return single + (self.bytes - single) * width // 8

    @property
    def flops_per_token(self) -> float:
        """FLOPs that one kept token costs."""
        return 2.0 * self._products_per_token()

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {**asdict(self), "blocks": [block.name for block in self.blocks]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Layout:
        """The layout of its JSON form, where tuples are lists."""
        blocks = tuple(Block.parse(name) for name in data["blocks"])
        return Layout(**{**{name: _tuples(value) for name, value in data.items()}, "blocks": blocks})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
