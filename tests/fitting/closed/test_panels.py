"""The panel-wise factorisation and product behind every ridge, against the plain ones."""

from __future__ import annotations

import pytest
import torch

from kvxfer.fitting.closed.linalg import _PANEL, Gram, half_product


def gram_of(features: int, rank: int | None = None) -> torch.Tensor:
    x = torch.randn(2 * features, rank or features, generator=torch.Generator().manual_seed(features)).double()
    if rank is not None:
        x = x @ torch.randn(rank, features, generator=torch.Generator().manual_seed(1)).double()
    return x.T @ x


@pytest.mark.parametrize("features", [1, 7, _PANEL - 1, _PANEL, _PANEL + 1, 2 * _PANEL, 2 * _PANEL + 5])
@pytest.mark.parametrize("lam", [0.0, 1e-3])
def test_ridge_solves_what_a_plain_solve_does(features: int, lam: float) -> None:
    matrix, right = gram_of(features), torch.randn(features, 3).double()
    gram = Gram(matrix)
    found, used = gram.ridge(right, lam)
    penalised = matrix + lam * gram.unit * torch.eye(features).double()
    assert used == lam
    assert torch.allclose(penalised @ found, right, rtol=1e-8, atol=1e-8)
    again, _ = gram.ridge(right, 1.0)
    assert torch.allclose(found, gram.ridge(right, lam)[0], rtol=0, atol=0), "the factor in between is used no more"
    assert not torch.allclose(again, found)


def test_a_singular_matrix_has_its_penalty_raised_where_only_a_later_panel_shows_it() -> None:
    gram = Gram(gram_of(2 * _PANEL, rank=_PANEL + 20))
    right = gram.matrix[:, :2]
    solution, used = gram.ridge(right, 0.0)
    assert used > 0
    penalised = gram.matrix + used * gram.unit * torch.eye(2 * _PANEL).double()
    assert torch.allclose(penalised @ solution, right, rtol=0, atol=1e-8 * float(right.abs().max()))


@pytest.mark.parametrize("features", [3, _PANEL, _PANEL + 7])
def test_half_a_product_is_enough_for_a_quadratic_form(features: int) -> None:
    matrix, right = gram_of(features), torch.randn(features, 4).double()
    half = right.T @ half_product(matrix, right)
    assert torch.allclose(half + half.T, right.T @ matrix @ right, rtol=1e-10)
