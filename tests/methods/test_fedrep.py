"""FedRep: head, then body, step by step by autograd; only bodies travel."""

import pytest
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_close,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import HEAD, MOVING, batches_of, body_part, head_part, sgd_by_hand

from client_app.methods import method_of
from client_app.setup import build_network
from protocol.messages import TrainReply
from strategies import Average


def test_fedrep_trains_the_head_then_the_body(in_float64):
    config = make_config(
        method="fedrep", fedrep__head_epochs=2, fedrep__extractor_epochs=3, lr_decay=0.5, **MOVING
    )
    w, head = initial(config, seed=5), head_part(initial(config, seed=6))
    about = {"number": 2, "received": body_part(w), "state": {"head": head}}
    update = train(config, **about)
    lr = 0.05 * 0.5
    by_hand = w | head
    for stream, epochs, names in (("head", 2, HEAD), ("batches", 3, set(w) - HEAD)):
        batches = batches_of(config, stream, epochs, number=2)
        by_hand = sgd_by_hand(config, by_hand, batches, sorted(names), lr=lr, **MOVING)
    assert update.arrays.keys() == set(w) - HEAD
    assert update.state.keys() == {"head"}
    assert_close(update.arrays, by_hand, rtol=0, atol=1e-12)
    assert_close(update.state["head"], by_hand, rtol=0, atol=1e-12)
    assert update.state["head"].keys() == HEAD
    assert update.num_steps == 20


@pytest.mark.parametrize(("number", "moved"), [(2, set()), (3, HEAD)])
def test_fedreps_final_epochs_tune_the_head_after_the_last_round_alone(number, moved, in_float64):
    keys = {"fedrep__final_head_epochs": 2, "num_rounds": 3, "lr_decay": 0.5, **MOVING}
    config = make_config(method="fedrep", **keys)
    w = initial(config, seed=5)
    now = make_round(config, number=number, received=body_part(w))
    tuned = method_of(config).personal_model(now, {"head": head_part(w)}).state_dict()
    assert set(differ(tuned, w)) == moved
    assert method_of(config).depends_on_num_rounds()
    assert not method_of(make_config(method="fedrep")).depends_on_num_rounds()
    if moved:
        batches = batches_of(config, "fine-tuning", 2, number=number)
        by_hand = sgd_by_hand(config, w, batches, sorted(moved), lr=0.05 * 0.5**2, **MOVING)
        assert_close(tuned, by_hand, rtol=0, atol=1e-12)


def test_only_bodies_travel_and_the_servers_step_takes_them():
    """With FedAvgM too: what is not sent has no momentum."""
    config = make_config(method="fedrep", server_optimizer="fedavgm")
    model = build_network(config, SHAPE, NUM_CLASSES)
    body = Average(config, model).initial_arrays(model)
    assert body.keys() == initial(config).keys() - HEAD
    server = Average(config, model)
    replies = [
        TrainReply(str(k), 1, {n: a + k for n, a in body.items()}, {}, {"num-examples": 1})
        for k in (1, 3)
    ]
    server.current = server.sent = body
    first = server.next_arrays(body, replies)
    assert_close(first, {n: a + 2 for n, a in body.items()}, rtol=0, atol=1e-5)
    assert server.server_optimizer.state().keys() == body.keys()
