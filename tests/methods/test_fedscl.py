"""FedSCL against FedRCL without its penalty, and known numbers."""

import math

import pytest
import torch
from client_fixtures import assert_same_bits, batch_of, make_config, train
from method_fixtures import LEVELS, random

from client_app.methods.fedrcl import FedRCL
from client_app.methods.fedscl import FedSCL


@pytest.mark.parametrize("mining", ["all", "hard"])
def test_fedscl_is_fedrcl_without_its_penalty_to_the_bit(mining):
    y, outputs = (
        torch.tensor([0, 1, 0, 2, 1, 0]),
        [random(6, 3, 2, 2, seed=1), random(6, 5, seed=2)],
    )
    results = []
    for method in (
        FedSCL(tau=0.2, mining=mining, **LEVELS),
        FedRCL(tau=0.2, threshold=0.3, beta=0.0, mining=mining, **LEVELS),
    ):
        leaves = [t.clone().requires_grad_() for t in outputs]
        loss = method.penalty(batch_of(method.represent(None, leaves), y=y))
        loss.backward()
        results.append((loss, leaves[0].grad, leaves[1].grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][0] > 0.1


def test_fedscl_trains_as_fedrcl_without_its_penalty_to_the_bit():
    one = train(make_config(method="fedscl"))
    two = train(make_config(method="fedrcl", fedrcl__beta=0.0))
    assert_same_bits(one.arrays, two.arrays)


@pytest.mark.parametrize(("mining", "value"), [("all", math.log(5)), ("hard", math.log(3))])
def test_fedscl_of_identical_features(mining, value):
    y = torch.tensor([0, 0, 1, 1, 2, 2])
    z = random(1, 4, seed=1).expand(6, 4)
    method = FedSCL(tau=0.05, mining=mining, **LEVELS)
    got = method.penalty(batch_of(method.represent(None, [z, 3 * z]), y=y))
    assert got.item() == pytest.approx(value, rel=1e-9)


def test_fedscl_of_one_class_mined_hard_is_zero():
    method = FedSCL(tau=0.05, mining="hard", **LEVELS)
    reps = method.represent(None, [random(5, 4, seed=1)])
    penalty = method.penalty(batch_of(reps, y=torch.zeros(5)))
    assert penalty.item() == pytest.approx(0, abs=1e-12)
