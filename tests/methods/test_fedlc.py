"""FedLC: its margins in loops and known numbers."""

import math
from types import SimpleNamespace

import pytest
import torch
from client_fixtures import batch_of, differ, initial, make_config, make_round, train
from method_fixtures import cross_entropy, labels, random

from client_app.methods import method_of
from client_app.methods.fedlc import FedLC, loss_without_true_class, margins
from client_app.objective import is_at_limit


def fedlc(**options):
    return FedLC(**({"tau": 1.0, "exclude_true": False} | options))


def loss_of(method, logits, y, counts):
    prepared = method.begin_round(SimpleNamespace(label_counts=torch.tensor(counts)))
    return method.supervised(batch_of(y=y, logits=logits, prepared=prepared))


@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("exclude", [False, True])
def test_fedlc_is_the_formula_in_loops(tau, exclude):
    z, counts = random(6, 4, seed=1, scale=2), [1, 16, 500, 3]
    y = torch.tensor([0, 1, 2, 3, 1, 0])
    total = 0.0
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        a = [v - tau * n ** (-1 / 4) for v, n in zip(row, counts, strict=True)]
        others = [math.exp(v) for c, v in enumerate(a) if not (exclude and c == label)]
        total += math.log(sum(others)) - a[label]
    got = loss_of(fedlc(tau=tau, exclude_true=exclude), z, y, counts)
    assert got.item() == pytest.approx(total / 6, rel=1e-6)  # it works in float32


@pytest.mark.parametrize(
    ("label", "exclude", "value"), [(0, False, 0.779949), (1, False, 0.613282), (0, True, 1 / 6)]
)
def test_fedlcs_known_numbers(label, exclude, value):
    method = fedlc(exclude_true=exclude)
    got = loss_of(method, torch.zeros(3, 2), torch.full((3,), label), [16, 81])
    assert got.item() == pytest.approx(value, abs=5e-7)


def test_fedlc_leaves_an_absent_class_out_and_gives_it_no_gradient():
    z = random(5, 4, seed=1).float().requires_grad_()
    y, counts = torch.tensor([0, 1, 3, 3, 0]), [5, 2, 0, 40]
    loss = loss_of(fedlc(), z, y, counts)
    loss.backward()
    assert (z.grad[:, 2] == 0).all()
    assert z.grad.isfinite().all()
    present = [0, 1, 3]
    without = loss_of(fedlc(), z.detach()[:, present], torch.tensor([0, 1, 2, 2, 0]), [5, 2, 40])
    assert loss.item() == pytest.approx(without.item(), rel=1e-6)
    assert margins(torch.tensor(counts), 1.0)[2] == torch.inf


def test_fedlc_without_tau_or_with_equal_counts_is_cross_entropy():
    z, y = random(5, 3, seed=2), labels(5, 3)
    expected = cross_entropy(z, y)
    assert loss_of(fedlc(tau=0.0), z, y, [1, 9, 0]).item() == pytest.approx(expected, rel=1e-12)
    assert loss_of(fedlc(), z, y, [7, 7, 7]).item() == pytest.approx(expected, rel=1e-6)


def test_without_tau_the_papers_loss_is_still_not_fedavgs():
    found = {}
    for exclude in (False, True):
        config = make_config(method="fedlc", fedlc__tau=0.0, fedlc__exclude_true=exclude)
        received = initial(config, seed=5)
        same = not differ(
            train(config, received=received).arrays, train(make_config(), received=received).arrays
        )
        found[exclude] = (same, is_at_limit(method_of(config)))
    assert found == {False: (True, True), True: (False, False)}


def test_fedlcs_rarer_class_has_the_larger_margin():
    of_rare, of_frequent = margins(torch.tensor([2, 200]), 1.0)
    assert of_rare > of_frequent > 0


def test_fedlc_reads_the_clients_own_training_counts():
    now = make_round(make_config(method="fedlc", partition="classes", classes_per_client=2))
    own = [now.train_samples.labels.tolist().count(c) for c in range(3)]
    assert now.label_counts.tolist() == own
    assert 0 in own


def test_the_papers_fedlc_has_no_true_class_in_its_gradient_of_the_sum():
    assert torch.autograd.gradcheck(
        lambda a: loss_without_true_class(a, torch.tensor([0, 2])),
        random(2, 3, seed=1).requires_grad_(),
    )
