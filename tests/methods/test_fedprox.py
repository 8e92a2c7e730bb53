"""FedProx against eq. (2) as printed, and against the path it must take without data."""

import math
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import batch_of
from torch import nn

from client_app.drift import squared_distance
from client_app.methods.fedprox import FedProx

SHAPES = [(3, 4), (4,), (2, 3, 2, 2), (1,)]  # unequal, so that mean and sum differ by array


def random_arrays(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]


def fedprox(mu, half=True, squared=True):
    return FedProx(mu=mu, half=half, squared=squared)


def batch_for(model, received):
    ctx = SimpleNamespace(model=model, received=received)
    return batch_of(ctx=ctx)


def small_network(seed):
    """With buffers: BatchNorm's running mean, variance, and an integer counter."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    network(3 * torch.randn(5, 3, dtype=torch.float64) + 1)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


def distance_as_printed(network, other):
    """||w - w_g||^2 entry by entry, over the parameters and nothing else."""
    total = 0.0
    for p, q in zip(network.parameters(), other.parameters(), strict=True):
        for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True):
            total += (a - b) ** 2
    return total


def test_distance_is_the_sum_of_all_squared_differences():
    w, w_g = random_arrays(1), random_arrays(2)
    total = 0.0
    for p, q in zip(w, w_g, strict=True):
        for a, b in zip(p.flatten().tolist(), q.flatten().tolist(), strict=True):
            total += (a - b) ** 2
    assert squared_distance(w, w_g).item() == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize(("half", "factor"), [(True, 0.5), (False, 1.0)])
def test_penalty_is_weighted_as_in_equation_2_or_without_the_half(half, factor):
    network, network_g = small_network(1), small_network(2)
    penalty = fedprox(mu=0.3, half=half).penalty(batch_for(network, network_g.state_dict()))
    expected = factor * 0.3 * distance_as_printed(network, network_g)
    assert penalty.item() == pytest.approx(expected, rel=1e-12)


def test_without_the_square_each_arrays_own_norm_counts():
    """FedIntR's code: (mu / 2) times the sum over arrays of their distances' 2-norms."""
    network, network_g = small_network(1), small_network(2)
    penalty = fedprox(mu=0.3, squared=False).penalty(batch_for(network, network_g.state_dict()))
    total = 0.0
    for p, q in zip(network.parameters(), network_g.parameters(), strict=True):
        drift = zip(p.flatten().tolist(), q.flatten().tolist(), strict=True)
        total += math.sqrt(sum((a - b) ** 2 for a, b in drift))
    assert penalty.item() == pytest.approx(0.15 * total, rel=1e-14)
    penalty.backward()
    for p, q in zip(network.parameters(), network_g.parameters(), strict=True):
        away = (p - q).detach()
        torch.testing.assert_close(p.grad, 0.15 * away / away.norm(), rtol=1e-12, atol=0)


def test_without_the_square_the_gradient_at_the_global_model_is_zero_and_not_nan():
    network = small_network(1)
    received = {name: array.clone() for name, array in network.state_dict().items()}
    fedprox(mu=0.3, squared=False).penalty(batch_for(network, received)).backward()
    assert all((p.grad == 0).all() for p in network.parameters())


@pytest.mark.parametrize(("half", "factor"), [(True, 1.0), (False, 2.0)])
def test_gradient_is_mu_times_the_drift(half, factor):
    network, network_g = small_network(1), small_network(2)
    fedprox(mu=0.3, half=half).penalty(batch_for(network, network_g.state_dict())).backward()
    for p, q in zip(network.parameters(), network_g.parameters(), strict=True):
        torch.testing.assert_close(p.grad, factor * 0.3 * (p - q).detach(), rtol=1e-12, atol=0)


def test_buffers_and_parameters_that_do_not_train_have_no_say():
    network, network_g = small_network(1), small_network(2)
    method = fedprox(mu=1.0, half=False)
    network[1].running_mean += 100
    network[1].num_batches_tracked += 100
    received = network_g.state_dict()
    with_all = method.penalty(batch_for(network, received))
    assert with_all.item() == pytest.approx(distance_as_printed(network, network_g), rel=1e-12)
    network[2].weight.requires_grad_(False)
    left_out = (network[2].weight - network_g[2].weight).square().sum().item()
    without = method.penalty(batch_for(network, received))
    assert without.item() == pytest.approx(with_all.item() - left_out, rel=1e-12)


def test_first_step_does_not_depend_on_mu():
    network = small_network(1)
    received = {name: array.clone() for name, array in network.state_dict().items()}
    penalty = fedprox(mu=10.0, half=True).penalty(batch_for(network, received))
    penalty.backward()
    assert penalty.item() == 0
    assert all((p.grad == 0).all() for p in network.parameters())  # NaN would not be equal


def test_without_data_sgd_shrinks_the_drift_by_one_minus_lr_mu_a_step():
    mu, lr, num_steps = 0.7, 0.1, 5
    network, network_g = small_network(1), small_network(2)
    start = [p.detach().clone() for p in network.parameters()]
    for _ in range(num_steps):
        network.zero_grad()
        fedprox(mu=mu, half=True).penalty(batch_for(network, network_g.state_dict())).backward()
        with torch.no_grad():
            for p in network.parameters():
                p -= lr * p.grad
    shrink = math.pow(1 - lr * mu, num_steps)
    for p, q, p_0 in zip(network.parameters(), network_g.parameters(), start, strict=True):
        torch.testing.assert_close((p - q).detach(), shrink * (p_0 - q).detach())


def test_the_global_arrays_get_no_gradient():
    w, w_g = random_arrays(1), random_arrays(2)
    for array in w + w_g:
        array.requires_grad_()
    squared_distance(w, w_g).backward()
    assert all(array.grad is None for array in w_g)
    assert all(array.grad is not None for array in w)


def test_the_gradient_of_the_distance_is_that_of_its_value():
    w, w_g = [a.requires_grad_() for a in random_arrays(1)], random_arrays(2)
    assert torch.autograd.gradcheck(lambda *a: 3 * squared_distance(list(a), w_g), w)
