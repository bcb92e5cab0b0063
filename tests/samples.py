"""Random features and outputs in a layout's order, and the plain float64 answers to what moments are asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.features import KINDS, Block, Features
from kvxfer.moments import Layout, Moments, Output
from kvxfer.solvers import Splits


@dataclass(frozen=True)
class Samples:
    """Tokens as rows: features ``[tokens, blocks, width]`` and outputs ``[tokens, outputs, width]`` of a layout."""

    layout: Layout
    x: Tensor
    y: Tensor

    def design(self, blocks: tuple[Block, ...]) -> Tensor:
        """The columns of a design, in float64."""
        return torch.cat([self.x[:, self.layout.blocks.index(block)] for block in blocks], dim=1).double()

    def targets(self, outputs: list[Output]) -> Tensor:
        """The columns of outputs, in float64."""
        return torch.cat([self.y[:, self.layout.outputs.index(output)] for output in outputs], dim=1).double()

    def moments(self, batch: int = 64) -> Moments:
        """Moments of all tokens, accumulated batch by batch."""
        moments = Moments(self.layout)
        for x, y in zip(self.x.split(batch), self.y.split(batch), strict=True):
            moments.update(x, y)
        return moments

    def part(self, start: int, stop: int | None) -> Samples:
        """Some of the tokens."""
        return Samples(self.layout, self.x[start:stop], self.y[start:stop])


def make_samples(
    features: Features,
    tokens: int = 400,
    source_layers: int = 3,
    target_layers: int = 2,
    heads: int = 2,
    dim: int = 3,
    seed: int = 0,
    mean: float = 0.0,
    noise: float = 0.3,
) -> Samples:
    """Outputs that are a linear function of all blocks, plus noise; columns of mixed scale with ``mean`` deviations."""
    layout = Layout.of(features, list(range(source_layers)), target_layers, heads * dim, heads)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    blocks, outputs, width = len(layout.blocks), len(layout.outputs), layout.width
    scale = 10.0 ** (draw(blocks, width) * 0.3)
    x = draw(tokens, blocks, width) * scale + mean * scale * draw(blocks, width).sign()
    weight = torch.randn(blocks * width, outputs * width, generator=torch.Generator().manual_seed(99)).double()
    centred = (x - x.mean(0)).flatten(1)
    y = (centred @ weight / len(weight) ** 0.5).view(tokens, outputs, width)
    y = y + noise * draw(tokens, outputs, width) + mean
    return Samples(layout, x.float(), y.float())


def make_splits(samples: Samples) -> Splits:
    """The tokens as fit (a half), validation and held-out (a quarter each)."""
    half, quarter = len(samples.x) // 2, len(samples.x) // 4
    bounds = ((0, half), (half, half + quarter), (half + quarter, None))
    return Splits(*(samples.part(start, stop).moments() for start, stop in bounds))


def reference_ridge(x: Tensor, y: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    """Weight and bias by float64 least squares (QR) on the centred raw rows, extended by the rows of the penalty."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    a, b = x - mean_x, y - mean_y
    unit = (a * a).sum(0).mean()
    a = torch.cat([a, (lam * unit).sqrt() * torch.eye(a.shape[1], dtype=a.dtype)])
    b = torch.cat([b, torch.zeros(x.shape[1], y.shape[1], dtype=b.dtype)])
    weight = torch.linalg.lstsq(a, b, driver="gelsd").solution
    return weight, mean_y - mean_x @ weight


def reference_r2(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
    """R² of one output from raw rows: per head, over its columns; then the mean of the heads."""
    squares = ((x @ weight + bias - y) ** 2).sum(0), ((y - y.mean(0)) ** 2).sum(0)
    residual, total = (s.view(heads, -1).sum(1) for s in squares)
    return (1 - residual / total).mean()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference against the largest number expected."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


def tensors_of(moments: Moments) -> dict[str, Tensor]:
    """All that the solvers ask of moments, under names."""
    layout = moments.layout
    answers = {"square": moments.centred_square()}
    for kind in KINDS:
        blocks = tuple(b for b, t in zip(layout.blocks, layout.targets, strict=True) if _reads(layout, t, kind))
        outputs = [output for output in layout.outputs if output[1] == kind]
        answers |= {
            f"gram.{kind}": moments.design(blocks),
            f"cross.{kind}": moments.targets(blocks, outputs),
            f"mean_x.{kind}": moments.mean_of(blocks),
            f"mean_y.{kind}": moments.mean_target(outputs),
            f"variance.{kind}": moments.variance_target(outputs),
        }
    return answers


def _reads(layout: Layout, targets: tuple[int, ...], kind: str) -> bool:
    return any(layout.outputs[o][1] == kind for o in targets)


def assert_same(found: Moments, expected: Moments, tolerance: float = 1e-9) -> None:
    """The same answers, relative to the largest number of each."""
    assert found.count == expected.count
    ours, theirs = tensors_of(found), tensors_of(expected)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < tolerance, name
