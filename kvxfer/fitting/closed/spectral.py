"""R² on another split for a whole path of λ, from one eigendecomposition and no weights.

With A the fit Gram, C its products with the outputs, and V, E as in ``Gram.eigen``, the weight at λ is ``V D P`` with
``P = V'C`` and ``D = diag(1 / (E + lam * unit))``, and the bias makes the fit's mean error zero. The other split's
residual is therefore made of its second moments about the fit's means, A* = Av + count g g' (g the difference of the
means) and likewise C* and total*. Summed over the columns of a head it is

    total* - 2 d'l + d' (B ∘ S) d,    l = rows of P ∘ V'C* summed,  B = V'A*V,  S = P P'

where d is the diagonal of D: once S is there, a λ costs features² for a head in place of features² for a column.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from kvxfer.fitting.closed.linalg import Gram
from kvxfer.fitting.closed.r2 import HeldOut

_EIGEN, _CHOLESKY = 18.0, 1.5
"""Costs of an eigendecomposition and of a factorisation in features³ multiplications of a matrix product.

Measured in float64 on two cores, where matrix products ran at 190 GFLOP/s: 0.04, 0.28 and 1.9 s, and 0.003, 0.015 and
0.09 s (``Gram.ridge``'s own), for 768, 1,536 and 3,072 features: a ratio of 13 to 22, of which scoring the weights of a
λ takes some back.
"""

_COLUMNS = 2048
"""Output columns at a time."""

_ROWS = 128
"""Rows of S at a time."""

_TILE = 1 << 20
"""Numbers of S at a time (8 MiB): few enough to stay near the cores."""


def is_cheaper(features: int, outputs: int, columns: int, heads: int, lams: int) -> bool:
    """Whether scoring a path of ``lams`` this way, then solving at the best, takes less than a factorisation per λ.

    ``outputs`` share the ``features`` of the design; ``columns`` and ``heads`` are those of all of them.
    """
    n, c = float(features), float(columns)
    each = _CHOLESKY * n**3 + 4 * n**2 * c  # factor, solve, multiply by the other split's Gram
    # the best λ (which may differ by output), then eigenvectors, B, P and V'C*, half of S, its products with every d
    last = min(lams, outputs) * _CHOLESKY * n**3 + 2 * n**2 * c
    path = (_EIGEN + 4) * n**3 + 5 * n**2 * c + n**2 * heads * lams + last
    return lams > 1 and path < lams * each


def path_residuals(
    gram: Gram, fit: HeldOut, other: HeldOut, lams: Float[Tensor, " lams"]
) -> Float[Tensor, "lams outputs heads"]:
    """Sum over the other split's tokens of the squared error of ridge at every λ, per output and head.

    Args:
        gram: that of ``fit``.
        fit: the design on the split that is fitted.
        other: the same design and outputs on the split to score on.
    """
    values, vectors = gram.eigen
    inverse = 1 / (values[:, None] + lams * gram.unit)
    step, offset = other.mean_x - fit.mean_x, other.mean_y - fit.mean_y
    seen = step @ vectors
    b = vectors.T @ other.gram @ vectors
    b.addr_(seen, seen, alpha=other.count)
    outputs, heads, dim = other.shape
    residual = (other.total + other.count * offset**2).view(outputs, heads, dim).sum(-1).expand(len(lams), -1, -1)
    residual = residual.clone()
    size = max(1, _COLUMNS // (heads * dim))
    for start in range(0, outputs, size):
        columns = slice(start * heads * dim, (start + size) * heads * dim)
        p = vectors.T @ fit.cross[:, columns]
        linear = vectors.T @ other.cross[:, columns]
        linear.addr_(seen, offset[columns], alpha=other.count)
        linear = linear.mul_(p).view(len(p), -1, dim).sum(-1)
        explained = 2 * inverse.T @ linear - _quadratic(p.view(len(p), -1, dim), b, inverse)
        residual[:, start : start + size] -= explained.view(len(lams), -1, heads)
    return residual


def _quadratic(
    p: Float[Tensor, "features heads dim"], b: Float[Tensor, "features features"], d: Float[Tensor, "features lams"]
) -> Float[Tensor, "lams heads"]:
    """``d' (B ∘ P P') d`` of every head and λ, by rows of the upper triangle: B and P P' are symmetric."""
    features, heads, _ = p.shape
    by_head = p.transpose(0, 1).contiguous()
    total = d.new_zeros(d.shape[1], heads)
    rows = min(features, _ROWS)
    group = max(1, _TILE // (rows * features))
    for top in range(0, features, rows):
        own = slice(top, top + rows)
        weight = b[own, top:].clone()
        weight[:, len(weight) :] *= 2
        for first in range(0, heads, group):
            some = by_head[first : first + group]
            tile = (some[:, own] @ some[:, top:].mT).mul_(weight)
            total[:, first : first + group] += ((tile @ d[top:]) * d[own]).sum(1).T
    return total
