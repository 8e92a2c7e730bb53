"""The weights of the papers, and the client half of FedACG."""

import pytest
import torch
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    assert_same_bits,
    initial,
    make_config,
    train,
)
from method_fixtures import METHODS

from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies import strategy_for
from strategies.average import Average

# --- FedAvg ---------------------------------------------------------------------------------------


def server_of(config):
    return strategy_for(config, build_network(config, SHAPE, NUM_CLASSES))


def reply(name, arrays, examples):
    return TrainReply(name, 1, arrays, {}, {"num-examples": examples})


UNIFORM = {"fedrcl", "fedscl", "fedcl", "fedbabu", "fedcr"}  # their papers and code


@pytest.mark.parametrize("method", METHODS)
def test_unless_asked_the_papers_weights_are_taken(method):
    config = make_config(method=method, max_weight_share=1.0)
    assert config.rounds.weighting == "auto"
    server = server_of(config)
    if method not in ("fedreco", "local"):  # eq. (8); nothing to average
        assert server.options.default_weighting == ("uniform" if method in UNIFORM else "examples")
    if server.next_arrays.__func__ is Average.next_arrays:
        zeros = server.initial_arrays(build_network(config, SHAPE, NUM_CLASSES))
        zeros = {n: torch.zeros_like(a) for n, a in zeros.items()}
        ones = {n: torch.ones_like(a) for n, a in zeros.items()}
        server.current = server.sent = zeros
        following = server.next_arrays(zeros, [reply("a", ones, 1), reply("b", zeros, 3)])
        share = 0.5 if method in UNIFORM else 0.25
        assert all(torch.allclose(a, torch.full_like(a, share)) for a in following.values())


# --- FedACG ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedrcl", "ditto"])
def test_fedacgs_client_pulls_towards_what_it_was_sent(method):
    """beta ||theta - wh||^2, without 1/2: FedProx's term with mu = 2 beta, beside the method's."""
    keys = {"local_epochs": 2, "momentum": 0.0}
    w = initial(make_config(), seed=5)
    pulled = train(
        make_config(method=method, server_optimizer="fedacg", fedacg__beta=0.5, **keys), received=w
    )
    free = train(
        make_config(method=method, server_optimizer="fedacg", fedacg__beta=0.0, **keys), received=w
    )
    plain = train(make_config(method=method, **keys), received=w)
    assert_same_bits(free.arrays, plain.arrays)
    assert "look-ahead" not in free.terms
    distance = [sum((u.arrays[n] - w[n]).square().sum() for n in w) for u in (pulled, free)]
    assert distance[0] < distance[1]
    assert pulled.terms["look-ahead"] > 0
    if method == "fedavg":
        prox = train(make_config(method="fedprox", fedprox__mu=1.0, **keys), received=w)
        assert_close(pulled.arrays, prox.arrays, rtol=0, atol=1e-7)
        assert pulled.terms["look-ahead"] == pytest.approx(prox.terms["penalty"], rel=1e-4)
