"""What makes a reply invalid, and bounds on the norms of updates."""

import math

import pytest
import torch

from protocol.config import resolve_config
from protocol.messages import TrainReply
from strategies.validation import ExpectedReply, beyond_bound, norm, rejection_reason


def reply_of(client="a", round_=3, count=10.0, arrays=None, extra=None):
    arrays = {"w": torch.zeros(2)} if arrays is None else arrays
    return TrainReply(client, round_, arrays, extra or {}, {"num-examples": count})


want = ExpectedReply(3, {"w": torch.zeros(2)}, {}, {"a": 10, "b": 5})


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (reply_of(), ""),
        (reply_of("b", count=5.0), ""),
        (reply_of("b"), "num-examples is 10, the roster says 5"),
        (reply_of("c"), "it was not asked in round 3"),
        (reply_of(round_=2), "it answers round 2"),
        (reply_of(round_=4), "it answers round 4"),
        (reply_of(count=math.nan), "num-examples is nan, the roster says 10"),
        (reply_of(extra={"c": torch.ones(1)}), "array 'c' is unknown (1 too many)"),
        (reply_of(arrays={}), "array 'w' is missing (1 of 1)"),
    ],
)
def test_why_a_reply_is_refused(reply, reason):
    assert rejection_reason(reply, want) == reason


def test_the_norm_is_over_all_arrays_in_double_precision():
    big = torch.tensor([3e25, -4e25])  # its square is beyond float32
    assert norm({"a": big, "b": torch.zeros(4)}) == pytest.approx(5e25)
    assert norm({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[2.0]])}) == pytest.approx(3)
    assert norm({}) == 0


def rounds_config(**given):
    return resolve_config({k.replace("_", "-"): v for k, v in given.items()}).rounds


def test_a_fixed_bound_is_the_norm_itself_and_inclusive():
    found = beyond_bound(
        {"a": 1.0, "b": 2.0, "c": 2.5}, rounds_config(norm_bound="fixed", norm_bound_value=2.0)
    )
    assert found == {"c": "its update's norm is 2.5, more than 2 (norm-bound-value)"}


def test_of_two_updates_the_median_bound_refuses_the_one_out_of_line():
    bound = rounds_config(norm_bound="median", norm_bound_value=5.0)
    assert list(beyond_bound({"a": 1.0, "b": 1e3}, bound)) == ["b"]
    assert beyond_bound({"a": 1.0, "b": 4.0}, bound) == {}


def test_a_median_bound_is_relative_to_the_round():
    bound = rounds_config(norm_bound="median", norm_bound_value=3.0)
    found = beyond_bound({"a": 1.0, "b": 2.0, "c": 3.0, "d": 7.6}, bound)
    assert found == {"d": "its update's norm is 7.6, more than 6 (3 times the round's median of 2)"}
    assert beyond_bound({"a": 0.0, "b": 0.0}, bound) == {}
    assert beyond_bound({}, bound) == {}


def test_no_bound_by_default():
    assert beyond_bound({"a": 1.0, "b": 1e9}, rounds_config()) == {}
