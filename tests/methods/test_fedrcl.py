"""FedRCL against eq. (5) as printed, in loops, for both kinds of mining, levels and edge cases."""

import dataclasses
import math

import pytest
import torch
from client_fixtures import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from method_fixtures import random
from printed_formulas import cosine

from client_app.methods.fedrcl import MINING, FedRCL, rcl_all, rcl_hard
from client_app.methods.fedscl import FedSCL
from client_app.similarity import unit_features
from models import build_model


def penalty_of(method, outputs, y):
    """The penalty of a batch with these outputs of the levels."""
    return method.penalty(batch_of(method.represent(None, outputs), y=y))


def fedrcl(**options):
    defaults = {"tau": 0.05, "threshold": 0.7, "beta": 1.0, "mining": "all", "levels": "all"}
    return FedRCL(**(defaults | {"pre_activation": True} | options))


def similarities(features):
    rows = features.tolist()
    return [[cosine(a, b) for b in rows] for a in rows]


def all_as_printed(features, y, tau, threshold, beta):
    """Eq. (5) without beta/tau; a mean over positives j, then over anchors that have one."""
    s, size = similarities(features), len(y)
    anchors = []
    for i in range(size):
        same = [j for j in range(size) if j != i and y[j] == y[i]]
        terms = []
        for j in same:
            others = sum(math.exp(s[i][k] / tau) for k in range(size) if k != i)
            too_alike = [k for k in same if s[i][k] > threshold]  # P(x_i)
            term = -math.log(math.exp(s[i][j] / tau) / others)
            penalty = sum(math.exp(s[i][k] / tau) for k in too_alike) + math.exp(1 / tau)
            terms.append(term + beta * (math.log(penalty) - 1 / tau))
        if terms:
            anchors.append(sum(terms) / len(terms))
    return sum(anchors) / len(anchors) if anchors else 0.0


def hard_as_described(features, y, tau, threshold, beta):
    """As in the authors' code: without a positive, similarity 1 to self, and no penalty."""
    s, size = similarities(features), len(y)
    anchors = []
    for i in range(size):
        positives = [s[i][j] for j in range(size) if j != i and y[j] == y[i]]
        s_p = min(positives, default=1.0)
        s_n = sorted(s[i][k] for k in range(size) if y[k] != y[i])[-2:]
        others = math.exp(s_p / tau) + sum(math.exp(n / tau) for n in s_n)
        is_penalised = bool(positives) and s_p > threshold
        penalty = math.exp(1 / tau) + (math.exp(s_p / tau) if is_penalised else 0.0)
        anchors.append(
            -math.log(math.exp(s_p / tau) / others) + beta * (math.log(penalty) - 1 / tau)
        )
    return sum(anchors) / size


AS_PRINTED = {"all": (rcl_all, all_as_printed), "hard": (rcl_hard, hard_as_described)}


def test_where_all_features_are_one_the_hard_mined_loss_is_log_3_plus_beta_log_2():
    """The collapse, in which no direction lowers the loss to first order."""
    features = torch.ones(6, 4, dtype=torch.float64).requires_grad_()
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    loss = rcl_hard(unit_features(features), y, 0.05, 0.7, 1.5)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(3) + 1.5 * math.log(2), rel=1e-9)
    assert features.grad.abs().max() < 1e-12


LABELS = {
    "unequal classes, one alone": [0, 1, 0, 2, 1, 0, 0],
    "two samples of a class": [3, 3],
    "one class": [1, 1, 1, 1],
    "one class and one other": [1, 1, 1, 0],
    "nobody has a positive": [0, 1, 2, 3],
    "one sample": [5],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("threshold", [-0.3, 0.2, 0.7])  # most, some and few positives above it
@pytest.mark.parametrize("beta", [0.0, 1.7])
@pytest.mark.parametrize("mining", AS_PRINTED)
def test_loss_equals_the_formula_in_loops(mining, beta, threshold, labels):
    rcl, as_printed = AS_PRINTED[mining]
    features, y = random(len(labels), 3, seed=1), torch.tensor(labels)
    expected = as_printed(features, labels, 0.2, threshold, beta)
    got = rcl(unit_features(features), y, 0.2, threshold, beta).item()
    assert got == pytest.approx(expected, rel=1e-11, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    seed=st.integers(0, 1000),
    mining=st.sampled_from(list(AS_PRINTED)),
)
def test_loss_equals_the_formula_for_any_labels(labels, seed, mining):
    rcl, as_printed = AS_PRINTED[mining]
    features, y = random(len(labels), 3, seed=seed), torch.tensor(labels)
    expected = as_printed(features, labels, 0.05, 0.7, 1.0)
    got = rcl(unit_features(features), y, 0.05, 0.7, 1.0).item()
    assert got == pytest.approx(expected, rel=1e-11, abs=1e-12)


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("mining", AS_PRINTED)
def test_gradient_is_that_of_the_loss(mining, labels):
    y = torch.tensor(labels)
    rcl, _ = AS_PRINTED[mining]
    rep = random(len(labels), 3, 2, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: rcl(unit_features(t), y, 0.3, 0.1, 1.0), rep)


@pytest.mark.parametrize("labels", [[0, 1, 2], [4]])
def test_a_batch_without_any_positive_contributes_nothing(labels):
    rep = random(len(labels), 4, seed=1).requires_grad_()
    penalty = penalty_of(fedrcl(), [rep, rep], torch.tensor(labels))
    penalty.backward()
    assert penalty.item() == 0
    assert (rep.grad == 0).all()  # NaN would not be equal


def test_with_hard_mining_an_anchor_alone_in_its_class_is_pushed_from_its_neighbours():
    y = torch.tensor([0, 1])
    rep = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64, requires_grad=True)
    penalty = penalty_of(fedrcl(mining="hard", tau=0.5, beta=0.0), [rep], y)
    assert penalty.item() == pytest.approx(math.log(1 + math.exp((0.6 - 1) / 0.5)), rel=1e-12)
    penalty.backward()
    moved = (rep - 0.01 * rep.grad).detach()
    assert cosine(*moved.tolist()) < 0.6


