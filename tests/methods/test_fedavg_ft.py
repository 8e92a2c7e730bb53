"""FedAvg-FT: what is tuned at evaluation, step by step by autograd."""

import pytest
from client_fixtures import assert_close, assert_same_bits, differ, initial, make_config, make_round
from method_fixtures import DECAYS, HEAD, MOVING, batches_of, sgd_by_hand, trains_as_fedavg

from client_app.methods import method_of


@pytest.mark.parametrize(("part", "moved"), [("head", HEAD), ("full", None)])
@pytest.mark.parametrize(("lr", "rate"), [(0.02, 0.02), (0.0, 0.05)])
def test_fedavg_ft_tunes_a_part_of_the_received_model(part, moved, lr, rate, in_float64):
    """By SGD as in training, at a rate of its own; with 0 at the run's."""
    options = {"fedavg-ft__part": part, "fedavg-ft__epochs": 2, "fedavg-ft__lr": lr}
    config = make_config(method="fedavg-ft", **options, **MOVING)
    w = initial(config, seed=5)
    tuned = method_of(config).personal_model(make_round(config, received=w), {}).state_dict()
    names = sorted(moved or w)
    batches = batches_of(config, "fine-tuning", 2)
    by_hand = sgd_by_hand(config, w, batches, names, lr=rate, **MOVING)
    assert_close(tuned, by_hand, rtol=0, atol=1e-12)
    assert set(differ(tuned, w)) == set(names)


def test_fedavg_ft_of_no_epochs_is_the_received_model():
    config = make_config(**{"method": "fedavg-ft", "fedavg-ft__epochs": 0})
    w = initial(config, seed=5)
    now = make_round(config, received=w)
    assert_same_bits(method_of(config).personal_model(now, {}).state_dict(), w)


def test_it_trains_as_fedavg_to_the_bit():
    assert trains_as_fedavg("fedavg-ft")


@pytest.mark.parametrize(
    ("method", "lr", "decays"),
    [("fedavg-ft", 0.03, False), ("fedavg-ft", 0.0, True), ("fedbabu", 0.03, False)],
)
def test_tuning_at_a_rate_of_its_own_is_the_same_in_every_round(method, lr, decays):
    """At FedAvg-FT's rate of 0, which is the run's own, it decays as that does."""
    options = {f"{method}__lr": lr, f"{method}__epochs": 2}
    tuned = []
    for keys in ({}, DECAYS):
        config = make_config(method=method, seed=3, **options, **keys)
        now = make_round(config, number=4, received=initial(config, seed=5))
        tuned.append(method_of(config).personal_model(now, {}).state_dict())
    assert bool(differ(*tuned)) == decays
