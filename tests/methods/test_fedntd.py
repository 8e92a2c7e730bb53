"""FedNTD: the not-true divergence in loops and float64."""

import math

import pytest
import torch
from client_fixtures import batch_of, make_config
from method_fixtures import cross_entropy, kl, labels, random, softmax, trains_as_fedavg

from client_app.methods import method_of
from client_app.methods.fedntd import FedNTD, not_true_divergence


def ntd_in_loops(z, z_g, y, tau):
    """Mean over the batch of KL(q_g || q_l), the true class's entry left out of both."""
    total = 0.0
    for row, row_g, label in zip(z.tolist(), z_g.tolist(), y.tolist(), strict=True):
        local, of_global = (
            softmax([v / tau for c, v in enumerate(r) if c != label]) for r in (row, row_g)
        )
        total += kl(of_global, local)
    return total / len(y)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_fedntds_divergence_is_the_formula_in_loops(tau):
    z, z_g, y = random(6, 5, seed=1, scale=2), random(6, 5, seed=2, scale=2), labels(6, 5)
    expected = ntd_in_loops(z, z_g, y, tau)
    assert not_true_divergence(z, z_g, y, tau).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("convex", "tau"), [(True, 3.0), (True, 1.0), (False, 3.0)])
def test_a_temperature_that_the_convex_form_ignores_is_warned_of(convex, tau):
    config = make_config(method="fedntd", fedntd__convex=convex, fedntd__beta=0.3, fedntd__tau=tau)
    warning = method_of(config).warning(config, {"a": 10})
    expected = "fedntd.tau = 3.0 has no effect: with fedntd.convex = true tau is 1"
    assert warning == (expected if convex and tau != 1 else "")


def test_fedntds_known_number():
    z, z_g = torch.tensor([[5.0, 0, 0]]), torch.tensor([[-3.0, math.log(3), 0]])
    got = not_true_divergence(z, z_g, torch.tensor([0]), 1.0).item()
    assert got == pytest.approx(0.130812, abs=5e-7)
    assert got == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-6)


def test_fedntd_knows_no_true_class_and_nothing_of_two_classes():
    z, z_g, y = random(4, 3, seed=1), random(4, 3, seed=2), labels(4, 3)
    rows = torch.arange(4)
    moved, moved_g = z.clone(), z_g.clone()
    moved[rows, y] += 3.7
    moved_g[rows, y] -= 2.1
    before = not_true_divergence(z, z_g, y, 1.0)
    assert not_true_divergence(moved, moved_g, y, 1.0).item() == pytest.approx(before.item())
    two = not_true_divergence(z[:, :2], z_g[:, :2], labels(4, 2), 1.0)
    assert two.item() == pytest.approx(0, abs=1e-15)


def test_fedntd_at_the_global_logits_is_zero_with_gradient_zero():
    z, y = random(4, 5, seed=1).requires_grad_(), labels(4, 5)
    z_g = z.detach().clone().requires_grad_()
    loss = not_true_divergence(z, z_g, y, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-14)
    assert z.grad.abs().max() < 1e-14
    assert z_g.grad is None
    assert torch.autograd.gradcheck(
        lambda a: not_true_divergence(a, random(4, 5, seed=2), y, 2.0), z
    )


@pytest.mark.parametrize("convex", [False, True])
def test_fedntds_two_forms(convex):
    method = FedNTD(beta=0.3, tau=2.0, convex=convex)
    z, z_g, y = random(4, 5, seed=1), random(4, 5, seed=2), labels(4, 5)
    batch = batch_of([z], [z_g], y=y, logits=z)
    ce = cross_entropy(z, y)
    if convex:  # (1 - beta) CE + beta KL with tau 1, no tau^2
        expected = 0.7 * ce, 0.3 * ntd_in_loops(z, z_g, y, 1.0)
    else:
        expected = ce, 0.3 * 4 * ntd_in_loops(z, z_g, y, 2.0)
    got = method.supervised(batch).item(), method.penalty(batch).item()
    assert got == pytest.approx(expected, rel=1e-11)
    assert method.layers(None) == ["logits"]


def test_without_its_term_the_convex_form_is_fedavg():
    assert trains_as_fedavg("fedntd", fedntd__beta=0.0, fedntd__convex=True)
