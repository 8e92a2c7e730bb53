"""FedAvg-FT: what is tuned at evaluation, step by step by autograd."""

import pytest
from client_fixtures import assert_close, differ, initial, make_config, make_round
from method_fixtures import HEAD, MOVING, batches_of, sgd_by_hand

from client_app.methods import method_of


@pytest.mark.parametrize(("part", "moved"), [("head", HEAD), ("full", None)])
def test_fedavg_ft_tunes_a_part_of_the_received_model(part, moved, in_float64):
    """By SGD as in training, at the run's rate."""
    options = {"fedavg-ft__part": part, "fedavg-ft__epochs": 2}
    config = make_config(method="fedavg-ft", **options, **MOVING)
    w = initial(config, seed=5)
    tuned = method_of(config).personal_model(make_round(config, received=w), {}).state_dict()
    names = sorted(moved or w)
    batches = batches_of(config, "fine-tuning", 2)
    by_hand = sgd_by_hand(config, w, batches, names, lr=0.05, **MOVING)
    assert_close(tuned, by_hand, rtol=0, atol=1e-12)
    assert set(differ(tuned, w)) == set(names)
