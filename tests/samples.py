"""Random features and outputs in a layout's order, and the plain float64 answers to what moments are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvxfer.fitting.closed import Splits
from kvxfer.maps.blocks import KINDS, Block, Features, Output
from kvxfer.moments.layout import Layout
from kvxfer.moments.moments import TOKENS, Moments
from kvxfer.moments.probe import Probe
from kvxfer.moments.query_metric import Metric, Metrics
from kvxfer.moments.random_file import draw_random


@dataclass(frozen=True)
class Samples:
    """Tokens as rows: features ``[tokens, columns]`` and outputs ``[tokens, outputs, width]`` of a layout."""

    layout: Layout
    x: Tensor
    y: Tensor

    def design(self, blocks: tuple[Block, ...]) -> Tensor:
        """The columns of a design, in float64."""
        return torch.cat([self.block(block) for block in blocks], dim=1).double()

    def block(self, block: Block) -> Tensor:
        """The columns of one block (a view)."""
        place = self.layout.blocks.index(block)
        return self.x[:, self.layout.starts[place] : self.layout.starts[place + 1]]

    def targets(self, outputs: list[Output]) -> Tensor:
        """The columns of outputs, in float64."""
        return torch.cat([self.y[:, self.layout.outputs.index(output)] for output in outputs], dim=1).double()

    def moments(self, batch: int = 64, weights: Tensor | None = None, dtype: torch.dtype = torch.float64) -> Moments:
        """Moments of all tokens (with weights, if any), accumulated batch by batch, by products in a dtype."""
        moments = Moments(self.layout)
        for start in range(0, len(self.x), batch):
            span = slice(start, start + batch)
            own = None if weights is None else weights[span]
            moments.update(self.x[span].to(dtype), self.y[span].to(dtype), own)
        return moments

    def only(self, layer: int) -> Samples:
        """What one target layer reads and gives."""
        layout = self.layout.only(layer)
        outputs = [self.layout.outputs.index(output) for output in layout.outputs]
        return Samples(layout, torch.cat([self.block(b) for b in layout.blocks], dim=1), self.y[:, outputs])

    def whole(self) -> Samples:
        """The same in whole eighths: sums over a power of two of such tokens are exact, in whatever order.

        How a library rounds a matrix product depends on its shape and on the processor. With nothing to round, the same
        products taken in blocks of another width are the same to the bit.
        """
        return Samples(self.layout, (8 * self.x).round() / 8, (8 * self.y).round() / 8)

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
    local: bool = False,
    kept: Sequence[Sequence[int]] | None = None,
) -> Samples:
    """Outputs that are a linear function of all blocks, plus noise; columns of mixed scale with ``mean`` deviations.

    With ``local`` each head of an output is a function of the same heads of the blocks alone.
    """
    extras = {"embedding": 5, "layer0_keys": heads * dim, "layer0_values": heads * dim, "random_relu": 7}
    extras |= {"random_products": 6, "source_hidden": 4}
    layout = Layout.of(features, list(range(source_layers)), target_layers, heads * dim, heads, extras, kept)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    columns, outputs, width = layout.starts[-1], len(layout.outputs), layout.width
    scale = 10.0 ** (draw(columns) * 0.3)
    x = draw(tokens, columns) * scale + mean * scale * draw(columns).sign()
    weight = torch.randn(columns, outputs * width, generator=torch.Generator().manual_seed(99)).double()
    if local:
        head = torch.arange(heads).repeat_interleave(dim)
        weight = weight * (head.repeat(columns // width)[:, None] == head.repeat(outputs))
    centred = x - x.mean(0)
    y = (centred @ weight / len(weight) ** 0.5).view(tokens, outputs, width)
    y = y + noise * draw(tokens, outputs, width) + mean
    return Samples(layout, x.float(), y.float())


def make_splits(samples: Samples, weights: Tensor | None = None) -> Splits:
    """The tokens as fit (a half), validation and held-out (a quarter each).

    Args:
        weights: ``[target layers, tokens]`` of the weighted moments; None: every token weighs 1.
    """
    half, quarter = len(samples.x) // 2, len(samples.x) // 4
    bounds = ((0, half), (half, half + quarter), (half + quarter, None))
    fit, validation, held_out = (samples.part(start, stop).moments() for start, stop in bounds)
    weighted: dict[str, dict[int, Moments]] = {}
    for split, (start, stop) in zip(("fit", "validation"), bounds, strict=False):
        weighted[split] = {}
        for layer in sorted({layer for layer, _ in samples.layout.outputs}):
            part = samples.only(layer).part(start, stop)
            own = torch.ones(len(part.x)) if weights is None else weights[layer, start:stop]
            weighted[split][layer] = part.moments(weights=own)
    probe = make_probe(samples.part(*bounds[1]))
    return Splits(fit, validation, held_out, make_metrics(samples.layout), probe, lambda split, n: weighted[split][n])


def make_probe(samples: Samples, exact: int = 1, seed: int = 7) -> Probe:
    """The tokens as one row: their features and outputs, queries of two heads per KV head and an output projection."""
    layout, count = samples.layout, len(samples.x)
    generator = torch.Generator().manual_seed(seed)

    def content(columns: Tensor) -> Tensor:
        return columns.view(1, count, layout.heads, -1).transpose(1, 2).contiguous()

    angles = torch.arange(count)[:, None] * torch.tensor([0.3, 0.3])
    layers = len(layout.outputs) // len(KINDS)
    tensors = {
        "cos": angles.cos(),
        "sin": angles.sin(),
        "scaling": torch.tensor(1.0),
        "scale": torch.full((layers,), layout.dim**-0.5),
        "exact": torch.tensor(exact),
        "good": torch.tensor([True]),
    }
    for block in layout.blocks:
        if block.is_source and not block.offset:
            tensors[f"source.{block.kind}.{block.layer}"] = content(samples.block(block))
        if block == Block(0, "embedding"):
            tensors["target.embeddings"] = samples.block(block)[None]
        if block == Block(0, "source_hidden"):
            tensors["source.hidden"] = samples.block(block)[None]
    for n, (layer, kind) in enumerate(layout.outputs):
        tensors[f"target.{kind}.{layer}"] = content(samples.y[:, n])
    for layer in range(layers):
        tensors[f"target.queries.{layer}"] = torch.randn(1, 2 * layout.heads, count, layout.dim, generator=generator)
        tensors[f"target.output.{layer}"] = torch.randn(8, 2 * layout.width, generator=generator)
    return Probe(tensors, draw_random(layout))


def make_metrics(layout: Layout, seed: int = 5) -> Metrics:
    """A random metric of every output, as uneven as that of real queries."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for output in layout.outputs:
        half = torch.randn(layout.heads, layout.dim, layout.dim, generator=generator, dtype=torch.float64)
        half = half * 10.0 ** torch.linspace(-1, 1, layout.dim, dtype=torch.float64)
        found[output] = Metric.of(half @ half.mT)
    return Metrics(found)


