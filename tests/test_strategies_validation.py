"""What makes a reply invalid, and bounds on the norms of updates."""

import math

import pytest
import torch

from protocol.config import resolve_config
from protocol.messages import TrainReply
from strategies.validation import (
    MAX_COUNTER_CHANGE,
    ExpectedReply,
    NormReference,
    beyond_bound,
    beyond_median,
    cosine_of,
    count_outliers,
    far_counter,
    largest_values,
    norm,
    opposed,
    rejection_reason,
)


def reply_of(client="a", round_=3, count=10.0, arrays=None, extra=None, **metrics):
    arrays = {"w": torch.zeros(2)} if arrays is None else arrays
    return TrainReply(client, round_, arrays, extra or {}, {"num-examples": count} | metrics)


want = ExpectedReply(3, {"w": torch.zeros(2)}, {}, {"a": 10, "b": 5})


changed = ": if its data has changed, restore it or start a new run"


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (reply_of(), ""),
        (reply_of("b", count=5.0), ""),
        (reply_of("b"), f"num-examples is 10, the roster says 5{changed}"),
        (reply_of(count=1234567), f"num-examples is 1234567, the roster says 10{changed}"),
        (reply_of("c"), "it was sent no message in round 3"),
        (reply_of(round_=2), "it answers round 2"),
        (reply_of(round_=4), "it answers round 4"),
        (reply_of(count=math.nan), f"num-examples is nan, the roster says 10{changed}"),
        (reply_of(seconds=-math.inf), "seconds is -inf, not finite"),
        (reply_of(**{"loss.supervised": 3.4e38}), ""),  # as float32 can say it
        (reply_of(**{"loss.a": 1.7e308}), "loss.a is 1.7e+308, beyond 3.40282e+38"),
        (reply_of(**{"loss.a": -1e300}), "loss.a is -1e+300, beyond 3.40282e+38"),
        (reply_of(**{"loss.penalty": -1.0}), ""),  # a penalty may be negative
        (reply_of(seconds=-1.0), "seconds is -1, less than 0"),
        (reply_of(**{"cpu-seconds": -1e-3}), "cpu-seconds is -0.001, less than 0"),
        (reply_of(**{"personal-accuracy": 1.0, "global-accuracy": 0.0}), ""),
        (reply_of(**{"personal-accuracy": 1.01}), "personal-accuracy is 1.01, not from 0 to 1"),
        (reply_of(**{"global-accuracy": -0.5}), "global-accuracy is -0.5, not from 0 to 1"),
        (
            reply_of(extra={"c": torch.ones(1)}),
            "alongside the model, array 'c' is unknown (1 too many)",
        ),
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
        {"a": 1.0, "b": 2.0, "c": 2.5},
        rounds_config(norm_bound="fixed", norm_bound_value=2.0),
        NormReference(),
    )
    assert found == {"c": "its update's norm is 2.5, more than 2 (norm-bound-value)"}


