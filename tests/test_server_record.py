"""The losses of a round's line, whatever its clients send as metrics."""

import json

import pytest

from protocol.messages import TrainReply
from server_app.record import MAX_LOSS_TERMS, split, training_fields
from strategies.validation import RoundReport


def line_of(*all_metrics, weights=None, known=None):
    replies = [TrainReply(f"c{i}", 1, {}, {}, m) for i, m in enumerate(all_metrics)]
    weights = weights or [100.0] * len(replies)
    known = set() if known is None else known  # terms of the run so far
    return training_fields(1, RoundReport(accepted=replies), 0, weights, known, {})


def test_losses_are_averaged_by_the_weights_of_those_that_sent_them():
    line = line_of({"loss.a": 1.0}, {"loss.a": 4.0, "loss.b": 3.0}, weights=[2.0, 1.0])
    assert line["losses"] == {"a": 2.0, "b": 3.0}
    line = line_of({"loss.a": 2.0}, {"loss.a": 9.0, "loss.b": 1.0}, weights=[1.0, 0.0])
    assert line["losses"] == {"a": 2.0}


def test_fresh_names_in_every_round_add_no_more_losses_to_a_run():
    known: set[str] = set()
    recorded = set()
    for number in range(3):
        fresh = {f"loss.a{number}-{i}": 1.0 for i in range(MAX_LOSS_TERMS)}
        line = line_of({"loss.b": 2.0}, {"loss.b": 2.0} | fresh, known=known)
        assert line["losses"]["b"] == 2.0
        recorded |= line["losses"].keys()
    assert len(recorded) == MAX_LOSS_TERMS


def test_many_and_large_losses_leave_a_line_of_a_few_numbers():
    largest = {"loss.supervised": 3.4e38, "seconds": 3.4e38, "cpu-seconds": 3.4e38}
    many = largest | {f"loss.a{i}": 1.0 for i in range(250)}
    short, _ = split(line_of(*([largest] * 1000), many))
    assert short["losses"]["supervised"] == pytest.approx(3.4e38)
    assert len(short["losses"]) == MAX_LOSS_TERMS
    assert "null" not in json.dumps([short["losses"], short["client_seconds"]])
