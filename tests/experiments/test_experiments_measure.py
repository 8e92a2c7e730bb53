"""The one number of a run: takes, divergence, moving averages."""

import math

import pytest

from keel.experiments.measure import History, measure, parse_take

HISTORY = [
    {"round": i, "client_seconds": 10.0 * i, "global": {"accuracy": value}}
    for i, value in enumerate([0.10, 0.40, 0.20, 0.80, 0.60], start=1)
]


@pytest.mark.parametrize(
    ("take", "at", "expected"),
    [
        ("final", 5, 60.0),
        ("final", 3, 20.0),
        ("best", 5, 80.0),
        ("median 3", 5, 60.0),
        ("mean 2", 5, 70.0),
        ("ema 0.5", 3, 22.5),  # ((0.5 * 10 + 0.5 * 40) + 20) / 2
        ("seconds to 40", 5, 30.0),
        ("seconds to 90", 5, math.inf),
        ("seconds a round", 5, 30.0),
        ("final", 6, None),  # not there yet
    ],
)
def test_measures_of_a_history(take, at, expected):
    found = measure(History(HISTORY), "global.accuracy", parse_take(take), at)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_clients_that_could_not_be_evaluated_are_not_left_out_of_a_mean():
    """A client's model is not finite in round 2: the mean of the others says too much."""
    lines = [
        {"round": n, "personal": {"mean": mean}, "num_evaluation_left_out": num}
        for n, mean, num in ((1, 0.5, 0), (2, 0.9, 1), (3, 0.6, 1))
    ]
    clients = [
        {"round": 2, "evaluation_left_out": {"a": "personal-loss is nan, not finite"}},
        {"round": 3, "evaluation_left_out": {"a": "no answer"}},
    ]
    found = History(lines, clients)
    assert (found.num_not_evaluated, found.rounds_partial) == (2, 1)
    assert measure(found, "personal.mean", parse_take("best"), 3) == pytest.approx(60)
    for take in ("final", "best", "mean 2", "ema 0.5"):
        assert measure(found, "personal.mean", parse_take(take), 2) is None


def test_a_round_whose_global_loss_is_not_finite_has_no_accuracy():
    found = History([{"round": 1, "global": {"accuracy": 0.9, "loss": None}}])
    assert (found.rounds_diverged, found.points("global.accuracy")) == (1, [])


@pytest.mark.parametrize("every", [1, 10])
def test_a_moving_average_is_the_same_of_rarer_evaluations(every):
    """An accuracy that rises evenly from 0 to 100: the average lags by 9 rounds of 1000."""
    evaluated = range(every, 1001, every)
    curve = History([{"round": r, "global": {"accuracy": r / 1000}} for r in evaluated])
    found = measure(curve, "global.accuracy", parse_take("ema 0.9"), 1000)
    assert found == pytest.approx(99.1, abs=0.6)