@pytest.mark.parametrize(
    "norms", [{"a": 1.0, "b": 1e3}, {"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0, "c": 0.0}]
)
def test_without_three_changes_the_median_bound_is_not_applied_and_says_so_once(norms, caplog):
    bound, reference = rounds_config(norm_bound="median"), NormReference()
    for _ in range(2):
        assert beyond_bound(norms, bound, reference) == {}
    [line] = caplog.messages
    assert "needs at least 3 replies that change something, this round has" in line


def test_clients_that_send_no_change_or_hardly_any_do_not_lower_the_median():
    bound = rounds_config(norm_bound="median", norm_bound_value=5.0)
    still = {"a": 1.0, "b": 1.1, "c": 1.2, "d": 0.0, "e": 0.0}
    assert beyond_bound(still, bound, NormReference()) == {}
    assert beyond_bound(still | {"d": 1e-30, "e": 1e-30}, bound, NormReference()) == {}


def test_the_norm_reference_falls_by_at_most_half_a_round_and_is_restored():
    bound, reference = rounds_config(norm_bound="median", norm_bound_value=3.0), NormReference()
    assert beyond_bound({"a": 4.1, "b": 4.1, "c": 4.1}, bound, reference) == {}
    resumed = NormReference()
    resumed.load(reference.state())
    for each in (reference, resumed):  # a cohort in which the hostile are many
        assert beyond_bound({"a": 4.0, "b": 1e-9, "c": 1e-9}, bound, each) == {}
        assert each.value == 2.05  # to the last bit
    resumed.load({})  # of a checkpoint of an earlier version
    assert resumed.value == 0.0


def test_arrays_beside_the_model_are_bounded_by_ten_times_the_median():
    norms = {"a": 1.0, "b": 2.0, "c": 20.0, "d": 20.1}
    assert beyond_median(norms) == {
        "d": "the norm of its arrays alongside the model is 20.1, more than 20 (10 times the "
        "round's median)"
    }
    assert beyond_median({"a": 1.0, "b": 1e9, "c": 0.0}) == {}


def test_a_median_bound_is_relative_to_the_round():
    bound = rounds_config(norm_bound="median", norm_bound_value=3.0)
    found = beyond_bound({"a": 1.0, "b": 2.0, "c": 3.0, "d": 7.6}, bound, NormReference())
    assert found == {"d": "its update's norm is 7.6, more than 6 (3 times the round's median of 2)"}
    assert beyond_bound({"a": 0.0, "b": 0.0}, bound, NormReference()) == {}
    assert beyond_bound({}, bound, NormReference()) == {}


def updates_of(**values):
    return {client: {"w": torch.tensor(value)} for client, value in values.items()}


@pytest.mark.parametrize(
    ("outlier", "reason"),
    [
        (
            [-3.0, 0.0],
            "points against the others' (median cosine -1), and it declares more than 10",
        ),
        ([-1.0, 0.5], "median cosine -0.89"),
        ([3.0, 0.0], ""),
        ([0.0, 3.0], ""),
        ([0.0, 0.0], ""),
    ],
)
def test_an_outlier_that_opposes_most_others_is_rejected(outlier, reason):
    updates = updates_of(big=outlier, a=[1.0, 0.0], b=[1.0, 0.0], c=[-1.0, 0.0])
    found = opposed(updates, {"big", "absent"})
    assert found.keys() == ({"big"} if reason else set())
    assert reason in found.get("big", "")


def test_without_two_others_nobody_is_opposed_and_one_other_alone_outvotes_nobody():
    assert opposed(updates_of(big=[1.0], a=[-1.0]), {"big"}) == {}
    assert opposed(updates_of(big=[1.0], a=[-1.0], b=[1.0]), {"big"}) == {}
    assert opposed(updates_of(big=[1.0], a=[-1.0], b=[-1.0]), {"big"}).keys() == {"big"}


def test_outliers_declare_more_than_ten_times_the_median():
    declared = {"a": 10, "b": 20, "c": 100, "d": 201}
    assert count_outliers(declared, 0.25) == {"d"}
    assert count_outliers({"a": 10, "b": 101}, 0.25) == {"b"}
    assert count_outliers({"a": 10, "b": 100}, 0.25) == frozenset()
    assert count_outliers(declared, 1.0) == frozenset()  # the counts are trusted
    assert count_outliers({}, 0.25) == frozenset()


def test_no_bound_by_default():
    assert beyond_bound({"a": 1.0, "b": 1e9}, rounds_config(), NormReference()) == {}


@pytest.mark.parametrize("delta", [1e-5, 1e-20, 1e-300])
def test_honest_noise_is_within_the_bound_on_values_whatever_delta_is(delta):
    given = {"epsilon": 1e-3, "delta": delta, "metrics": "withheld"}
    privacy = resolve_config({f"privacy.{k}": v for k, v in given.items()}).privacy
    bound = largest_values({"w": torch.zeros(1)}, privacy)["w"]
    sigma = math.sqrt(2 * math.log(1.25 / delta)) / privacy.epsilon * 2 * privacy.clip_norm
    assert math.erfc(bound / sigma / math.sqrt(2)) < 2e-15  # for each entry


def test_the_cosine_is_in_double_precision():
    a, b = torch.tensor([1e5, 1.0, -1e5]), torch.tensor([1e5, 1.0, 1e5])
    assert cosine_of({"w": a}, {"w": b}) == pytest.approx(0.5e-10)
    assert cosine_of({"w": a}, {"w": torch.zeros(3)}) == 0


def test_the_bound_on_integers_is_inclusive_in_both_directions():
    sent = torch.tensor([5, 5])
    for change in (MAX_COUNTER_CHANGE, -MAX_COUNTER_CHANGE):
        assert far_counter({"n": sent + torch.tensor([0, change])}, {"n": sent}) == ""
    for change in (MAX_COUNTER_CHANGE + 1, -MAX_COUNTER_CHANGE - 1):
        reason = far_counter({"n": sent + torch.tensor([0, change])}, {"n": sent})
        assert reason.startswith(f"array 'n' differs by {MAX_COUNTER_CHANGE + 1} from what was")
