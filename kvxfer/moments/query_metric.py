"""Output metrics: which errors of a key or value matter to the target's attention.

A key error e at distance δ from a query q changes the score by q' R(-δ) e, so its mean square is e' R(δ) C R(-δ) e with
C = E[qq'], the queries' second moment. The metric of keys averages that full matrix over log-spaced distances, C pooled
over the query heads that share a KV head. Centred, C is their covariance, as if their mean changed no score (what
either is worth: docs/method.md). A value error passes the output projection: its metric is the Gram of those heads'
slices of W_O.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.maps.blocks import Output
from kvxfer.models import rope
from kvxfer.moments.tensors import read_tensors

if TYPE_CHECKING:
    from kvxfer.models.pair import Pair

METRICS = "metrics.safetensors"
SHRINKAGE = 0.05
"""Share of the identity in every metric: no direction is ever free, and none rules alone."""

_OFFSETS = 256


@dataclass(frozen=True)
class Metric:
    """One output's metric: per head a positive definite matrix of mean eigenvalue 1, with its eigendecomposition."""

    matrix: Float[Tensor, "heads dim dim"]

    @cached_property
    def eigen(self) -> tuple[Float[Tensor, "heads dim"], Float[Tensor, "heads dim dim"]]:
        """Eigenvalues (ascending) and eigenvectors in columns."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return values, vectors

    @cached_property
    def roots(self) -> tuple[Float[Tensor, "heads dim dim"], Float[Tensor, "heads dim dim"]]:
        """The symmetric square root and its inverse."""
        values, vectors = self.eigen
        return (vectors * values.sqrt()[:, None]) @ vectors.mT, (vectors * values.rsqrt()[:, None]) @ vectors.mT

    @staticmethod
    def of(raw: Float[Tensor, "heads dim dim"]) -> Metric:
        """A raw second moment, symmetrised, shrunk towards the identity and scaled."""
        raw = ((raw + raw.mT) / 2).double()
        unit = raw.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp_min(torch.finfo(torch.float64).tiny)
        eye = torch.eye(raw.shape[-1], dtype=torch.float64)
        return Metric((1 - SHRINKAGE) * raw / unit + SHRINKAGE * eye)


@dataclass(frozen=True)
class Metrics:
    """The metric of every target layer's keys and values."""

    by_output: dict[Output, Metric]

    @staticmethod
    def load(path: Path, centred: bool = True) -> Metrics:
        """The metrics of a calibration's raw statistics; ``centred`` leaves the queries' mean out of those of keys."""
        if not path.is_file():
            raise KvxferError(f"{path} is missing: this calibration kept no metrics; set calibration.metrics=true")
        raw = read_tensors(path)
        queries = QueryMoments(*raw["sum"].shape)
        vars(queries).update({name: raw[name] for name in vars(queries)})
        found = {}
        for layer, values in enumerate(raw["values"]):
            moment = queries.covariance(layer) if centred else queries.second_moment(layer)
            averaged = average_over_distances(moment, raw["cos"], raw["sin"])
            found[layer, "keys"], found[layer, "values"] = Metric.of(averaged), Metric.of(values)
        return Metrics(found)


def save_metrics(path: Path, pair: Pair, queries: QueryMoments, longest: int) -> None:
    """Store what metrics are made of: the queries' moments, cos and sin of distances, and Grams of W_O.

    Args:
        longest: the largest distance between a query and a key, in tokens.
    """
    cos, sin = pair.target.cos_sin(longest + 1)
    at = torch.tensor(distances(longest))
    # Attention scaling multiplies queries and keys, so it enters a score twice.
    scaling = pair.target.geometry.rotary.scaling**2
    angles = {"cos": cos.cpu()[at] * scaling, "sin": sin.cpu()[at] * scaling}
    save_file({**vars(queries), **angles, "values": pair.target.output_grams().cpu()}, path)


def merge_metrics(shares: list[Path], path: Path) -> None:
    """Add up the queries' moments of several shares of the rows."""
    parts = [read_tensors(share) for share in shares]
    added = {name: torch.stack([part[name] for part in parts]).sum(0) for name in ("count", "sum", "square")}
    save_file({**parts[0], **added}, path)


def average_over_distances(
    moment: Float[Tensor, "heads dim dim"],
    cos: Float[Tensor, "distances rotary_dim"],
    sin: Float[Tensor, "distances rotary_dim"],
) -> Float[Tensor, "heads dim dim"]:
    """The mean of R(δ) C R(-δ) over the distances whose cos and sin are given."""
    heads, dim = moment.shape[0], moment.shape[-1]
    total = torch.zeros_like(moment, dtype=torch.float64)
    for c, s in zip(cos, sin, strict=True):
        angles = (c.expand(dim, -1), s.expand(dim, -1))
        rows = rope.restore(moment.float().view(1, heads, dim, dim), *angles)
        total += rope.restore(rows.mT.contiguous(), *angles)[0].mT.double()
    return total / len(cos)


def distances(longest: int) -> list[int]:
    """Log-spaced distances from 1 to ``longest``, each once."""
    spaced = torch.logspace(0, torch.tensor(float(max(longest, 1))).log10().item(), _OFFSETS).round().int()
    return sorted(set(spaced.tolist()))


class QueryMoments:
    """First and second moments of a target's content queries, pooled over the query heads of each KV head.

    Its attributes are tensors, and are its state.
    """

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        self.count = torch.zeros(1, dtype=torch.float64)
        self.sum = torch.zeros(layers, heads, dim, dtype=torch.float64)
        self.square = torch.zeros(layers, heads, dim, dim, dtype=torch.float64)

    def update(self, queries: Iterable[Float[Tensor, "batch tokens query_heads dim"]]) -> None:
        """Add every layer's content queries of some tokens, the same number of each.

        Products are taken in the queries' dtype, about the mean of these tokens, so that a large mean costs no digits.
        """
        heads, count = self.sum.shape[1], 0
        for layer, tensor in enumerate(queries):
            grouped = tensor.unflatten(2, (heads, -1)).permute(2, 0, 1, 3, 4).flatten(1, 3)
            if not (count := grouped.shape[1]):  # a batch whose rows were all left out has no mean
                return
            pilot = grouped.mean(1, keepdim=True)
            centred = grouped - pilot
            first, second = centred.sum(1).cpu().double(), (centred.mT @ centred).cpu().double()
            mean = pilot[:, 0].cpu().double()
            self.sum[layer] += first + count * mean
            cross = first[..., :, None] * mean[..., None, :]
            self.square[layer] += second + cross + cross.mT + count * mean[..., :, None] * mean[..., None, :]
        self.count += count

    def second_moment(self, layer: int) -> Float[Tensor, "heads dim dim"]:
        """E[qq']."""
        return self.square[layer] / self.count

    def covariance(self, layer: int) -> Float[Tensor, "heads dim dim"]:
        """E[qq'] less the mean's part."""
        mean = self.sum[layer] / self.count
        return self.second_moment(layer) - mean[..., :, None] * mean[..., None, :]
