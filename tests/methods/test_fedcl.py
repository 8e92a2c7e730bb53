"""FedCL: its repulsion in loops and known numbers."""

import math

import pytest
import torch
from client_fixtures import batch_of
from method_fixtures import LEVELS, random, trains_as_fedavg, unit

from client_app.methods.fedcl import FedCL, repulsion
from client_app.similarity import unit_features


def repulsion_in_loops(phi, tau, negatives):
    rows = phi.tolist()
    total = 0.0
    for i, a in enumerate(rows):
        s = [sum(p * q for p, q in zip(a, b, strict=True)) for j, b in enumerate(rows) if j != i]
        s = sorted(s)[-2:] if negatives == "hard" else s
        one = math.exp(1 / tau)
        total -= math.log(one / (one + sum(math.exp(v / tau) for v in s)))
    return total / len(rows)


@pytest.mark.parametrize("negatives", ["hard", "all"])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_fedcl_is_the_formula_in_loops(negatives, size):
    phi = unit(random(size, 3, seed=1))
    expected = repulsion_in_loops(phi, 0.3, negatives)
    assert repulsion(phi, 0.3, negatives).item() == pytest.approx(expected, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(("negatives", "value"), [("hard", math.log(3)), ("all", math.log(6))])
def test_fedcls_known_numbers(negatives, value):
    rep = random(1, 4, seed=1).expand(6, 4)
    assert repulsion(unit_features(rep), 0.05, negatives).item() == pytest.approx(value, rel=1e-9)
    apart = torch.eye(6, dtype=torch.float64)
    assert 0 <= repulsion(apart, 0.05, "hard").item() < 1e-8


def test_fedcl_pushes_apart_and_its_positive_pulls_nothing():
    phi = unit(random(4, 3, seed=1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: repulsion(p, 0.5, "all"), phi)
    loss = repulsion(phi, 0.5, "all")
    (gradient,) = torch.autograd.grad(loss, phi)
    moved = unit(phi.detach() - 0.05 * gradient)
    off = ~torch.eye(4, dtype=torch.bool)
    assert (moved @ moved.T)[off].sum() < (phi @ phi.T)[off].sum()
    one = unit(random(1, 3, seed=1)).requires_grad_()
    repulsion(one, 0.5, "hard").backward()
    assert (one.grad == 0).all()


def test_fedcl_means_over_levels_and_reads_no_label():
    outputs = [random(5, 3, 2, 2, seed=1), random(5, 4, seed=2)]
    method = FedCL(tau=0.3, negatives="hard", **LEVELS)
    expected = sum(
        repulsion_in_loops(unit(t), 0.3, "hard") for t in (outputs[0].mean((2, 3)), outputs[1])
    )
    assert method.penalty(batch_of(method.represent(None, outputs))).item() == pytest.approx(
        expected / 2
    )


def test_it_is_not_fedavg():
    assert not trains_as_fedavg("fedcl")
