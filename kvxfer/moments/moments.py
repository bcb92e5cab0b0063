"""Sufficient statistics of a calibration pass: all that a closed form needs, over named blocks of features.

Kept per pair of blocks that some design reads: sums of products of shifted and scaled columns. Columns are shifted by a
pilot mean (the first batch's), since raw products lose the variance of a column whose mean is large, and divided by a
power of two near their deviation, which rounds nothing. Products run in the columns' own dtype over
no more than ``TOKENS`` tokens, and are added up in float64; two passes are merged by Chan's rule (Chan, Golub, LeVeque
1983). docs/method.md bounds the error. Where tokens have weights, all sums are weighted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Block, Output
from kvxfer.maps.products import fastest
from kvxfer.moments.layout import Layout

TOKENS = 4096
"""Tokens whose products are summed in the columns' own dtype before float64 takes over."""


class Moments:
    """The accumulated moments of one split of the rows.

    Args:
        layout: what is kept.
        device: where the accumulators live (a device without float64 is refused by the calibration's plan).

    Attributes:
        count: the sum of the tokens' weights, which is their number where they have none.
        squares: the sum of the squared weights, likewise.
        scale_x, scale_y: what ``gram`` and ``cross`` are to be multiplied by, column by column; powers of two.
    """

    def __init__(self, layout: Layout, device: str | torch.device = "cpu") -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        columns, outputs = layout.starts[-1], len(layout.outputs)
        self.layout = layout
        self.count: float = 0
        self.squares: float = 0
        self.pilot_x, self.pilot_y = zeros(columns), zeros(outputs, layout.width)
        self.scale_x, self.scale_y = zeros(columns) + 1, zeros(outputs, layout.width) + 1
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

        Products are taken on the inputs' device and in their dtype, block by block, and added to the accumulators.
        """
        if not x.shape[0]:
            return
        y = y.flatten(1)
        if not self.count:
            self._aim(x, y)
        for start in range(0, x.shape[0], TOKENS):
            here = slice(start, start + TOKENS)
            self._add(x[here], y[here], None if weights is None else weights[here].to(x))

    def _aim(self, x: Float[Tensor, "tokens columns"], y: Float[Tensor, "tokens all_width"]) -> None:
        """Pilot and scale of every column, by these tokens."""
        for columns, pilot, scale in ((x, self.pilot_x, self.scale_x), (y, self.pilot_y, self.scale_y)):
            for part, mean, unit in zip(
                columns.split(1024, 1), pilot.view(-1).split(1024), scale.view(-1).split(1024), strict=True
            ):
                mean.copy_(part.mean(0))  # in the columns' dtype: what is near it is then shifted without rounding
                deviation = (part - mean.to(part)).abs().mean(0).double()
                unit.copy_(torch.where(deviation > 0, deviation, 1.0).log2().round().exp2())

    def _shifted(self, x: Tensor, pilot: Tensor, scale: Tensor, places: list[tuple[slice, slice]]) -> Tensor:
        """Columns less their pilots, over their scales, at other places."""
        pilot, scale = pilot.view(-1).to(x), scale.view(-1).to(x).reciprocal()
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        for own, place in places:
            torch.sub(x[:, own], pilot[own], out=found[:, place]).mul_(scale[own])
        return found

    def _add(self, x: Tensor, y: Tensor, weights: Tensor | None) -> None:
        home, layout, everything = self.sum_x.device, self.layout, slice(None)
        z = self._shifted(x, self.pilot_x, self.scale_x, [(self._own(i), self._places[i]) for i in self._places])
        v = self._shifted(y, self.pilot_y, self.scale_y, [(everything, everything)])
        left, top = z, v
        if weights is None:
            self.count, self.squares = self.count + x.shape[0], self.squares + x.shape[0]
        else:
            self.count += float(weights.sum())
            self.squares += float(weights.square().sum())
            left, top = z * weights[:, None], v * weights[:, None]
        sums = left.sum(0).to(home).double()
        for i, place in self._places.items():
            own = self._own(i)
            self.sum_x[own] += sums[place] * self.scale_x[own]
        self.sum_y += top.sum(0).to(home).double().view_as(self.sum_y) * self.scale_y
        product = fastest(x.device, x.dtype).run
        for i, place in self._places.items():
            column = left[:, place].T
            for whole, kept, runs in ((z, self.gram[i], self._read[i]), (v, self.cross[i].flatten(1), self._met[i])):
                for columns, into in runs:
                    kept[:, into] += product(column, whole[:, columns], None, None).to(home)
        by_head, weighed = (part.view(len(part), -1, layout.dim).transpose(0, 1) for part in (v, top))
        squares = (weighed.mT @ by_head).to(home).double().view_as(self.square_y)
        scale = self.scale_y.unflatten(-1, (layout.heads, layout.dim))
        self.square_y += squares * scale[..., None] * scale[..., None, :]

    @cached_property
    def _places(self) -> dict[int, slice]:
        """Where each block's columns lie while they are multiplied: those that meet the same outputs side by side."""
        order = sorted(range(len(self.layout.blocks)), key=lambda i: (self.layout.targets[i], i))
        return dict(zip(order, _places([self.layout.widths[i] for i in order]), strict=True))

    @cached_property
    def _read(self) -> list[list[tuple[slice, slice]]]:
        """For every block, runs of the columns that it is multiplied with, and where their products go."""
        return [
            _runs([self._places[j] for j in products], _places([self.layout.widths[j] for j in products]))
            for products in self.layout.products
        ]

    @cached_property
    def _met(self) -> list[list[tuple[slice, slice]]]:
        """For every block, the same of outputs."""
        width = self.layout.width
        everywhere = _places([width] * len(self.layout.outputs))
        return [_runs([everywhere[o] for o in met], _places([width] * len(met))) for met in self.layout.targets]

    @property
    def dtype(self) -> torch.dtype:
        """Of the products that are kept."""
        return self.gram[0].dtype

    @property
    def effective(self) -> float:
        """Kish's effective sample size (Kish 1965): (Σw)² / Σw², the number of tokens where all weigh the same."""
        return self.count**2 / self.squares if self.squares else 0.0

    def _own(self, i: int) -> slice:
        return slice(self.layout.starts[i], self.layout.starts[i + 1])

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
        own, read = self._own(i), self.read[i]
        natural = self.gram[i] * self.scale_x[own, None] * self.scale_x[read]
        return natural.addr_(self.sum_x[own], self.sum_x[read], alpha=-1 / (self.count or 1))

    def _centred_cross(self, i: int) -> Float[Tensor, "own targets width"]:
        own, met = self._own(i), list(self.layout.targets[i])
        natural = self.cross[i] * self.scale_x[own, None, None] * self.scale_y[met]
        return natural - self.sum_x[own][:, None, None] * self.sum_y[met] / (self.count or 1)

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
        places, columns = _places([self.layout.widths[i] for i in index]), self.layout.columns(index)
        gram = torch.empty(len(columns), len(columns), dtype=torch.float64)
        sums, scale = self.sum_x[columns], self.scale_x[columns]
        kept = {i: _places([self.layout.widths[j] for j in self.layout.products[i]]) for i in index}
        at = {(i, j): here for i, some in kept.items() for j, here in zip(self.layout.products[i], some, strict=True)}
        for n, (here, i) in enumerate(zip(places, index, strict=True)):
            for there, j in zip(places[n:], index[n:], strict=True):
                first, last = min(i, j), max(i, j)
                if (first, last) not in at:
                    pair = f"({self.layout.blocks[first].name}, {self.layout.blocks[last].name})"
                    raise KvxferError(f"these moments hold no product {pair}: calibrate with calibration.features=both")
                product = self.gram[first][:, at[first, last]]
                gram[here, there] = product if i == first else product.T
            # Strip by strip, while it is near: a copy of the other half costs a third of one block by block.
            rows = gram[here, here.start :].mul_(scale[here, None]).mul_(scale[here.start :])
            rows.addr_(sums[here], sums[here.start :], alpha=-1 / (self.count or 1))
            gram[here.stop :, here] = rows[:, here.stop - here.start :].T
        return gram

    def targets(self, blocks: tuple[Block, ...], outputs: list[Output]) -> Float[Tensor, "features columns"]:
        """The centred products of a design's columns with outputs, side by side, summed over tokens."""
        wanted, index = self._outputs(outputs), self._index(blocks)
        columns = self.layout.columns(index)
        cross = torch.empty(len(columns), len(wanted), self.layout.width, dtype=torch.float64)
        for rows, i in zip(_places([self.layout.widths[i] for i in index]), index, strict=True):
            at = {o: n for n, o in enumerate(self.layout.targets[i])}
            missing = [self.layout.outputs[o] for o in wanted if o not in at]
            if missing:
                raise KvxferError(
                    f"these moments hold no product of {self.layout.blocks[i].name} with the target's {missing[0][1]}: "
                    "calibrate with calibration.features=both"
                )
            for n, o in enumerate(wanted):
                cross[rows, n] = self.cross[i][:, at[o]]
        found = cross.flatten(1).mul_(self.scale_x[columns, None]).mul_(self.scale_y[wanted].flatten())
        return found.addr_(self.sum_x[columns], self.sum_y[wanted].flatten(), alpha=-1 / (self.count or 1))

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

    def norms(self, outputs: list[Output]) -> dict[str, float]:
        """Of every output, by name, the root of the mean squared length of a token's content over all heads."""
        columns = self.variance_target(outputs) / max(self.count, 1) + self.mean_target(outputs) ** 2
        lengths = columns.view(len(outputs), -1).sum(1).sqrt().tolist()
        return {f"{kind}.{layer}": length for (layer, kind), length in zip(outputs, lengths, strict=True)}

    def state(self) -> dict[str, Tensor]:
        """Every tensor, by name, on the CPU."""
        named = {name: getattr(self, name) for name in _SUMS}
        named |= {f"gram.{i}": t for i, t in enumerate(self.gram)} | {f"cross.{i}": t for i, t in enumerate(self.cross)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}

    def save(self, path: Path) -> None:
        """Write safetensors with the layout and the sums of the weights in the header: all that there is."""
        self._write(self.state(), path)

    def finish(self, path: Path, dtype: torch.dtype) -> None:
        """The same as they are read: centred at their mean, products in the dtype in which they were multiplied.

        It leaves the moments as the file has them: in float32 half the size. What that rounds is below what it rounded
        in the products (docs/method.md).
        """
        mean_x, mean_y = (sums / (self.count or 1) for sums in (self.sum_x, self.sum_y))
        self.square_y = self.centred_square()
        for i, met in enumerate(self.layout.targets):
            own, read = self._own(i), self.read[i]
            shares = self.sum_x[own] / self.scale_x[own] / -(self.count or 1)
            self.gram[i] = self.gram[i].addr_(shares, self.sum_x[read] / self.scale_x[read]).to(dtype)
            others = (self.sum_y / self.scale_y)[list(met)].flatten()
            self.cross[i] = self.cross[i].flatten(1).addr_(shares, others).view_as(self.cross[i]).to(dtype)
        self.pilot_x, self.pilot_y = self.pilot_x + mean_x, self.pilot_y + mean_y
        self.sum_x, self.sum_y = torch.zeros_like(self.sum_x), torch.zeros_like(self.sum_y)
        self._write(self.state(), path)

    def _write(self, tensors: dict[str, Tensor], path: Path) -> None:
        # One entry only: safetensors writes several in no fixed order, and equal moments should be equal files.
        about = {"layout": self.layout.to_dict(), "count": self.count}
        if self.squares != self.count:
            about["squares"] = self.squares
        save_file(tensors, path, metadata={"kvxfer": json.dumps(about)})

    @staticmethod
    def load(path: Path, device: str | torch.device = "cpu") -> Moments:
        """The moments of a file; products stay in its dtype."""
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                header = json.loads(file.metadata()["kvxfer"])
                moments = Moments(Layout.from_dict(header["layout"]), device)
                moments.count = header["count"]
                moments.squares = header.get("squares", moments.count)
                for name, empty in moments.state().items():
                    kind, _, number = name.partition(".")
                    tensor = file.get_tensor(name).to(device)
                    if tensor.shape != empty.shape:
                        raise ValueError(f"{name} is {list(tensor.shape)}, not {list(empty.shape)}")
                    if number:
                        getattr(moments, kind)[int(number)] = tensor
                    else:
                        setattr(moments, kind, tensor)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise KvxferError(
                f"{path} is no readable moments file ({error}): calibrate again with force=true"
            ) from error
        return moments


_SUMS = ("pilot_x", "pilot_y", "scale_x", "scale_y", "sum_x", "sum_y", "square_y")


def _runs(columns: Sequence[slice], into: Sequence[slice]) -> list[tuple[slice, slice]]:
    """Neighbours among both as one, in the order of what they go into."""
    found: list[tuple[slice, slice]] = []
    for one, place in zip(columns, into, strict=True):
        if found and found[-1][0].stop == one.start and found[-1][1].stop == place.start:
            found[-1] = slice(found[-1][0].start, one.stop), slice(found[-1][1].start, place.stop)
        else:
            found.append((one, place))
    return found


def _places(widths: Sequence[int]) -> list[slice]:
    """Where parts of these widths lie side by side."""
    stops = torch.tensor(widths).cumsum(0).tolist()
    return [slice(stop - width, stop) for width, stop in zip(widths, stops, strict=True)]
