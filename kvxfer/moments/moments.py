"""Sufficient statistics of a calibration pass: all that a closed form needs, over named blocks of features.

Kept per pair of blocks that some design reads: sums of products of shifted columns. Columns are shifted by a pilot mean
(the first batch's) before they are multiplied, since raw products lose the variance of a column whose mean is large;
two passes are merged by Chan's rule (Chan, Golub, LeVeque 1983). Everything is float64. Where tokens have weights, all
sums are weighted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block, Output
from kvxfer.moments.layout import Layout


def _pick(x: Float[Tensor, "rows columns"], chosen: list[int]) -> Float[Tensor, "rows chosen"]:
    """Some columns, ascending: a view where they are neighbours, a copy elsewhere."""
    if len(chosen) == chosen[-1] - chosen[0] + 1:
        return x[:, chosen[0] : chosen[-1] + 1]
    return x[:, chosen]


def _some(x: Float[Tensor, "rows parts width"], chosen: list[int]) -> Float[Tensor, "rows chosen width"]:
    """A copy of some parts; neighbours are copied at once, which is several times faster."""
    if chosen == list(range(chosen[0], chosen[0] + len(chosen))):
        return x[:, chosen[0] : chosen[0] + len(chosen)].clone(memory_format=torch.contiguous_format)
    return x[:, chosen]


class Moments:
    """The accumulated moments of one split of the rows.

    Args:
        layout: what is kept.
        device: where the accumulators live (a device without float64 is refused by the calibration's plan).

    Attributes:
        count: the sum of the tokens' weights, which is their number where they have none.
        squares: the sum of the squared weights, likewise.
    """

    def __init__(self, layout: Layout, device: str | torch.device = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        columns, outputs = layout.starts[-1], len(layout.outputs)
        self.layout = layout
        self.count: float = 0
        self.squares: float = 0
        self.pilot_x, self.pilot_y = zeros(columns), zeros(outputs, layout.width)
        self.sum_x, self.sum_y = zeros(columns), zeros(outputs, layout.width)
        self.read = [layout.columns(products) for products in layout.products]
        self.gram = [zeros(width, len(read)) for width, read in zip(layout.widths, self.read, strict=True)]
        self.cross = [
            zeros(width, len(targets), layout.width)
            for width, targets in zip(layout.widths, layout.targets, strict=True)
        ]
        self.square_y = zeros(outputs, layout.heads, layout.dim, layout.dim)

    def update(
        self,
        x: Float[Tensor, "tokens columns"],
        y: Float[Tensor, "tokens outputs width"],
        weights: Float[Tensor, " tokens"] | None = None,
    ) -> None:
        """Add tokens: the columns of all blocks in the layout's order, and the outputs; ``weights`` are 0 or more.

        Products are taken on the inputs' device, block by block, and added to the accumulators.
        """
        if not x.shape[0]:
            return
        home = self.sum_x.device
        x, y = x.double(), y.double()
        if not self.count:
            self.pilot_x.copy_(x.mean(0))
            self.pilot_y.copy_(y.mean(0))
        x = x - self.pilot_x.to(x.device)
        y = y - self.pilot_y.to(y.device)
        left, top = x, y
        if weights is None:
            self.count, self.squares = self.count + x.shape[0], self.squares + x.shape[0]
        else:
            weights = weights.to(x)
            self.count += float(weights.sum())
            self.squares += float(weights.square().sum())
            left, top = x * weights[:, None], y * weights[:, None, None]
        self.sum_x += left.sum(0).to(home)
        self.sum_y += top.sum(0).to(home)
        flat = y.flatten(1)
        for i, targets in enumerate(self.layout.targets):
            column = left[:, self._own(i)].T
            self.gram[i] += (column @ _pick(x, self.read[i])).to(home)
            self.cross[i] += (column @ _pick(flat, self._of_outputs(targets))).view_as(self.cross[i]).to(home)
        heads = (self.layout.heads, self.layout.dim)
        by_head, weighed = (part.unflatten(-1, heads).permute(1, 2, 0, 3) for part in (y, top))
        self.square_y += (weighed.mT @ by_head).to(home)

    @property
    def effective(self) -> float:
        """Kish's effective sample size (Kish 1965): (Σw)² / Σw², the number of tokens where all weigh the same."""
        return self.count**2 / self.squares if self.squares else 0.0

    def _own(self, i: int) -> slice:
        return slice(self.layout.starts[i], self.layout.starts[i + 1])

    def _of_outputs(self, chosen: Sequence[int]) -> list[int]:
        """The columns of some outputs, side by side."""
        width = self.layout.width
        return [c for output in chosen for c in range(output * width, (output + 1) * width)]

    def merge(self, other: Moments) -> Moments:
        """The moments of both passes together (Chan's rule); the result is centred at the common mean."""
        if self.layout != other.layout:
            raise KvxferError(
                "moments of different blocks cannot be merged: calibrate every share with the same settings"
            )
        total = self.count + other.count
        merged = Moments(self.layout)
        merged.count, merged.squares = total, self.squares + other.squares
        if not total:
            return merged
        means = [(m.pilot_x + m.sum_x / (m.count or 1), m.pilot_y + m.sum_y / (m.count or 1)) for m in (self, other)]
        (ax, ay), (bx, by) = means
        share = other.count / total
        merged.pilot_x, merged.pilot_y = ax + (bx - ax) * share, ay + (by - ay) * share
        factor = self.count * share
        dx, dy = bx - ax, by - ay
        for i, targets in enumerate(self.layout.targets):
            own = dx[self._own(i)]
            apart = factor * torch.outer(own, dx[self.read[i]])
            merged.gram[i] = sum((m._centred_gram(i) for m in (self, other)), apart)
            apart = factor * own[:, None, None] * dy[list(targets)]
            merged.cross[i] = sum((m._centred_cross(i) for m in (self, other)), apart)
        heads = dy.unflatten(-1, (self.layout.heads, self.layout.dim))
        apart = factor * heads[..., :, None] * heads[..., None, :]
        merged.square_y = sum((m.centred_square() for m in (self, other)), apart)
        return merged

    def _centred_gram(self, i: int) -> Float[Tensor, "width read"]:
        return self.gram[i] - torch.outer(self.sum_x[self._own(i)], self.sum_x[self.read[i]]) / (self.count or 1)

    def _centred_cross(self, i: int) -> Float[Tensor, "own targets width"]:
        others = self.sum_y[list(self.layout.targets[i])]
        return self.cross[i] - self.sum_x[self._own(i)][:, None, None] * others / (self.count or 1)

    def centred_square(self, outputs: list[Output] | None = None) -> Float[Tensor, "outputs heads dim dim"]:
        """Centred products of each head of the outputs (None: of all) with itself, summed over tokens."""
        wanted = self._outputs(outputs) if outputs is not None else slice(None)
        heads = self.sum_y[wanted].unflatten(-1, (self.layout.heads, self.layout.dim))
        return self.square_y[wanted] - heads[..., :, None] * heads[..., None, :] / (self.count or 1)

    def _outputs(self, outputs: list[Output]) -> list[int]:
        return [self.layout.outputs.index(output) for output in outputs]

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
        index = self._index(blocks)
        places = _places([self.layout.widths[i] for i in index])
        gram = torch.empty(places[-1].stop, places[-1].stop, dtype=torch.float64)
        for here, i in zip(places, index, strict=True):
            inside = _places([self.layout.widths[j] for j in self.layout.products[i]])
            at = dict(zip(self.layout.products[i], inside, strict=True))
            for there, j in zip(places, index, strict=True):
                if j < i:
                    continue
                if j not in at:
                    pair = f"({self.layout.blocks[i].name}, {self.layout.blocks[j].name})"
                    raise KvxferError(f"these moments hold no product {pair}: calibrate with calibration.features=both")
                sums = torch.outer(self.sum_x[self._own(i)], self.sum_x[self._own(j)])
                gram[here, there] = self.gram[i][:, at[j]] - sums / (self.count or 1)
                gram[there, here] = gram[here, there].T.clone()
        return gram

    def targets(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Float[Tensor, "features columns"]:
        """The centred products of a design's columns with outputs, side by side, summed over tokens."""
        wanted = self._outputs(outputs)
        sums, rows = self.sum_y[wanted].flatten(), []
        for i in self._index(blocks):
            at = {o: n for n, o in enumerate(self.layout.targets[i])}
            missing = [self.layout.outputs[o] for o in wanted if o not in at]
            if missing:
                raise KvxferError(
                    f"these moments hold no product of {self.layout.blocks[i].name} with the target's {missing[0][1]}: "
                    "calibrate with calibration.features=both"
                )
            own = _some(self.cross[i], [at[o] for o in wanted]).flatten(1)
            rows.append(own.addr_(self.sum_x[self._own(i)], sums, alpha=-1 / (self.count or 1)))
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def mean_of(self, blocks: tuple[Block, ...]) -> Float[Tensor, " features"]:
        columns = self.layout.columns(self._index(blocks))
        return (self.pilot_x + self.sum_x / (self.count or 1))[columns]

    def mean_target(self, outputs: list[Output]) -> Float[Tensor, " columns"]:
        """The mean of outputs, side by side."""
        return (self.pilot_y + self.sum_y / (self.count or 1))[self._outputs(outputs)].flatten()

    def variance_target(self, outputs: list[Output]) -> Float[Tensor, " columns"]:
        """The centred sum of squares of every column of outputs, side by side."""
        wanted = self._outputs(outputs)
        squares = self.square_y.diagonal(dim1=-2, dim2=-1)[wanted].flatten(1)
        return (squares - self.sum_y[wanted] ** 2 / max(self.count, 1)).flatten()

    def state(self) -> dict[str, Tensor]:
        """Every tensor, by name, on the CPU."""
        named = {name: getattr(self, name) for name in ("pilot_x", "pilot_y", "sum_x", "sum_y", "square_y")}
        named |= {f"gram.{i}": t for i, t in enumerate(self.gram)} | {f"cross.{i}": t for i, t in enumerate(self.cross)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def save(self, path: Path) -> None:
        """Write safetensors with the layout and the sums of the weights in the header."""
        # One entry only: safetensors writes several in no fixed order, and equal moments should be equal files.
        about = {"layout": self.layout.to_dict(), "count": self.count}
        if self.squares != self.count:
            about["squares"] = self.squares
        header = {"kvxfer": json.dumps(about)}
        save_file(self.state(), path, metadata=header)

    @staticmethod
    def load(path: Path, device: str | torch.device = "cpu") -> Moments:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = json.loads(file.metadata()["kvxfer"])
                moments = Moments(Layout.from_dict(header["layout"]), device)
                moments.count = header["count"]
                moments.squares = header.get("squares", moments.count)
                for name in moments.state():
                    kind, _, number = name.partition(".")
                    place = getattr(moments, kind)[int(number)] if number else getattr(moments, kind)
                    place.copy_(file.get_tensor(name))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise KvxferError(
                f"{path} is no readable moments file ({error}): calibrate again with force=true"
            ) from error
        return moments


def _places(widths: Sequence[int]) -> list[slice]:
    """Where parts of these widths lie side by side."""
    stops = torch.tensor(widths).cumsum(0).tolist()
    return [slice(stop - width, stop) for width, stop in zip(widths, stops, strict=True)]