@pytest.mark.parametrize(("mining", "expected"), [("all", math.log(6 - 1)), ("hard", math.log(3))])
def test_identical_features_of_fedscl(mining, expected):
    rep = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 0, 0, 1, 1, 1])
    penalty = penalty_of(fedrcl(mining=mining, beta=0.0), [rep], y)
    penalty.backward()
    assert penalty.item() == pytest.approx(expected, rel=1e-12)
    assert rep.grad.abs().max() < 1e-12


@pytest.mark.parametrize("mining", AS_PRINTED)
def test_a_pair_exactly_at_the_threshold_is_not_too_alike(mining):
    phi, y = torch.eye(2, dtype=torch.float64), torch.tensor([0, 0])  # s = 0
    rcl, _ = AS_PRINTED[mining]
    plain = rcl(phi, y, 0.5, 0.0, 0.0).item()
    at = rcl(phi, y, 0.5, 0.0, 1.0).item() - plain
    below = rcl(phi, y, 0.5, -0.01, 1.0).item() - plain
    assert at == pytest.approx(0, abs=1e-12)  # log(e^{1/tau}) - 1/tau
    assert below == pytest.approx(math.log(1 + math.exp(2)) - 2, rel=1e-12)


@pytest.mark.parametrize("mining", AS_PRINTED)
def test_the_penalty_pushes_apart_only_what_is_more_alike_than_the_threshold(mining):
    y = torch.tensor([0, 0])  # eq. (5) of two samples: the contrast is 0 and the penalty alone acts

    def step(threshold):
        rep = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64, requires_grad=True)
        penalty_of(fedrcl(mining=mining, threshold=threshold), [rep], y).backward()
        return cosine(*(rep - 0.01 * rep.grad).tolist())

    assert step(threshold=0.7) == pytest.approx(0.6, rel=1e-12)
    assert step(threshold=0.5) < 0.6 - 1e-6


@pytest.mark.parametrize("mining", AS_PRINTED)
def test_the_papers_temperature_does_not_overflow_in_single_precision(mining):
    rep = random(8, 4, seed=1).float().requires_grad_()
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3])
    penalty = penalty_of(fedrcl(mining=mining, tau=0.005), [rep], y)  # e^200
    penalty.backward()
    assert penalty.isfinite()
    assert rep.grad.isfinite().all()


@pytest.mark.parametrize("mining", AS_PRINTED)
def test_penalty_is_the_mean_over_levels_of_pooled_features_of_length_one(mining):
    outputs = [random(6, 3, 2, 4, seed=1), 5 * random(6, 7, seed=2)]
    labels = [0, 1, 0, 1, 1, 2]
    pooled = torch.tensor(
        [[sum(c.flatten().tolist()) / 8 for c in sample] for sample in outputs[0]],
        dtype=torch.float64,
    )
    _, as_printed = AS_PRINTED[mining]
    levels = [as_printed(features, labels, 0.05, 0.3, 2.0) for features in (pooled, outputs[1])]
    method = fedrcl(mining=mining, threshold=0.3, beta=2.0)
    penalty = penalty_of(method, outputs, torch.tensor(labels))
    assert penalty.item() == pytest.approx(sum(levels) / 2, rel=1e-11)


@pytest.mark.parametrize("mining", AS_PRINTED)
def test_a_sample_whose_units_are_all_dead_gives_nothing(mining):
    rep = random(5, 3, seed=1)
    rep[2] = 0
    rep.requires_grad_()
    y = torch.tensor([0, 0, 0, 1, 1])
    penalty = penalty_of(fedrcl(mining=mining), [rep], y)
    penalty.backward()
    assert penalty.isfinite()
    assert rep.grad.isfinite().all()
    assert (rep.grad[2] == 0).all()
    assert (rep.grad[0] != 0).any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["conv1:pre", "conv2:pre", "fc1:pre", "fc2:pre", "fc3:pre", "fc4:pre"]),
        ({"pre_activation": False}, ["conv1", "conv2", "fc1", "fc2", "fc3", "fc4"]),
        ({"levels": "last"}, ["fc4:pre"]),
        ({"levels": "last", "pre_activation": False}, ["fc4"]),
    ],
)
def test_levels_are_the_stages_of_the_network(options, expected):
    model = build_model("cnn-fedcka", num_classes=3, channels=1, image_size=28, seed=0)
    method = fedrcl(**options)
    assert method.layers(model) == expected
    assert not method.uses_global
    assert not method.uses_previous
    _, outputs = model.run(torch.rand(6, 1, 28, 28), expected)
    penalty = penalty_of(method, outputs, torch.tensor([0, 0, 1, 1, 2, 2]))
    penalty.backward()
    assert all(p.grad.isfinite().all() for p in model.stages["conv1"].parameters())


@pytest.mark.parametrize("method", [FedRCL, FedSCL])
def test_every_way_of_mining_is_a_choice_and_the_other_way_round(method):
    (field,) = (f for f in dataclasses.fields(method) if f.name == "mining")
    assert field.metadata["constraint"].choices == tuple(MINING)
