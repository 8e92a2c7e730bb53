"""The losses of a round's line, whatever its clients send as metrics."""

import json

from protocol.messages import TrainReply
from server_app.record import MAX_LOSS_TERMS, split, training_fields
from strategies.validation import RoundReport


def line_of(known, *all_metrics, weights=None):
    replies = [TrainReply(f"c{i}", 1, {}, {}, m) for i, m in enumerate(all_metrics)]
    weights = weights or [100.0] * len(replies)
    return training_fields(1, RoundReport(accepted=replies), 0, weights, known, {})


def test_losses_are_averaged_by_the_weights_of_those_that_sent_them():
    line = line_of(set(), {"loss.a": 1.0}, {"loss.a": 4.0, "loss.b": 3.0}, weights=[2.0, 1.0])
    assert line["losses"] == {"a": 2.0, "b": 3.0}
    line = line_of(set(), {"loss.a": 2.0}, {"loss.a": 9.0, "loss.b": 1.0}, weights=[1.0, 0.0])
    assert line["losses"] == {"a": 2.0}


def test_a_term_that_comes_later_is_recorded_and_fresh_names_do_not_pile_up():
    known: set[str] = set()
    honest = {"loss.supervised": 2.0}
    line_of(known, honest, honest)
    assert line_of(known, honest, honest | {"loss.penalty": 3.0})["losses"]["penalty"] == 3.0
    for server_round in range(3):
        fresh = {f"loss.a{server_round}-{i}": 1.0 for i in range(255)}
        assert line_of(known, honest, fresh)["losses"]["supervised"] == 2.0
        assert len(known) <= MAX_LOSS_TERMS


def test_the_largest_metrics_leave_a_line_of_numbers():
    largest = {"loss.a": 3.4e38, "seconds": 3.4e38, "cpu-seconds": 3.4e38}
    short, _ = split(line_of(set(), *([largest] * 1000)))
    assert "null" not in json.dumps([short["losses"], short["client_seconds"]])
