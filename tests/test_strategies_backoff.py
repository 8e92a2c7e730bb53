"""Rests: a client that fails time after time is left alone for a while, and nobody notices else."""

import json

import pytest

from strategies.backoff import Backoff

clients = ["a", "b", "c"]


def test_k_failures_in_a_row_rest_a_client_from_the_next_round_on():
    backoff = Backoff(backoff_after=2, backoff_rounds=3)
    assert backoff.note(1, ["b", "c"], ["a"]) == []
    assert backoff.backed_off(2, clients, 1) == set()
    assert backoff.note(2, ["b", "c"], ["a"]) == ["a"]
    resting = [r for r in range(1, 10) if "a" in backoff.backed_off(r, clients, 1)]
    assert resting == [3, 4, 5]


def test_a_success_clears_the_count_and_one_failure_after_a_rest_is_enough():
    backoff = Backoff(backoff_after=2, backoff_rounds=1)
    for number, is_good in enumerate((False, True, False), start=1):
        good, failed = (["a"], []) if is_good else ([], ["a"])
        assert backoff.note(number, good, failed) == []
    assert backoff.note(4, [], ["a"]) == ["a"]
    assert backoff.backed_off(5, clients, 1) == {"a"}
    assert backoff.note(6, [], ["a"]) == ["a"]
    assert backoff.note(8, ["a"], []) == []
    assert backoff.note(9, [], ["a"]) == []


def test_a_success_during_a_rest_ends_it():
    """It was sampled because too few others were left."""
    backoff = Backoff(backoff_after=1, backoff_rounds=5)
    assert backoff.note(1, [], ["a"]) == ["a"]
    assert backoff.backed_off(2, clients, 3) == set()
    assert backoff.note(2, ["a"], []) == []
    assert backoff.backed_off(3, clients, 1) == set()


def test_never_with_zero():
    backoff = Backoff(backoff_after=0, backoff_rounds=3)
    for number in range(1, 9):
        assert backoff.note(number, [], clients) == []
        assert backoff.backed_off(number + 1, clients, 1) == set()


@pytest.mark.parametrize(
    ("failing", "at_least", "backed_off"),
    [("ab", 1, "ab"), ("ab", 2, ""), ("abc", 1, ""), ("abc", 0, "abc")],
)
def test_nobody_is_backed_off_where_too_few_would_be_left(failing, at_least, backed_off):
    backoff = Backoff(backoff_after=1, backoff_rounds=3)
    backoff.note(1, [], failing)
    assert backoff.backed_off(2, clients, at_least) == set(backed_off)


def test_its_state_does_not_depend_on_the_order_of_a_set():
    """That of strings differs from process to process, and the state is in the checkpoint."""
    states = []
    for failed in (["a", "b", "c"], ["c", "a", "b"]):
        backoff = Backoff(backoff_after=2, backoff_rounds=3)
        backoff.note(1, [], failed)
        states.append(json.dumps(backoff.state()))
    assert states[0] == states[1]


def test_it_goes_on_from_its_state():
    backoff, other = Backoff(2, 3), Backoff(2, 3)
    for number in (1, 2):
        backoff.note(number, ["c"], ["a/b"])
    backoff.note(3, ["c"], ["d"])
    other.load(backoff.state())
    assert (other.failures, other.last_rounds) == ({"a/b": 2, "d": 1}, {"a/b": 5})
