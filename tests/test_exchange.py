"""Sending and receiving over a grid that loses, delays and misplaces messages."""

import logging
import secrets
import time

import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

import server_app.exchange
from protocol.flower_compat import assign_message_id, assign_source_node
from server_app.exchange import Exchange

pytestmark = pytest.mark.usefixtures("task_identity")
superlink = 1  # the source of a reply that it gives in a node's place


class ToyGrid:
    """Nodes answer when `answers` says so: node, times asked before -> "reply", "gone" or "".

    Those in `unknown` are not even sent to.
    """

    def __init__(self, answers, unknown=()):
        self.answers, self.unknown = answers, unknown
        self.open: dict[str, Message] = {}
        self.pushes: list[int] = []

    def push_messages(self, messages):
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            assign_message_id(message, secrets.token_hex(8))
            self.pushes.append(node)
            if node not in self.unknown:
                self.open[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        found = []
        for message_id in list(message_ids):
            message = self.open[message_id]
            node = message.metadata.dst_node_id
            what = self.answers(node, self.pushes.count(node) - 1)
            if what == "reply":
                found.append(
                    Message(RecordDict({"from": ConfigRecord({"n": node})}), reply_to=message)
                )
            elif what == "gone":
                error = Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat")
                found.append(Message(error, reply_to=message))
                assign_source_node(found[-1], superlink)
        for reply in found:
            del self.open[reply.metadata.reply_to_message_id]
        return found


def to(*nodes):
    return [
        Message(RecordDict(), dst_node_id=node, message_type=MessageType.TRAIN) for node in nodes
    ]


def outcomes(replies):
    """(source, number in the reply or reason of the error) of each reply."""
    return [
        (
            r.metadata.src_node_id,
            r.error.reason if r.has_error() else r.content.config_records["from"]["n"],
        )
        for r in replies
    ]


@pytest.fixture
def hurry(monkeypatch):
    """Timeouts of hundredths instead of seconds."""
    monkeypatch.setattr(server_app.exchange, "RETURN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server_app.exchange, "LOOK_EVERY_S", 0.02)


def test_every_message_has_one_reply_in_the_order_asked():
    grid = ToyGrid(lambda node, before: "reply")
    assert outcomes(Exchange(grid).ask(to(7, 5, 6), 5, "round 1")) == [(7, 7), (5, 5), (6, 6)]
    assert Exchange(grid).ask([], 5, "round 1") == []


def test_a_silent_client_costs_the_deadline_and_no_more():
    grid = ToyGrid(lambda node, before: "" if node == 6 else "reply")
    started = time.monotonic()
    replies = Exchange(grid).ask(to(5, 6), 0.4, "round 1")
    assert 0.4 <= time.monotonic() - started < 2
    assert outcomes(replies) == [(5, 5), (6, "no answer within round-timeout = 0.4 seconds")]


def test_ask_returns_as_soon_as_all_have_replied():
    grid = ToyGrid(lambda node, before: "reply")
    started = time.monotonic()
    Exchange(grid).ask(to(5, 6), 60, "round 1")
    assert time.monotonic() - started < 1


def test_a_late_reply_is_named_and_not_used(caplog):
    late = {"is": "not there"}
    grid = ToyGrid(lambda node, before: "" if node == 6 and late["is"] == "not there" else "reply")
    exchange = Exchange(grid, {5: "a", 6: "b"}.get)
    exchange.ask(to(5, 6), 0.1, "round 1")
    late["is"] = "there"
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        replies = exchange.ask(to(5), 5, "round 2")
    assert outcomes(replies) == [(5, 5)]
    assert caplog.messages == ["client b's reply to round 1 came too late and is not used"]
    assert exchange.take_late() == ["client b's reply to round 1"]
    assert exchange.take_late() == []
    assert exchange.late == {}
    caplog.clear()
    exchange.ask(to(5), 5, "round 3")
    assert caplog.messages == []


def test_a_reply_that_never_comes_is_forgotten_after_some_rounds():
    exchange = Exchange(ToyGrid(lambda node, before: "" if node == 6 else "reply"))
    exchange.ask(to(6), 0.05, "round 1")
    assert len(exchange.late) == 1
    for number in range(server_app.exchange.MAX_LATE_ASKS + 1):
        exchange.ask(to(5), 5, f"round {number + 2}")
    assert exchange.late == {}


def test_an_error_from_the_superlink_counts_for_the_client_that_was_asked():
    """In simulation no client returns."""
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    assert outcomes(Exchange(grid).ask(to(5, 6), 5, "round 1")) == [(5, 5), (6, "no heartbeat")]


def test_a_node_that_returns_with_its_id_is_asked_again(hurry, caplog):
    grid = ToyGrid(lambda node, before: "gone" if node == 6 and before == 0 else "reply")
    exchange = Exchange(grid, {5: "a", 6: "b"}.get, lambda nodes: {n: n for n in nodes})
    with caplog.at_level(logging.INFO, logger="keel.server"):
        replies = exchange.ask(to(5, 6), 5, "round 3")
    assert outcomes(replies) == [(5, 5), (6, 6)]
    assert grid.pushes == [5, 6, 6]
    assert caplog.messages == [
        "round 3: client b is not connected",
        "round 3: client b is connected again and asked again",
    ]


def test_a_client_that_returns_with_another_node_id_is_asked_there(hurry):
    back = iter([{}, {}, {6: 60}])
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    exchange = Exchange(grid, str, lambda nodes: next(back) if nodes == [6] else {})
    told = []
    exchange.resent = lambda node: told.append((node, list(grid.pushes)))
    assert outcomes(exchange.ask(to(5, 6), 5, "round 3")) == [(5, 5), (60, 60)]
    assert grid.pushes == [5, 6, 60]
    assert told == [(6, [5, 6])]  # before it is sent: a second private release counts


def test_a_client_that_does_not_return_is_given_up_before_the_deadline(hurry):
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    exchange = Exchange(grid, str, lambda nodes: {})
    started = time.monotonic()
    assert outcomes(exchange.ask(to(5, 6), 60, "round 3")) == [(5, 5), (6, "no heartbeat")]
    assert 0.3 <= time.monotonic() - started < 5


def test_a_message_that_the_grid_refuses_is_an_error_reply(hurry):
    grid = ToyGrid(lambda node, before: "reply", unknown=[6])
    replies = Exchange(grid).ask(to(5, 6), 5, "round 1")
    assert outcomes(replies) == [(5, 5), (6, "its SuperNode is not connected")]
    exchange = Exchange(grid, str, lambda nodes: {6: 60})
    assert outcomes(exchange.ask(to(5, 6), 5, "round 1")) == [(5, 5), (60, 60)]
