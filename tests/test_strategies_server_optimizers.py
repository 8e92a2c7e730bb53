"""The steps of server optimizers against their equations, entry by entry, in float64."""

import math

import numpy as np
import pytest
import torch
from run_fixtures import FACTS, answer, random_arrays, same_bits, sent
from torch import nn

from protocol.array_records import array_record, tensors
from protocol.config import resolve_config
from protocol.messages import RosterEntry, TrainReply, TrainRequest, request_record
from strategies.average import Average
from strategies.server_optimizers import server_optimizer

SHAPES = {"conv": (2, 3), "fc": (5,)}


def fedavgm(averages, w, lr=1.0, beta=0.0):
    """v <- beta v + (A - w); w <- w + lr v. Yields (what is sent, w) of one entry."""
    v = 0.0
    for a in averages:
        before = w
        v = beta * v + (a - w)
        w = w + lr * v
        yield before, w


def fedadam(averages, w, lr=0.0, beta1=0.0, beta2=0.0, tau=0.0):
    """m <- b1 m + (1-b1) D; v <- b2 v + (1-b2) D^2; w <- w + lr m / (sqrt v + tau); D = A - w."""
    m, v = 0.0, tau * tau
    for a in averages:
        before, delta = w, a - w
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta * delta
        w = w + lr * m / (math.sqrt(v) + tau)
        yield before, w


def fedacg(averages, w, **options):
    """wh = w + lambda m is sent; m <- lambda m + (A - wh); w <- w + m."""
    m, lambda_ = 0.0, options["lambda"]
    for a in averages:
        ahead = w + lambda_ * m
        m = lambda_ * m + (a - ahead)
        w = w + m
        yield ahead, w


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (fedavgm, {"lr": 1.0, "beta": 0.4}),
        (fedavgm, {"lr": 0.3, "beta": 0.9}),
        (fedavgm, {"lr": 2.0, "beta": 0.0}),
        (fedadam, {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 0.001}),
        (fedadam, {"lr": 0.1, "beta1": 0.5, "beta2": 0.7, "tau": 0.3}),
        (fedacg, {"lambda": 0.85}),
        (fedacg, {"lambda": 0.0}),
    ],
)
def test_five_rounds_are_those_of_the_equations(rule, options):
    name = rule.__name__
    keys = {f"{name}.{key}": value for key, value in options.items()}
    optimizer = server_optimizer(resolve_config({"server-optimizer": name} | keys))
    first = model = random_arrays(SHAPES, seed=1)
    averages = [random_arrays(SHAPES, seed=10 + r) for r in range(5)]  # unrelated to the model
    rounds = []
    for average in averages:
        broadcast = optimizer.broadcast(model)
        model = optimizer.step(model, average, SHAPES.keys())
        rounds.append((broadcast, model))
    for array, shape in SHAPES.items():
        for at in np.ndindex(shape):
            entries = [float(average[array][at]) for average in averages]
            expected = rule(entries, float(first[array][at]), **options)
            for both, values in zip(rounds, expected, strict=True):
                found = [float(arrays[array][at]) for arrays in both]
                assert found == pytest.approx(values, rel=1e-11, abs=1e-13)


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("server", ["fedavg", "fedavgm", "fedadam"])
def test_buffers_take_the_average_as_it_is_whatever_the_step(server):
    """Momentum on a running variance can make it negative."""
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    keys = {"server-optimizer": server, "weighting": "uniform"}
    strategy = Average(resolve_config(keys), network)
    strategy.roster = {7: RosterEntry("a", [4], [1], [1, 28, 28], "cnn", 8, "", 1)}
    current = {name: array.clone() for name, array in network.state_dict().items()}
    for number in (1, 2, 3):  # one client, which sends 10, then 20, then 30
        theirs = {name: torch.full_like(array, 10 * number) for name, array in current.items()}
        request = TrainRequest(strategy.config, FACTS, number, [0], False, "/run")
        record = request_record(request)
        [ask] = sent(list(strategy.configure_train(number, array_record(current), record, None)))
        reply = TrainReply("a", number, theirs, {}, {"num-examples": 4.0})
        following, _ = strategy.aggregate_train(number, [answer(ask, reply)])
        current = tensors(following)
        buffers = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
        assert same_bits(*({n: arrays[n] for n in buffers} for arrays in (current, theirs)))
    assert not [name for name in strategy.state() if "running" in name or "num_batches" in name]
