"""Sufficient statistics of a calibration pass: all that a closed form needs, over named blocks of features.

Kept per pair of blocks that some design reads: sums of products of shifted columns. Columns are shifted by a pilot mean
(the first batch's) before they are multiplied, since raw products lose the variance of a column whose mean is large;
two passes are merged by Chan's rule (Chan, Golub, LeVeque 1983). Everything is float64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.features import KINDS, Block, Features

Output = tuple[int, str]
"""A target layer and the kind (keys or values) that is predicted."""


@dataclass(frozen=True)
class Layout:
    """Which blocks, outputs and products of them are kept.

    Attributes:
        blocks: the feature blocks, each ``width`` columns.
        outputs: the target's layers and kinds, each ``heads * dim`` columns.
        products: for every block, the blocks (itself and later ones) that it is multiplied with, ascending.
        targets: for every block, the outputs that it is multiplied with, ascending.
    """

    blocks: tuple[Block, ...]
    outputs: tuple[Output, ...]
    products: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    width: int
    heads: int
    dim: int

    @staticmethod
    def of(features: Features, source_layers: list[int], target_layers: int, width: int, heads: int) -> Layout:
        """The layout that serves every choice among ``source_layers`` under ``features``.

        Args:
            width: columns of one source layer's keys (all KV heads).
            heads: the target's KV heads; its width is the same as the source's for a compatible pair.
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
            outputs,
            tuple(tuple(sorted(p)) for p in products),
            tuple(tuple(sorted(t)) for t in targets),
            width,
            heads,
            width // heads,
        )

    @property
    def bytes(self) -> int:
        """Bytes of the moments of one split."""
        pairs = sum(len(p) for p in self.products) + sum(len(t) for t in self.targets)
        outputs = len(self.outputs) * self.heads * self.dim * self.dim
        return 8 * (pairs * self.width**2 + outputs + 2 * (len(self.blocks) + len(self.outputs)) * self.width)

    @property
    def flops_per_token(self) -> float:
        """FLOPs that one kept token costs."""
        pairs = sum(len(p) for p in self.products) + sum(len(t) for t in self.targets)
        return 2.0 * (pairs * self.width**2 + len(self.outputs) * self.width * self.dim)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types."""
        return {
            "blocks": [block.name for block in self.blocks],
            "outputs": [[layer, kind] for layer, kind in self.outputs],
            "products": [list(p) for p in self.products],
            "targets": [list(t) for t in self.targets],
            "width": self.width,
            "heads": self.heads,
            "dim": self.dim,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Layout:
        """The layout of its JSON form."""
        return Layout(
            tuple(Block.parse(name) for name in data["blocks"]),
            tuple((layer, kind) for layer, kind in data["outputs"]),
            tuple(tuple(p) for p in data["products"]),
            tuple(tuple(t) for t in data["targets"]),
            data["width"],
            data["heads"],
            data["dim"],
        )


def _side_by_side(x: Float[Tensor, "tokens blocks width"], chosen: tuple[int, ...]) -> Float[Tensor, "tokens columns"]:
    """The chosen blocks' columns as one matrix: a view where they are neighbours, a copy elsewhere."""
    if len(chosen) == chosen[-1] - chosen[0] + 1:
        return x[:, chosen[0] : chosen[-1] + 1].flatten(1)
    return x[:, list(chosen)].flatten(1)