def reference_ridge(x: Tensor, y: Tensor, lam: float, blocks: int = 1) -> tuple[Tensor, Tensor]:
    """Weight and bias by float64 least squares (QR) on the centred raw rows, extended by the rows of the penalty.

    Args:
        blocks: how many blocks of equal width the features are, each penalised by its own mean sum of squares.
    """
    mean_x, mean_y = x.mean(0), y.mean(0)
    a, b = x - mean_x, y - mean_y
    unit = (a * a).sum(0).view(blocks, -1).mean(1).repeat_interleave(a.shape[1] // blocks)
    a = torch.cat([a, torch.diag((lam * unit).sqrt())])
    b = torch.cat([b, torch.zeros(x.shape[1], y.shape[1], dtype=b.dtype)])
    weight = torch.linalg.lstsq(a, b, driver="gelsd").solution
    return weight, mean_y - mean_x @ weight


def reference_map(
    x: Tensor,
    y: Tensor,
    lam: float,
    metric: Metric,
    local: bool = False,
    alpha: float = 0.0,
    rank: int | None = None,
    metric_rank: bool = False,
    blocks: int = 1,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one output straight from the definitions, on raw rows: least squares and an SVD.

    Args:
        local: each head reads its own columns of every block.
        alpha: each direction of the metric's eigenbasis is penalised by λ over its eigenvalue to this power.
        blocks: λ is relative to each of so many blocks (of equal width) by itself.
        rank: predictions keep so many directions, the largest ones (weighed by the metric if ``metric_rank``).
    """
    heads, dim = metric.matrix.shape[:2]
    weight = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
    everything = torch.arange(x.shape[1])
    for group in [[head] for head in range(heads)] if local else [list(range(heads))]:
        features = everything.view(-1, heads, dim)[:, group].flatten() if local else everything
        columns = torch.arange(heads * dim).view(heads, dim)[group].flatten()
        own, wanted = x[:, features], y[:, columns]
        matrix = torch.block_diag(*metric.matrix[group])
        if alpha:
            values, vectors = torch.linalg.eigh(matrix)
            each = [
                reference_ridge(own, (wanted @ vectors)[:, [j]], lam / float(values[j]) ** alpha, blocks)[0]
                for j in range(len(values))
            ]
            found = torch.cat(each, dim=1) @ vectors.T
        else:
            found = reference_ridge(own, wanted, lam, blocks)[0]
        if rank is not None:
            lower = torch.linalg.cholesky(matrix if metric_rank else torch.eye(len(matrix), dtype=torch.float64))
            predicted = (own - own.mean(0)) @ found @ lower
            kept = torch.linalg.svd(predicted, full_matrices=False)[2][:rank]
            found = found @ lower @ kept.T @ kept @ torch.linalg.inv(lower)
        weight[features[:, None], columns] = found
    return weight, y.mean(0) - x.mean(0) @ weight


def reference_r2(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
    """R² of one output from raw rows: per head, over its columns; then the mean of the heads."""
    squares = ((x @ weight + bias - y) ** 2).sum(0), ((y - y.mean(0)) ** 2).sum(0)
    residual, total = (s.view(heads, -1).sum(1) for s in squares)
    return (1 - residual / total).mean()


def reference_metric_r2(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, metric: Metric) -> Tensor:
    """The same in a metric: errors and deviations are weighed before they are summed."""
    heads = metric.matrix.shape[0]
    squares = []
    for part in (x @ weight + bias - y, y - y.mean(0)):
        by_head = part.unflatten(1, (heads, -1))
        squares.append(torch.einsum("thd,hde,the->h", by_head, metric.matrix, by_head))
    return (1 - squares[0] / squares[1]).mean()


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


def rounding(tokens: float) -> float:
    """What float32 products of so many tokens may be off by (docs/method.md), as a share of both columns' sizes."""
    return (min(tokens, TOKENS) + 5) * 2.0**-24


def off(found: Tensor, exact: Tensor) -> float:
    """The largest error of products of columns with each other, as a share of both columns' root sums of squares."""
    sizes = exact.diagonal().sqrt()
    return float(((found - exact).abs() / (sizes[:, None] * sizes)).max())


def assert_same(found: Moments, expected: Moments, tolerance: float = 1e-9) -> None:
    """The same answers, relative to the largest number of each."""
    assert found.count == expected.count
    ours, theirs = tensors_of(found), tensors_of(expected)
    for name in ours:
        assert relative_error(ours[name], theirs[name]) < tolerance, name
