"""FedBABU: what is tuned at evaluation, and its FedPer-like form."""

import pytest
from client_fixtures import (
    assert_close,
    assert_same_bits,
    differ,
    initial,
    make_config,
    make_round,
    train,
)
from method_fixtures import HEAD, batches_of, body_part, head_part, sgd_by_hand

from client_app.methods import method_of


@pytest.mark.parametrize("part", ["full", "head", "extractor"])
def test_fedbabus_tuning_moves_the_part_that_is_asked_for(part, in_float64):
    """At one rate in every round."""
    config = make_config(method="fedbabu", fedbabu__part=part, fedbabu__epochs=1, lr_decay=0.5)
    w = initial(config)
    body = body_part(initial(config, seed=5))
    now = make_round(config, number=3, received=body)
    tuned = method_of(config).personal_model(now, {}).state_dict()
    wanted = {"full": set(w), "head": HEAD, "extractor": set(body)}[part]
    assert set(differ(tuned, w | body)) == wanted
    batches = batches_of(config, "fine-tuning", 1, number=3)
    by_hand = sgd_by_hand(config, w | body, batches, sorted(wanted), lr=0.001, momentum=0.9)
    assert_close(tuned, by_hand, rtol=0, atol=1e-12)


def test_a_fedper_like_fedbabu_trains_head_and_body_together_and_keeps_the_head():
    config = make_config(method="fedbabu", fedbabu__fedper_like=True)
    w = initial(config, seed=5)
    update = train(config, received=body_part(w), state={"head": head_part(w)})
    plain = train(make_config(), received=w)
    assert_same_bits(update.arrays | update.state["head"], plain.arrays)
