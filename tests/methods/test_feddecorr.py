"""FedDecorr: the correlation matrix entry by entry."""

import math

import pytest
import torch
from client_fixtures import batch_of
from method_fixtures import random

from client_app.methods.feddecorr import FedDecorr, decorrelation


def decorrelation_in_loops(z, form):
    """From the correlation matrix, entry by entry."""
    rows = z.tolist()
    n, d = z.shape
    columns = [[row[j] for row in rows] for j in range(d)]
    means = [sum(column) / n for column in columns]

    def covariance(j, k):
        pairs = zip(columns[j], columns[k], strict=True)
        return sum((a - means[j]) * (b - means[k]) for a, b in pairs) / (n - 1)

    total = 0.0
    for j in range(d):
        for k in range(d):
            if form == "paper" or j != k:
                squares = (covariance(j, j) + 1e-8) * (covariance(k, k) + 1e-8)  # as the code
                corr = covariance(j, k) / math.sqrt(squares)
                total += corr**2
    return total / d**2 if form == "paper" else (n - 1) ** 2 / n * total / (d * (d - 1))


@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize(("n", "d"), [(2, 3), (5, 4), (9, 2)])
def test_feddecorr_is_the_formula_in_loops(form, n, d):
    z = 5 + random(n, d, seed=1)  # 5: centring must matter
    expected = decorrelation_in_loops(z, form)
    assert decorrelation(z, form).item() == pytest.approx(expected, rel=1e-9)
    moved = z * torch.tensor([3.0, -0.5, 7.0, 2.0])[:d] + torch.tensor([1.0, -4.0, 0.0, 9.0])[:d]
    assert decorrelation(moved, form).item() == pytest.approx(expected, rel=1e-4)


def test_feddecorrs_known_numbers():
    column = random(5, 1, seed=1)
    alike = torch.cat([column, -2 * column], dim=1)
    assert decorrelation(alike, "code").item() == pytest.approx(3.2, rel=1e-6)
    assert decorrelation(alike, "paper").item() == pytest.approx(1.0, rel=1e-6)
    apart = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]], dtype=torch.float64)
    assert decorrelation(apart, "code").item() == pytest.approx(0, abs=1e-12)
    assert decorrelation(apart, "paper").item() == pytest.approx(1 / 2, rel=1e-6)


@pytest.mark.parametrize("form", ["code", "paper"])
def test_feddecorrs_gradient_goes_through_mean_and_variance(form):
    z = random(4, 3, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: decorrelation(a, form), z)
    one = random(1, 3, seed=1).requires_grad_()
    loss = decorrelation(one, form)
    loss.backward()
    assert loss.item() == 0
    assert (one.grad == 0).all()
    dead = torch.cat([random(4, 2, seed=1), torch.zeros(4, 1, dtype=torch.float64)], dim=1)
    dead.requires_grad_()
    decorrelation(dead, form).backward()
    assert dead.grad.isfinite().all()


def test_feddecorrs_penalty_is_beta_times_that_of_the_classifiers_input():
    z = random(5, 3, seed=1)
    method = FedDecorr(beta=0.3, form="code")
    expected = 0.3 * decorrelation_in_loops(z, "code")
    assert method.penalty(batch_of([z])).item() == pytest.approx(expected, rel=1e-9)
    assert method.layers(None) == ["features"]
