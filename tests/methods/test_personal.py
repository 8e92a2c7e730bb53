"""Methods with personal models, step by step by autograd in float64; FedAvg with privacy."""

import math

import pytest
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import HEAD, MOVING, batches_of, body_part, head_part, sgd_by_hand

import client_app.privacy
from client_app.methods import method_of
from client_app.setup import build_network
from protocol.messages import TrainReply
from protocol.privacy import granularity
from strategies import Average

EXACT = {"rtol": 0, "atol": 1e-12}


# --- training -------------------------------------------------------------------------------------


def test_dittos_personal_steps_are_the_formula_around_the_rounds_first_model(in_float64):
    """Beside FedAvg's; the personal model of a first participation is the run's initial one."""
    config = make_config(method="ditto", ditto__lambda=0.7, ditto__personal_epochs=2, **MOVING)
    w, kept = initial(config, seed=5), initial(config, seed=7)

    def term(leaves):  # its gradient is lambda (v - w)
        return 0.7 / 2 * sum(((leaves[n] - w[n]) ** 2).sum() for n in leaves)

    batches = batches_of(config, "personal", 2)
    for state, v in (({"personal": kept}, kept), ({}, initial(config))):
        update = train(config, received=w, state=state)
        expected = sgd_by_hand(config, v, batches, sorted(v), lr=0.05, term=term, **MOVING)
        assert_close(update.state["personal"], expected, **EXACT)
        assert update.num_steps == 4 + 8
        assert_same_bits(update.arrays, train(make_config(**MOVING), received=w).arrays)


def test_fedrep_trains_the_head_then_the_body(in_float64):
    options = {"fedrep__head_epochs": 2, "fedrep__extractor_epochs": 3}
    config = make_config(method="fedrep", lr_decay=0.5, **options, **MOVING)
    w, head = initial(config, seed=5), head_part(initial(config, seed=6))
    update = train(config, number=2, received=body_part(w), state={"head": head})
    by_hand = w | head
    for stream, epochs, names in (("head", 2, HEAD), ("batches", 3, set(w) - HEAD)):
        batches = batches_of(config, stream, epochs, number=2)
        by_hand = sgd_by_hand(config, by_hand, batches, sorted(names), lr=0.05 * 0.5, **MOVING)
    assert update.arrays.keys() == set(w) - HEAD
    assert update.state.keys() == {"head"}
    assert_close(update.arrays | update.state["head"], by_hand, **EXACT)


def test_a_fedper_like_fedbabu_trains_head_and_body_together_and_keeps_the_head():
    config = make_config(method="fedbabu", fedbabu__fedper_like=True)
    w = initial(config, seed=5)
    update = train(config, received=body_part(w), state={"head": head_part(w)})
    plain = train(make_config(), received=w)
    assert_same_bits(update.arrays | update.state["head"], plain.arrays)


def test_only_bodies_travel_and_the_servers_step_takes_them():
    """With FedAvgM too: what is not sent has no momentum."""
    config = make_config(method="fedrep", server_optimizer="fedavgm")
    model = build_network(config, SHAPE, NUM_CLASSES)
    server = Average(config, model)
    body = server.initial_arrays(model)
    assert body.keys() == initial(config).keys() - HEAD
    replies = [
        TrainReply(str(k), 1, {n: a + k for n, a in body.items()}, {}, {"num-examples": 1})
        for k in (1, 3)
    ]
    server.current = server.sent = body
    first = server.next_arrays(body, replies)
    assert_close(first, {n: a + 2 for n, a in body.items()}, rtol=0, atol=1e-5)
    assert server.server_optimizer.state().keys() == body.keys()


# --- fine-tuning at evaluation --------------------------------------------------------------------

OWN_RATE = {"lr": 0.001, "momentum": 0.9}  # FedBABU's, the same in every round
RUNS_RATE = {"lr": 0.05 * 0.5**2, **MOVING}
LAST = {"fedrep__final_head_epochs": 2, "num_rounds": 3}


@pytest.mark.parametrize(
    ("method", "options", "part", "how"),
    [
        ("fedavg-ft", {"fedavg-ft__part": "head"}, "head", RUNS_RATE),
        ("fedavg-ft", {"fedavg-ft__part": "full"}, "full", RUNS_RATE),
        ("fedbabu", {"fedbabu__part": "head"}, "head", OWN_RATE),
        ("fedbabu", {"fedbabu__part": "full"}, "full", OWN_RATE),
        ("fedbabu", {"fedbabu__part": "extractor"}, "extractor", OWN_RATE),
        ("fedrep", LAST, "head", RUNS_RATE),
        ("fedrep", LAST | {"num_rounds": 4}, "", {}),  # round 3 is not the last
    ],
)
def test_the_part_that_is_asked_for_is_tuned_by_sgd(method, options, part, how, in_float64):
    epochs = {} if method == "fedrep" else {f"{method}__epochs": 2}
    config = make_config(method=method, lr_decay=0.5, **options, **epochs, **MOVING)
    w = initial(config)
    names = {"head": HEAD, "full": set(w), "extractor": set(w) - HEAD, "": set()}[part]
    received = w if method == "fedavg-ft" else body_part(w)
    now = make_round(config, number=3, received=received)
    state = {"head": head_part(w)} if method == "fedrep" else {}
    tuned = method_of(config).personal_model(now, state).state_dict()
    assert set(differ(tuned, w)) == names
    if names:
        batches = batches_of(config, "fine-tuning", 2, number=3)
        assert_close(tuned, sgd_by_hand(config, w, batches, sorted(names), **how), **EXACT)
    assert method_of(config).depends_on_num_rounds() == (method == "fedrep")


# --- private --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft"])
def test_without_noise_the_difference_is_clipped_in_its_own_direction(method, monkeypatch):
    monkeypatch.setattr(client_app.privacy, "discrete_gaussian", lambda s, num, words: 0)
    w = initial(make_config(), seed=5)
    plain = train(make_config(), received=w)
    difference = {n: plain.arrays[n] - w[n] for n in w}
    norm = math.sqrt(sum(d.double().square().sum().item() for d in difference.values()))
    for clip in (norm / 4, norm * 1.01):
        config = make_config(method=method, privacy__epsilon=0.5, privacy__clip_norm=clip)
        wanted = {n: w[n] + min(1, clip / norm) * d for n, d in difference.items()}
        step = granularity(config.privacy, sum(a.numel() for a in w.values()))
        assert_close(train(config, received=w).arrays, wanted, rtol=0, atol=1e-6 + step)
