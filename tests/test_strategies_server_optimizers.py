"""The steps of server optimizers against their equations by hand, in float64."""

import math

import numpy as np
import pytest
import torch
from run_fixtures import FACTS, answer, random_arrays, same_bits, sent
from torch import Tensor, nn

from protocol.array_records import array_record, tensors
from protocol.config import resolve_config
from protocol.messages import RosterEntry, TrainReply, TrainRequest
from protocol.messages import request_record as record_of
from protocol.server_optimizers import FedACGOptions, FedAdamOptions, FedAvgMOptions
from strategies.average import Average
from strategies.server_optimizers import FedACGStep, FedAdamStep, FedAvgMStep

shapes = {"conv": (2, 3), "fc": (5,)}


def fedavgm(lr=1.0, beta=0.4):
    return FedAvgMStep(FedAvgMOptions(lr=lr, beta=beta))


def fedadam(lr=0.01, beta1=0.9, beta2=0.99, tau=0.001):
    return FedAdamStep(FedAdamOptions(lr=lr, beta1=beta1, beta2=beta2, tau=tau))


def averages(num_rounds):
    """What the clients' average might be in each round: unrelated to the model before."""
    return [random_arrays(shapes, seed=10 + r) for r in range(num_rounds)]


def stepped(step, num_rounds=5):
    """The models after each round, from one start."""
    model, models = random_arrays(shapes, seed=1), []
    for average in averages(num_rounds):
        model = step.step(model, average, shapes.keys())
        models.append(model)
    return models


def fedavgm_by_hand(w, average, v, lr, beta):
    """One entry: v <- beta v + (A - w); w <- w + lr v."""
    v = beta * v + (average - w)
    return w + lr * v, v


def fedadam_by_hand(w, average, m, v, lr, beta1, beta2, tau):
    """One entry of m <- b1 m + (1-b1) D; v <- b2 v + (1-b2) D^2; w <- w + lr m / (sqrt v + tau)."""
    delta = average - w
    m = beta1 * m + (1 - beta1) * delta
    v = beta2 * v + (1 - beta2) * delta * delta
    return w + lr * m / (math.sqrt(v) + tau), m, v


def assert_close(array: Tensor, expected: dict[tuple[int, ...], float]):
    for at, value in expected.items():
        assert float(array[at]) == pytest.approx(value, rel=1e-11, abs=1e-13)


@pytest.mark.parametrize(("lr", "beta"), [(1.0, 0.4), (0.3, 0.9), (2.0, 0.0)])
def test_fedavgm_equals_its_equations_by_hand_over_five_rounds(lr, beta):
    models = stepped(fedavgm(lr, beta))
    for name, shape in shapes.items():
        for at in np.ndindex(shape):
            w, v = float(random_arrays(shapes, seed=1)[name][at]), 0.0
            for average, model in zip(averages(5), models, strict=True):
                w, v = fedavgm_by_hand(w, float(average[name][at]), v, lr, beta)
                assert_close(model[name], {at: w})


@pytest.mark.parametrize(
    ("lr", "beta1", "beta2", "tau"), [(0.01, 0.9, 0.99, 0.001), (0.1, 0.5, 0.7, 0.3)]
)
def test_fedadam_equals_its_equations_by_hand_over_five_rounds(lr, beta1, beta2, tau):
    models = stepped(fedadam(lr, beta1, beta2, tau))
    for name, shape in shapes.items():
        for at in np.ndindex(shape):
            w, m, v = float(random_arrays(shapes, seed=1)[name][at]), 0.0, tau * tau
            for average, model in zip(averages(5), models, strict=True):
                a = float(average[name][at])
                w, m, v = fedadam_by_hand(w, a, m, v, lr, beta1, beta2, tau)
                assert_close(model[name], {at: w})


@pytest.mark.parametrize("lambda_", [0.85, 0.3, 0.0])
def test_fedacg_equals_its_equations_by_hand_over_five_rounds(lambda_):
    """wh = w + lambda m is sent; m <- lambda m + (A - wh); w <- w + m."""
    step = FedACGStep(FedACGOptions(lambda_=lambda_, beta=0.01))
    w, model = random_arrays(shapes, seed=1), random_arrays(shapes, seed=1)
    m = {name: torch.zeros_like(array) for name, array in w.items()}
    for average in averages(5):
        broadcast = step.broadcast(model)
        model = step.step(model, average, shapes.keys())
        for name in shapes:
            wh = w[name] + lambda_ * m[name]
            torch.testing.assert_close(broadcast[name], wh, rtol=1e-12, atol=1e-13)
            m[name] = lambda_ * m[name] + (average[name] - wh)
            w[name] = w[name] + m[name]
            torch.testing.assert_close(model[name], w[name], rtol=1e-12, atol=1e-13)


# --- state -----------------------------------------------------------------------------------


def three_rounds(server, network):
    """(the strategy, [(the average, the next arrays)]) of rounds in which a client sends 10 r."""
    strategy = Average(
        resolve_config({"server-optimizer": server, "weighting": "uniform"}), network
    )
    strategy.roster = {7: RosterEntry("a", [4], [1], [1, 28, 28], "cnn", 8, "", 1)}
    current = {name: array.clone() for name, array in network.state_dict().items()}
    rounds = []
    for server_round in (1, 2, 3):
        theirs = {
            name: torch.full_like(array, 10 * server_round) for name, array in current.items()
        }
        request = record_of(TrainRequest(strategy.config, FACTS, server_round, [0], False, "/run"))
        [ask] = sent(
            list(strategy.configure_train(server_round, array_record(current), request, None))
        )
        reply = TrainReply("a", server_round, theirs, {}, {"num-examples": 4.0})
        record, _ = strategy.aggregate_train(server_round, [answer(ask, reply)])
        current = tensors(record)
        rounds.append((theirs, current))
    return strategy, rounds


@pytest.mark.usefixtures("task_identity")
@pytest.mark.parametrize("server", ["fedavg", "fedavgm", "fedadam"])
def test_buffers_take_the_average_as_it_is_whatever_the_step(server):
    """Momentum on a running variance can make it negative."""
    torch.manual_seed(3)
    strategy, rounds = three_rounds(server, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    for theirs, current in rounds:
        for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
            assert same_bits({name: current[name]}, {name: theirs[name]})
    assert not [name for name in strategy.state() if "running" in name or "num_batches" in name]