class Moments:
    """The accumulated moments of one split of the rows.

    Args:
        layout: what is kept.
        device: where the accumulators live (a device without float64 is refused by the calibration's plan).
    """

    def __init__(self, layout: Layout, device: str | torch.device = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        width, blocks, outputs = layout.width, len(layout.blocks), len(layout.outputs)
        self.layout = layout
        self.count = 0
        self.pilot_x, self.pilot_y = zeros(blocks, width), zeros(outputs, width)
        self.sum_x, self.sum_y = zeros(blocks, width), zeros(outputs, width)
        self.gram = [zeros(width, len(p), width) for p in layout.products]
        self.cross = [zeros(width, len(t), width) for t in layout.targets]
        self.square_y = zeros(outputs, layout.heads, layout.dim, layout.dim)

    def update(self, x: Float[Tensor, "tokens blocks width"], y: Float[Tensor, "tokens outputs width"]) -> None:
        """Add tokens. Products are taken on the inputs' device, block by block, and added to the accumulators."""
        if not x.shape[0]:
            return
        home = self.sum_x.device
        x, y = x.double(), y.double()
        if not self.count:
            self.pilot_x.copy_(x.mean(0))
            self.pilot_y.copy_(y.mean(0))
        x = x - self.pilot_x.to(x.device)
        y = y - self.pilot_y.to(y.device)
        self.count += x.shape[0]
        self.sum_x += x.sum(0).to(home)
        self.sum_y += y.sum(0).to(home)
        for i, (products, targets) in enumerate(zip(self.layout.products, self.layout.targets, strict=True)):
            column = x[:, i].T
            self.gram[i] += (column @ _side_by_side(x, products)).view_as(self.gram[i]).to(home)
            self.cross[i] += (column @ _side_by_side(y, targets)).view_as(self.cross[i]).to(home)
        by_head = y.unflatten(-1, (self.layout.heads, self.layout.dim)).permute(1, 2, 0, 3)
        self.square_y += (by_head.mT @ by_head).to(home)

    def merge(self, other: Moments) -> Moments:
        """The moments of both passes together (Chan's rule); the result is centred at the common mean."""
        if self.layout != other.layout:
            raise KvxferError(
                "moments of different blocks cannot be merged: calibrate every share with the same settings"
            )
        total = self.count + other.count
        merged = Moments(self.layout)
        merged.count = total
        if not total:
            return merged
        means = [(m.pilot_x + m.sum_x / max(m.count, 1), m.pilot_y + m.sum_y / max(m.count, 1)) for m in (self, other)]
        (ax, ay), (bx, by) = means
        share = other.count / total
        merged.pilot_x, merged.pilot_y = ax + (bx - ax) * share, ay + (by - ay) * share
        factor = self.count * share
        dx, dy = bx - ax, by - ay
        for i, (products, targets) in enumerate(zip(self.layout.products, self.layout.targets, strict=True)):
            apart = factor * dx[i][:, None, None] * dx[list(products)]
            merged.gram[i] = sum((m._centred_gram(i) for m in (self, other)), apart)
            apart = factor * dx[i][:, None, None] * dy[list(targets)]
            merged.cross[i] = sum((m._centred_cross(i) for m in (self, other)), apart)
        heads = dy.unflatten(-1, (self.layout.heads, self.layout.dim))
        apart = factor * heads[..., :, None] * heads[..., None, :]
        merged.square_y = sum((m.centred_square() for m in (self, other)), apart)
        return merged

    def _centred_gram(self, i: int) -> Float[Tensor, "width products width"]:
        others = self.sum_x[list(self.layout.products[i])]
        return self.gram[i] - self.sum_x[i][:, None, None] * others / max(self.count, 1)

    def _centred_cross(self, i: int) -> Float[Tensor, "width targets width"]:
        others = self.sum_y[list(self.layout.targets[i])]
        return self.cross[i] - self.sum_x[i][:, None, None] * others / max(self.count, 1)

    def centred_square(self) -> Float[Tensor, "outputs heads dim dim"]:
        """Centred products of each output head with itself, summed over tokens."""
        heads = self.sum_y.unflatten(-1, (self.layout.heads, self.layout.dim))
        return self.square_y - heads[..., :, None] * heads[..., None, :] / max(self.count, 1)

    def _index(self, blocks: tuple[Block, ...]) -> list[int]:
        known = {block: i for i, block in enumerate(self.layout.blocks)}
        missing = [block.name for block in blocks if block not in known]
        if missing:
            raise KvxferError(
                f"these moments hold no block {missing[0]}: calibrate with calibration.features and calibration.layers "
                "that cover the design (for example calibration.features=previous)"
            )
        return [known[block] for block in blocks]

    def design(self, blocks: tuple[Block, ...]) -> Float[Tensor, "features features"]:
        """The centred Gram of a design's columns, summed over tokens."""
        index, width = self._index(blocks), self.layout.width
        gram = torch.empty(len(index) * width, len(index) * width, dtype=torch.float64)
        for row, i in enumerate(index):
            at = {j: n for n, j in enumerate(self.layout.products[i])}
            for column, j in enumerate(index):
                if j < i:
                    continue
                if j not in at:
                    pair = f"({self.layout.blocks[i].name}, {self.layout.blocks[j].name})"
                    raise KvxferError(f"these moments hold no product {pair}: calibrate with calibration.features=both")
                here, there = slice(row * width, (row + 1) * width), slice(column * width, (column + 1) * width)
                centred = self.gram[i][:, at[j]] - torch.outer(self.sum_x[i], self.sum_x[j]) / max(self.count, 1)
                gram[here, there] = centred
                gram[there, here] = centred.T
        return gram

    def targets(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Float[Tensor, "features columns"]:
        """The centred products of a design's columns with outputs, side by side, summed over tokens."""
        wanted = [self.layout.outputs.index(output) for output in outputs]
        rows = []
        for i in self._index(blocks):
            at = {o: n for n, o in enumerate(self.layout.targets[i])}
            missing = [self.layout.outputs[o] for o in wanted if o not in at]
            if missing:
                raise KvxferError(
                    f"these moments hold no product of {self.layout.blocks[i].name} with the target's {missing[0][1]}: "
                    "calibrate with calibration.features=both"
                )
            rows.append(self._centred_cross(i)[:, [at[o] for o in wanted]].flatten(1))
        return torch.cat(rows)

    def mean_of(self, blocks: tuple[Block, ...]) -> Float[Tensor, " features"]:
        """The mean of a design's columns."""
        index = self._index(blocks)
        return (self.pilot_x + self.sum_x / max(self.count, 1))[index].flatten()

    def mean_target(self, outputs: list[Output]) -> Float[Tensor, " columns"]:
        """The mean of outputs, side by side."""
        wanted = [self.layout.outputs.index(output) for output in outputs]
        return (self.pilot_y + self.sum_y / max(self.count, 1))[wanted].flatten()

    def variance_target(self, outputs: list[Output]) -> Float[Tensor, " columns"]:
        """The centred sum of squares of every column of outputs, side by side."""
        wanted = [self.layout.outputs.index(output) for output in outputs]
        return self.centred_square().diagonal(dim1=-2, dim2=-1)[wanted].flatten()

    def state(self) -> dict[str, Tensor]:
        """Every tensor, by name, on the CPU."""
        named = {name: getattr(self, name) for name in ("pilot_x", "pilot_y", "sum_x", "sum_y", "square_y")}
        named |= {f"gram.{i}": t for i, t in enumerate(self.gram)} | {f"cross.{i}": t for i, t in enumerate(self.cross)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def save(self, path: Path) -> None:
        """Write safetensors with the layout and the count in the header."""
        # One entry only: safetensors writes several in no fixed order, and equal moments should be equal files.
        header = {"kvxfer": json.dumps({"layout": self.layout.to_dict(), "count": self.count})}
        save_file(self.state(), path, metadata=header)

    @staticmethod
    def load(path: Path, device: str | torch.device = "cpu") -> Moments:
        """Read what ``save`` wrote."""
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = json.loads(file.metadata()["kvxfer"])
                moments = Moments(Layout.from_dict(header["layout"]), device)
                moments.count = header["count"]
                for name in moments.state():
                    kind, _, number = name.partition(".")
                    place = getattr(moments, kind)[int(number)] if number else getattr(moments, kind)
                    place.copy_(file.get_tensor(name))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise KvxferError(
                f"{path} is no readable moments file ({error}): calibrate again with force=true"
            ) from error
        return moments
