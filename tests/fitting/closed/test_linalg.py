"""The solve behind every closed form: right where it can be, and loud instead of NaN where it can't."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvxfer.errors import KvxferError
from kvxfer.fitting.closed.linalg import Gram
from tests.samples import reference_ridge, relative_error


def solve_ridge(gram: Tensor, right: Tensor, lam: float) -> tuple[Tensor, float]:
    return Gram(gram).ridge(right, lam)


def problem(tokens: int = 300, features: int = 12, columns: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator, dtype=torch.float64)
    return x, torch.randn(tokens, columns, generator=generator, dtype=torch.float64) + x[:, :columns]


def centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = x - x.mean(0), y - y.mean(0)
    return a.T @ a, a.T @ b


@pytest.mark.parametrize("lam", [0.0, 1e-9, 1e-3, 1.0, 1e4])
def test_equals_least_squares(lam: float) -> None:
    x, y = problem()
    weight, used = solve_ridge(*centred(x, y), lam)
    assert used == lam
    assert relative_error(weight, reference_ridge(x, y, lam)[0]) < 1e-9


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_columns_of_very_different_scale(spread: float) -> None:
    x, y = problem()
    x = x * torch.logspace(0, float(torch.tensor(spread).log10()), x.shape[1], dtype=torch.float64)
    weight, used = solve_ridge(*centred(x, y), 1e-9)
    expected, _ = reference_ridge(x, y, 1e-9)
    assert used == 1e-9
    fitted, wanted = (x - x.mean(0)) @ weight, (x - x.mean(0)) @ expected
    assert relative_error(fitted, wanted) < 1e-6


def test_lam_is_relative_to_the_mean_diagonal() -> None:
    x, y = problem()
    gram, right = centred(x, y)
    assert torch.allclose(solve_ridge(gram * 1e6, right * 1e6, 0.1)[0], solve_ridge(gram, right, 0.1)[0], rtol=1e-10)


def singular(case: str) -> tuple[Tensor, Tensor]:
    """Raw rows whose Gram has no inverse."""
    x, y = problem(tokens=6 if case == "few tokens" else 300)
    if case == "duplicate":
        x[:, 5] = x[:, 2]
    elif case == "duplicate scaled":
        x[:, 5] = -3e4 * x[:, 2]
    elif case == "dependent":
        x[:, 6:] = x[:, :6] @ torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    elif case == "constant":
        x[:, 5] = 3.1
    elif case == "zero":
        x[:, 5] = 0
    elif case == "all constant":
        x[:] = 2.0
    return x, y


CASES = ["duplicate", "duplicate scaled", "dependent", "constant", "zero", "all constant", "few tokens"]


@pytest.mark.parametrize("case", CASES)
def test_a_singular_gram_gets_more_lam_and_says_so(case: str) -> None:
    x, y = singular(case)
    gram, right = centred(x, y)
    weight, used = solve_ridge(gram, right, 0.0)
    assert torch.isfinite(weight).all()
    assert used > 0
    assert float(weight.abs().max()) < 100
    # As good a fit as the pseudo-inverse's, and it survives float32.
    best, _ = reference_ridge(x, y, 0.0)
    a, b = x - x.mean(0), y - y.mean(0)
    wanted = float(((a @ best - b) ** 2).sum())
    found = float(((a.float() @ weight.float()).double() - b).square().sum())
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_singular_gram_under_a_penalty_is_plain_ridge(case: str) -> None:
    x, y = singular(case)
    weight, used = solve_ridge(*centred(x, y), 1e-2)
    assert used == 1e-2
    expected, _ = reference_ridge(x, y, 1e-2)
    assert torch.allclose(weight, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["gram", "right"])
def test_moments_that_are_not_finite_are_refused(value: float, place: str) -> None:
    gram, right = centred(*problem())
    (gram if place == "gram" else right)[0, 0] = value
    with pytest.raises(KvxferError, match="not finite"):
        solve_ridge(gram, right, 1e-3)


def test_an_indefinite_gram_is_recovered_or_refused_never_wrong() -> None:
    gram, right = centred(*problem())
    shifted = gram - torch.eye(12, dtype=torch.float64) * gram.diagonal().mean() * 1.2
    with pytest.raises(KvxferError, match=r"12 features stays indefinite.*corpus\.rows\.fit"):
        solve_ridge(shifted, right, 0.0)
    slightly = gram.clone()
    slightly[5], slightly[:, 5] = gram[2], gram[:, 2]
    slightly[5, 5] = gram[2, 2] * (1 - 1e-9)
    weight, used = solve_ridge(slightly, right, 0.0)
    assert used >= 1e-10
    assert torch.isfinite(weight).all()


def test_the_gram_is_left_as_it_was() -> None:
    gram, right = centred(*problem())
    before = gram.clone(), right.clone()
    solve_ridge(gram, right, 0.1)
    assert torch.equal(gram, before[0])
    assert torch.equal(right, before[1])
