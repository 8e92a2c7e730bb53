"""What makes a reply invalid, and bounds on the norms of updates."""

import math
from dataclasses import replace

import pytest
import torch

from protocol.config import resolve_config
from protocol.messages import TrainReply
from strategies.validation import (
    MAX_COUNTER_CHANGE,
    ExpectedReply,
    NormReference,
    beyond_bound,
    beyond_norms,
    largest_values,
    rejection_reason,
)

w = torch.tensor([0.5, 2.0])
SENT = {"w": w, "running_var": w, "steps": torch.tensor(100)}


def not_odd(reply):
    if reply.extra["c"].sum() == 3:
        raise ValueError("odd")
    return reply.extra


EXPECTED = ExpectedReply(
    3, SENT, {"c": w}, {"a": 10}, {"w": 1e4, "running_var": 2e4}, SENT, not_odd
)
GOOD = TrainReply("a", 3, SENT, {"c": w}, {"num-examples": 10.0, "seconds": 0.5})


def with_arrays(**arrays):
    return replace(GOOD, arrays=SENT | arrays)


def with_metrics(**metrics):
    named = {name.replace("_", "-"): value for name, value in metrics.items()}
    return replace(GOOD, metrics=GOOD.metrics | named)


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (GOOD, ""),
        (
            with_arrays(w=torch.tensor([1e4, -1e4]), steps=torch.tensor(100 + MAX_COUNTER_CHANGE)),
            "",
        ),
        (with_metrics(loss_=3.4e38, penalty=-1.0, personal_accuracy=1.0, global_accuracy=0.0), ""),
        (replace(GOOD, round=2), "round 2"),
        (replace(GOOD, arrays={"w": w}), "'running_var'"),
        (with_arrays(more=w), "'more'"),
        (with_arrays(w=torch.zeros(2, 1)), "'w' is [2, 1]"),
        (with_arrays(w=w.double()), "'w' is torch.float64"),
        (with_arrays(w=w * math.nan), "'w'"),
        (with_arrays(w=w * math.inf), "'w'"),
        (with_arrays(w=w * 1e4), "'w' holds 2e+04"),
        (with_arrays(running_var=-w), "'running_var'"),
        (with_arrays(steps=torch.tensor(101 + MAX_COUNTER_CHANGE)), "'steps'"),
        (with_arrays(steps=torch.tensor(2**40 + 2)), "'steps'"),
        (replace(GOOD, extra={}), "'c'"),
        (replace(GOOD, extra={"c": w * math.nan}), "'c'"),
        (replace(GOOD, extra={"c": w * 1e5}), "'c' holds 2e+05"),
        (replace(GOOD, extra={"c": torch.tensor([1.0, 2.0])}), "odd"),
        (with_metrics(num_examples=11.0), "num-examples is 11"),
        (with_metrics(num_examples=math.nan), "num-examples is nan"),
        (replace(GOOD, metrics={}), "num-examples is missing"),
        (with_metrics(seconds=-1.0), "seconds is -1"),
        (with_metrics(cpu_seconds=-math.inf), "cpu-seconds is -inf"),
        (with_metrics(loss=1.7e308), "loss is 1.7e+308"),
        (with_metrics(personal_accuracy=1.01), "personal-accuracy is 1.01"),
    ],
)
def test_a_broken_or_absurd_reply_is_rejected_with_what_it_breaks_named(reply, named):
    """The first three are valid."""
    reason = rejection_reason(reply, EXPECTED)
    assert named in reason
    assert bool(reason) == bool(named)


def test_the_bound_on_values_follows_what_was_sent_and_the_noise():
    sent = {"small": torch.tensor([0.1]), "large": torch.tensor([-30.0]), "n": torch.tensor(5)}
    assert largest_values(sent, resolve_config({}).privacy) == {"small": 1e4, "large": 3e5}
    private = resolve_config({"privacy.epsilon": 1e-3, "privacy.clip-norm": 10.0}).privacy
    assert largest_values(sent, private)["small"] >= 1e6


def rounds_config(**given):
    return resolve_config({k.replace("_", "-"): v for k, v in given.items()}).rounds


@pytest.mark.parametrize(
    ("keys", "norms", "rejected"),
    [
        ({"norm_bound": "fixed", "norm_bound_value": 2.0}, [1.0, 2.0, 2.5], {2}),
        ({"norm_bound": "median", "norm_bound_value": 3.0}, [1.0, 2.0, 3.0, 7.6], {3}),
        ({"norm_bound": "median", "norm_bound_value": 3.0}, [1.0, 1.1, 1.2, 0.0, 0.0], set()),
        ({"norm_bound": "median", "norm_bound_value": 3.0}, [1.0, 1e3, 0.0], set()),
    ],
    ids=["fixed", "median", "no change does not lower it", "needs three changes"],
)
def test_norm_bound_rejects_updates_that_are_longer(keys, norms, rejected):
    found = beyond_bound(dict(enumerate(norms)), rounds_config(**keys), NormReference())
    assert found.keys() == rejected


def test_the_norm_reference_falls_by_at_most_half_a_round():
    bound, reference = rounds_config(norm_bound="median", norm_bound_value=3.0), NormReference()
    beyond_bound({"a": 4.0, "b": 4.0, "c": 4.0}, bound, reference)
    beyond_bound({"a": 4.0, "b": 1e-9, "c": 1e-9}, bound, reference)
    assert reference.value == 2.0


def test_arrays_beside_the_model_are_bounded_by_ten_times_the_median_norm():
    """A reply that is rejected for them does not raise the reference of `norm-bound`."""
    replies = {
        name: TrainReply(name, 1, {"w": torch.tensor([update])}, {"c": torch.tensor([beside])}, {})
        for name, update, beside in [
            ("a", 1.0, 1.0),
            ("b", 1.1, 1.0),
            ("c", 1.2, 10),
            ("d", 9e9, 11),
        ]
    }
    rounds, reference = rounds_config(norm_bound="median"), NormReference()
    both = (lambda reply: reply.arrays), (lambda reply: reply.extra)
    assert beyond_norms(replies, *both, rounds, reference).keys() == {"d"}
    assert reference.value == pytest.approx(1.1)
    assert beyond_norms(replies, *both, rounds_config(), reference) == {}
