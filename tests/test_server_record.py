"""A round's line in the history, whatever its clients send as metrics."""

import json

from protocol.messages import TrainReply
from server_app.history import finite_or_null
from server_app.record import MAX_LOSS_TERMS, training_fields
from strategies.average import RoundReport


def line_of(known, *all_metrics):
    replies = [TrainReply(f"c{i}", 1, {}, {}, m) for i, m in enumerate(all_metrics)]
    return training_fields(1, RoundReport(accepted=replies), 0, [100.0] * len(replies), known)


def test_fresh_names_of_losses_do_not_pile_up_over_the_rounds():
    known: dict[str, int] = {}
    honest = {"loss.supervised": 2.0, "loss.contrast": 1.0}
    for server_round in range(8):
        fresh = {f"loss.a{server_round}-{i}": 1.0 for i in range(255)}
        losses = line_of(known, honest, fresh, honest)["losses"]
        assert (losses["supervised"], losses["contrast"]) == (2.0, 1.0)
        assert len(known) == MAX_LOSS_TERMS
    assert len(losses) == 2


def test_one_client_cannot_keep_out_a_term_that_comes_later():
    """MOON's clients send `penalty` from the second time on that they train: few at first."""
    first, later = {"loss.supervised": 2.0}, {"loss.supervised": 2.0, "loss.penalty": 3.0}
    many = first | {f"loss.a{i}": 1.0 for i in range(255)}
    for num_later, expected in ((1, None), (2, 3.0), (3, 3.0)):
        known: dict[str, int] = {}
        line_of(known, first, first, first, many)
        round_2 = (num_later * [later] + 3 * [first])[:3]
        assert line_of(known, *round_2, many)["losses"].get("penalty") == expected
        line = line_of(known, later, later, later, many)
        assert line["losses"]["penalty"] == 3.0
        assert len(known) == MAX_LOSS_TERMS
        assert line_of(known, later, first, first, many)["losses"]["penalty"] == 3.0  # it stays


def test_terms_of_several_clients_are_replaced_by_none():
    known: dict[str, int] = {}
    names = [f"loss.a{i}" for i in range(MAX_LOSS_TERMS)]
    line_of(known, *2 * [dict.fromkeys(names, 1.0)])
    line_of(known, *3 * [{"loss.b": 1.0}])
    assert [*known] == sorted(names)


def test_a_term_that_only_a_client_of_weight_0_sends_is_not_recorded():
    replies = [
        TrainReply("a", 1, {}, {}, {"loss.supervised": 2.0}),
        TrainReply("b", 1, {}, {}, {"loss.supervised": 9.0, "loss.evil": 1.0}),
    ]
    line = training_fields(1, RoundReport(accepted=replies), 0, [10.0, 0.0], {})
    assert line["losses"] == {"supervised": 2.0}


def test_a_term_that_comes_later_is_recorded_and_missing_ones_stay_known():
    known: dict[str, int] = {}
    line_of(known, {"loss.supervised": 2.0, "loss.x": 1.0})
    assert line_of(known, {"loss.supervised": 2.0})["losses"] == {"supervised": 2.0}
    later = line_of(known, {"loss.supervised": 2.0, "loss.penalty": 3.0})["losses"]
    assert later == {"penalty": 3.0, "supervised": 2.0}


def test_the_largest_metrics_leave_a_line_of_numbers():
    largest = {"loss.a": 3.4e38, "seconds": 3.4e38, "cpu-seconds": 3.4e38}
    line = finite_or_null(line_of({}, *([largest] * 1000)))
    assert "null" not in json.dumps([line["losses"], line["client_seconds"]])
