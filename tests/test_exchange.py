"""Sending and receiving over a grid that loses, delays and misplaces messages."""

import logging
import secrets
import sys
import threading
import time
from types import SimpleNamespace

import flwr.superlink.grid.http_grid as http_grid
import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from run_fixtures import wait_until

import server_app.exchange
from flower_adapter import (
    CLIENT_FAILED,
    NotPushedError,
    assign_message_id,
    assign_source_node,
    reply_bound,
)
from server_app.exchange import MAX_POLL_S, MAX_PULLS, RETURN_TIMEOUT_S, Exchange, Stops
from server_app.federation import exchange_of

pytestmark = pytest.mark.usefixtures("task_identity")
superlink = 1  # the source of a reply that it gives in a node's place


class ToyGrid:
    """Nodes answer when `answers` says so: node, times asked before -> what, or "".

    what: "reply"; "gone", "lost", "killed" or "large", errors; "slow", which blocks the pull until
    `release` is set; "unreadable", which makes it raise.

    Those in `unknown` are not even sent to.
    """

    def __init__(self, answers, unknown=()):
        self.answers, self.unknown = answers, unknown
        self.open: dict[str, Message] = {}
        self.pushes: list[int] = []
        self.release = threading.Event()

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
            message = self.open.get(message_id)
            if message is None:  # another pull has it
                continue
            node = message.metadata.dst_node_id
            what = self.answers(node, self.pushes.count(node) - 1)
            if what == "slow":
                del self.open[message_id]
                self.release.wait(20)
                self.open[message_id] = message
                what = "reply"
            if what == "unreadable":
                del self.open[message_id]
                raise ValueError("not an array")
            if what == "reply":
                found.append(
                    Message(RecordDict({"from": ConfigRecord({"n": node})}), reply_to=message)
                )
            elif what in ("gone", "lost", "killed", "mute", "large"):
                codes = {"gone": "NODE_UNAVAILABLE", "lost": "MESSAGE_UNAVAILABLE"}
                codes |= {"killed": "CLIENT_APP_CRASHED", "mute": "UNKNOWN"}
                codes |= {"large": "REPLY_MESSAGE_UNAVAILABLE"}
                reasons = {"gone": "no heartbeat", "mute": "no answer in time"}
                reasons |= {"large": "the reply has more than the bound of 10 bytes"}
                reason = reasons.get(what, "not found")
                error = Error(getattr(ErrorCode, codes[what]), reason)
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
    monkeypatch.setattr(server_app.exchange, "SLOW_PULL_S", 0.1)
    monkeypatch.setattr(server_app.exchange, "SILENCE_S", 0.1)
    monkeypatch.setattr(Stops, "take", lambda self: 0.0)  # which expects to run every second


class Clock:
    """Time that passes only while this thread sleeps, in place of the module `time`."""

    def __init__(self):
        self.now, self.thread = 0.0, threading.get_ident()

    def monotonic(self):
        return 1000 + self.now

    def sleep(self, seconds):
        if threading.get_ident() == self.thread:
            self.now += seconds
        else:  # a `Stops` that outlives its test
            time.sleep(seconds)


@pytest.fixture
def clock(monkeypatch):
    """The exchange's clock is a `Clock`, and each pull is made in the calling thread."""
    clock = Clock()

    def pull(exchange, message_ids, max_wait_s):
        return list(exchange.grid.pull_messages(message_ids)) if message_ids else []

    monkeypatch.setattr(server_app.exchange, "time", clock)
    monkeypatch.setattr(server_app.exchange, "Stops", lambda: SimpleNamespace(take=lambda: 0.0))
    monkeypatch.setattr(Exchange, "pull", pull)
    return clock


def test_every_message_has_one_reply_in_the_order_asked():
    grid = ToyGrid(lambda node, before: "reply")
    assert outcomes(Exchange(grid).ask(to(7, 5, 6), 5, "round 1")) == [(7, 7), (5, 5), (6, 6)]
    assert Exchange(grid).ask([], 5, "round 1") == []


def test_a_silent_client_costs_the_deadline_and_no_more(clock):
    grid = ToyGrid(lambda node, before: "" if node == 6 else "reply")
    replies = Exchange(grid).ask(to(5, 6), 0.4, "round 1")
    assert clock.now == pytest.approx(0.4)
    assert outcomes(replies) == [(5, 5), (6, "no answer within round-timeout = 0.4 seconds")]


def test_time_in_which_clients_train_in_this_process_does_not_count(clock):
    asked = []

    def answers(node, before):
        asked.append(node)
        if node == 5:
            clock.now += 10
        return "reply" if node == 5 or asked.count(6) > 1 else ""

    grid = ToyGrid(answers)
    grid.is_in_process = grid.has_own_clients = True
    assert outcomes(Exchange(grid).ask(to(5, 6), 4, "round 1")) == [(5, 5), (6, 6)]


def test_the_limit_is_for_each_of_the_clients_that_a_worker_trains_in_turn(clock):
    grid = ToyGrid(lambda node, before: "" if node == 6 else "reply" * (clock.now > 1.0))
    exchange = Exchange(grid, turns=lambda num_asked: num_asked + 1)
    replies = exchange.ask(to(5, 6), 0.4, "round 1")
    assert clock.now == pytest.approx(1.2)
    reason = "no answer within 3 x round-timeout = 1.2 seconds"
    assert outcomes(replies) == [(5, 5), (6, reason)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_limit_of_a_simulation_has_a_turn_for_the_message_of_a_worker_that_died(num_workers):
    """Each takes a whole turn, and the last one two: its worker dies at the end of the first."""
    grid = ToyGrid(lambda node, before: "reply")
    grid.is_in_process = True
    turns = exchange_of(grid, None, None, num_workers).turns
    for num in range(num_workers + 1, 10):
        idle_from = [0] * num_workers
        for _ in range(num + 1):
            idle_from[idle_from.index(min(idle_from))] += 1
        assert max(idle_from) <= turns(num) <= max(idle_from) + 1
    assert [turns(num) for num in range(1, num_workers + 1)] == [1] * num_workers
    assert exchange_of(grid, None, None, num_workers=0).turns(9) == 1  # trains in this process


@pytest.mark.parametrize(
    ("is_simulation", "pull_s", "first_s", "gap_s"),
    [
        (True, 1e-5, 0.01, 0.01),
        (True, 3e-4, 0.01, 0.06),
        (True, 0.01, 0.01, 0.5),
        (False, 1e-5, 0.1, 0.5),
    ],
)
def test_a_simulation_is_polled_as_often_as_costs_half_a_percent_of_a_core(
    clock, monkeypatch, is_simulation, pull_s, first_s, gap_s
):
    """It was every 0.5 s after the first two seconds: a round ended a quarter of a second late.

    A deployment is polled less often: each poll costs the SuperLink time.
    """
    gaps = []

    def sleep(seconds):
        gaps.append(seconds)
        clock.now += seconds

    def answers(node, before):
        clock.now += pull_s
        return "reply" if node == 6 or clock.now > 5 else ""

    monkeypatch.setattr(clock, "sleep", sleep)
    grid = ToyGrid(answers)
    grid.is_in_process = is_simulation
    assert outcomes(Exchange(grid).ask(to(5, 6), 60, "round 1")) == [(5, 5), (6, 6)]
    assert gaps[0] == first_s
    assert max(gaps) == pytest.approx(gap_s, rel=0.02)


def test_what_runs_meanwhile_runs_once_all_are_asked_and_costs_the_clients_no_time(clock):
    """A reply that came within the deadline counts, however long it has waited to be pulled."""
    seen = []
    grid = ToyGrid(lambda node, before: "" if node == 6 else "reply")

    def meanwhile():
        seen.append(list(grid.pushes))
        clock.sleep(0.5)

    replies = Exchange(grid).ask(to(5, 6), 0.4, "round 1", meanwhile=meanwhile)
    assert clock.now == 0.5
    assert seen == [[5, 6]]
    assert outcomes(replies) == [(5, 5), (6, "no answer within round-timeout = 0.4 seconds")]


def test_ask_returns_as_soon_as_all_have_replied(clock):
    Exchange(ToyGrid(lambda node, before: "reply")).ask(to(5, 6), 60, "round 1")
    assert clock.now == 0


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


@pytest.mark.parametrize(
    ("what", "named"), [("reply", ["client 6's reply to round 1"]), ("lost", [])]
)
def test_a_reply_is_late_until_it_comes_or_its_message_has_expired(what, named):
    answer = {6: ""}
    exchange = Exchange(ToyGrid(lambda node, before: answer.get(node, "reply")), "{}".format)
    exchange.ask(to(6), 0.05, "round 1")
    for number in range(9):
        exchange.ask(to(5), 5, f"round {number + 2}")
        exchange.drain()
    assert exchange.take_late() == []
    assert len(exchange.late) == 1
    answer[6] = what
    exchange.drain()
    assert exchange.take_late() == named
    assert exchange.late == {}


def test_an_error_from_the_superlink_counts_for_the_client_that_was_asked(clock):
    """In simulation no client returns, and none is waited for."""
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    assert outcomes(Exchange(grid).ask(to(5, 6), 5, "round 1")) == [(5, 5), (6, "no heartbeat")]
    assert clock.now == 0


def test_a_node_that_returns_with_its_id_is_asked_again(hurry, caplog):
    grid = ToyGrid(lambda node, before: "gone" if node == 6 and before == 0 else "reply")
    exchange = Exchange(grid, {5: "a", 6: "b"}.get, lambda nodes, timeout_s: {n: n for n in nodes})
    with caplog.at_level(logging.INFO, logger="keel.server"):
        replies = exchange.ask(to(5, 6), 5, "round 3")
    assert outcomes(replies) == [(5, 5), (6, 6)]
    assert grid.pushes == [5, 6, 6]
    assert caplog.messages == [
        "round 3: client b is not connected",
        "round 3: client b is connected again and asked again",
    ]


@pytest.mark.parametrize("what", ["gone", "mute"])
def test_a_node_that_says_it_is_not_connected_has_failed_and_is_not_asked_again(hurry, what):
    """Each time would be another message, and another private release."""
    grid = ToyGrid(lambda node, before: what if node == 6 else "reply")
    pull = grid.pull_messages

    def pull_from_nodes(message_ids):
        replies = pull(message_ids)
        for reply in replies:
            assign_source_node(reply, 6 if reply.has_error() else 5)
        return replies

    grid.pull_messages = pull_from_nodes
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {n: n for n in nodes})
    reason = "no heartbeat" if what == "gone" else "no answer in time"
    replies = exchange.ask(to(5, 6), 2, "round 3")
    assert outcomes(replies) == [(5, 5), (6, reason)]
    assert replies[1].error.code == CLIENT_FAILED
    assert grid.pushes == [5, 6]
    assert exchange.silent == set()


def test_a_client_that_returns_with_another_node_id_is_asked_there(hurry):
    back = iter([{}, {}, {6: 60}])
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    exchange = Exchange(grid, str, lambda nodes, timeout_s: next(back) if nodes == [6] else {})
    told = []
    replies = exchange.ask(
        to(5, 6), 5, "round 3", before_resend=lambda node: told.append((node, list(grid.pushes)))
    )
    assert outcomes(replies) == [(5, 5), (6, 60)]
    assert grid.pushes == [5, 6, 60]
    assert told == [(6, [5, 6])]  # before it is sent: a second private release counts


def test_a_query_during_a_round_lowers_no_bound_on_the_round_s_replies(hurry, monkeypatch):
    """A client that came back, or a stranger, cost all others updates above the query's 4 MiB."""
    module = sys.modules[__name__]
    for name in ("pull_objects", "inflate_object_from_contents"):  # as in the module of a grid
        monkeypatch.setattr(module, name, vars(http_grid)[name], raising=False)
    bounds = []

    def answers(node, before):
        if node == 5:
            bounds.append(module.pull_objects.max_bytes)
        return {5: "reply" if grid.pushes.count(70) else "", 6: "gone"}.get(node, "reply")

    def look(nodes, timeout_s):  # as the registry does
        Exchange(grid).ask(to(70), 1, "the roster", max_bytes=100)
        return {6: 60}

    grid = ToyGrid(answers)
    replies = Exchange(grid, str, look).ask(to(5, 6), 5, "round 3", max_bytes=1000)
    assert outcomes(replies) == [(5, 5), (6, 60)]
    assert set(bounds) == {1000}


def test_a_client_that_does_not_return_is_given_up_before_the_deadline(clock):
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {})
    assert outcomes(exchange.ask(to(5, 6), 60, "round 3")) == [(5, 5), (6, "no heartbeat")]
    assert RETURN_TIMEOUT_S <= clock.now < RETURN_TIMEOUT_S + 2 * MAX_POLL_S
    assert outcomes(exchange.ask(to(6), 10, "round 4")) == [(6, "no heartbeat")]
    assert exchange.silent == set()  # it was not there to answer


def test_a_client_that_returns_late_is_asked_while_others_are_awaited(clock):
    grid = ToyGrid(lambda node, before: "gone" if (node, before) == (6, 0) else "reply" * after(3))
    after = lambda num: clock.now > num * RETURN_TIMEOUT_S  # noqa: E731
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {6: 6} if after(2) else {})
    assert outcomes(exchange.ask(to(5, 6), 200, "round 3")) == [(5, 5), (6, 6)]


def test_a_look_for_a_client_costs_neither_the_deadline_nor_what_arrives_meanwhile(clock):
    """A new SuperNode that says nothing held a round for 30 seconds beyond its deadline."""

    def look(nodes, timeout_s):
        looks.append(clock.now)
        clock.sleep(min(30, timeout_s))
        return {}

    looks = []
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply" if looks else "")
    replies = Exchange(grid, str, look).ask(to(5, 6), 2, "round 1")
    assert clock.now == pytest.approx(2)
    assert outcomes(replies) == [(5, 5), (6, "no heartbeat")]


def test_a_client_that_returns_during_a_look_is_found_by_the_next(clock):
    """A stranger that says nothing took all of the time in which clients may return."""

    def look(nodes, timeout_s):
        looks.append(clock.now)
        clock.sleep(0 if looks[1:] else RETURN_TIMEOUT_S + 0.1)
        return {6: 60} if looks[1:] else {}

    looks = []
    grid = ToyGrid(lambda node, before: "gone" if node == 6 else "reply")
    assert outcomes(Exchange(grid, str, look).ask(to(5, 6), 90, "round 1")) == [(5, 5), (6, 60)]


def test_a_message_that_the_grid_refuses_is_an_error_reply(hurry):
    grid = ToyGrid(lambda node, before: "reply", unknown=[6])
    replies = Exchange(grid).ask(to(5, 6), 5, "round 1")
    assert outcomes(replies) == [(5, 5), (6, "its SuperNode is not connected")]
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {6: 60})
    assert outcomes(exchange.ask(to(5, 6), 5, "round 1")) == [(5, 5), (6, 60)]


@pytest.mark.end_to_end  # waits for three seconds
def test_a_client_that_sends_without_end_costs_the_deadline_and_is_named(hurry, caplog):
    """Flower's pull returns when it has all arrays, or after two hours."""
    pulls, most_at_once = [], 0

    def slow(message_ids):
        nonlocal most_at_once
        pulls.append(1)
        most_at_once = max(most_at_once, len(pulls))
        replies = pull(message_ids)
        grid.release.wait(20 * (not replies))  # so that those behind the slow one are slow too
        pulls.pop()
        return replies

    grid = ToyGrid(lambda node, before: "slow" if node == 6 else "reply")
    pull, grid.pull_messages = grid.pull_messages, slow
    exchange = Exchange(grid, {5: "a", 6: "b", 7: "c"}.get)
    started = time.monotonic()
    replies = exchange.ask(to(5, 6, 7), 3.0, "round 1")
    assert 3.0 <= time.monotonic() - started < 15
    assert outcomes(replies)[1] == (6, "no answer within round-timeout = 3 seconds")
    assert outcomes(replies)[2] == (7, 7)  # behind the slow one: pulled by another thread
    assert 2 <= most_at_once <= MAX_PULLS
    assert outcomes(exchange.ask(to(5), 5, "round 2")) == [(5, 5)]
    grid.release.set()

    def has_come():
        exchange.drain()
        return not exchange.late

    with caplog.at_level(logging.WARNING, logger="keel.server"):
        wait_until(has_come)
    assert "client b's reply to round 1" in exchange.take_late()


def test_a_late_reply_that_still_arrives_does_not_hold_up_the_next_round(hurry, monkeypatch):
    def slow(message_ids):
        replies = pull(message_ids)
        grid.release.wait(20 * (not replies))
        return replies

    grid = ToyGrid(lambda node, before: "slow" if node == 6 else "reply")
    pull, grid.pull_messages = grid.pull_messages, slow
    exchange = Exchange(grid, str)
    exchange.ask(to(6), 0.05, "round 1")
    monkeypatch.setattr(server_app.exchange, "SLOW_PULL_S", 60.0)
    assert outcomes(exchange.ask(to(5), 3, "round 2")) == [(5, 5)]
    grid.release.set()


def test_a_late_reply_that_comes_while_others_are_awaited_is_named(hurry):
    grid = ToyGrid(
        lambda node, before: "slow" if node == 6 else "reply" * len(exchange.arrived_late)
    )
    exchange = Exchange(grid, str)
    exchange.ask(to(6), 0.05, "round 1")
    replies = exchange.ask(to(5), 3, "round 2", meanwhile=grid.release.set)
    assert outcomes(replies) == [(5, 5)]
    assert exchange.take_late() == ["client 6's reply to round 1"]


def test_time_in_which_the_superlink_answers_nothing_does_not_count(clock):
    is_away = lambda: clock.now < 60  # noqa: E731
    grid = ToyGrid(lambda node, before: "" if is_away() else "reply")
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {}, lambda: 6.0 if is_away() else 0.0)
    assert outcomes(exchange.ask(to(5), 40, "round 1")) == [(5, 5)]
    assert 60 <= clock.now <= 60 + MAX_POLL_S


def test_time_in_which_the_superlink_takes_no_messages_does_not_count(clock):
    """They have expired then; it refuses them."""

    class Away(ToyGrid):
        def push_messages(self, messages):
            if not self.pushes:
                clock.sleep(600)
                silences.append(600.0)
                self.pushes.append(0)
                return []
            return super().push_messages(messages)

    silences: list[float] = []
    grid = Away(lambda node, before: "reply" if clock.now >= 790 else "")
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {node: node for node in nodes})
    exchange.take_silence_s = lambda: silences.pop() if silences else 0.0
    assert outcomes(exchange.ask(to(5), 200, "round 1")) == [(5, 5)]


@pytest.mark.parametrize("returns_s", [61, 175, 181])
@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("is_before", [False, True])
def test_after_a_silence_of_the_superlink_clients_have_two_minutes_to_return(
    clock, returns_s, is_gone, is_before
):
    """As after an expired certificate, where the SuperNodes have ended."""
    is_away = lambda: clock.now < 60  # noqa: E731
    is_back = lambda: clock.now >= returns_s  # noqa: E731
    says = lambda: "gone" if is_gone and not is_away() else ""  # noqa: E731
    grid = ToyGrid(lambda node, before: "reply" if is_back() else says())
    returned = lambda nodes, timeout_s: {node: node for node in nodes if is_back()}  # noqa: E731
    exchange = Exchange(grid, str, returned, lambda: 6.0 if is_away() else 0.0)
    silences = [60.0]
    if is_before:
        clock.now = 60.0
    exchange.take_silence_s = lambda: 0.0 if is_away() or not silences else silences.pop()
    [(_, found)] = outcomes(exchange.ask(to(5), 10, "round 1"))
    assert (found == 5) == (returns_s < 180)


@pytest.mark.parametrize(("every_s", "until_s"), [(0, 120), (100, 220)])
def test_a_superlink_that_is_slow_again_and_again_does_not_keep_a_round_open(
    clock, every_s, until_s
):
    """A client that never replies would hold it for ever."""
    exchange = Exchange(ToyGrid(lambda node, before: ""), str, lambda nodes, timeout_s: {})
    next_at = 0.0

    def take_silence_s():
        nonlocal next_at
        if clock.now < next_at:
            return 0.0
        next_at += every_s
        return 6.0

    exchange.take_silence_s = take_silence_s
    [(_, found)] = outcomes(exchange.ask(to(5), 10, "round 1"))
    assert found.startswith("no answer within")
    assert clock.now == pytest.approx(until_s, abs=1)


def test_a_client_that_went_away_before_the_superlink_has_as_long_to_return(clock):
    """Its 30 seconds ended while nobody could return."""
    is_silent = lambda: 10 < clock.now < 60  # noqa: E731
    is_back = lambda: clock.now >= 170  # noqa: E731
    silences = [50.0]
    grid = ToyGrid(lambda node, before: "reply" if is_back() else "gone")
    returned = lambda nodes, timeout_s: {node: node for node in nodes if is_back()}  # noqa: E731
    exchange = Exchange(grid, str, returned, lambda: 6.0 if is_silent() else 0.0)
    exchange.take_silence_s = lambda: silences.pop() if silences and clock.now >= 60 else 0.0
    assert outcomes(exchange.ask(to(5), 100, "round 1")) == [(5, 5)]


def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch):
    stops, now = Stops(), time.monotonic()
    assert stops.take() == 0.0
    monkeypatch.setattr(stops, "seen_at", now - 95)
    assert stops.take() == pytest.approx(95, abs=1)
    assert stops.take() == 0.0  # said once


@pytest.mark.parametrize("is_simulation", [False, True])
def test_a_round_continues_after_a_stop_of_this_process(clock, is_simulation):
    is_stopped = lambda: clock.now < 60  # noqa: E731
    grid = ToyGrid(lambda node, before: "" if is_stopped() else "reply")
    grid.is_in_process = is_simulation
    exchange = Exchange(grid)
    exchange.stopped_s = lambda: 6.0 if is_stopped() else 0.0
    assert outcomes(exchange.ask(to(5), 40, "round 1")) == [(5, 5)]
    assert 60 <= clock.now <= 60 + MAX_POLL_S


@pytest.mark.parametrize("is_simulation", [False, True])
def test_a_message_of_a_simulation_outlasts_a_stop_and_a_late_reply(is_simulation):
    """Flower drops an expired one and its reply. A SuperNode that returns must not train on it."""
    grid, messages = ToyGrid(lambda node, before: "reply"), to(5)
    grid.is_in_process, messages[0].metadata.ttl = is_simulation, 5.0
    Exchange(grid).ask(messages, 5.0, "round 1")
    assert messages[0].metadata.ttl == pytest.approx(5.0 + is_simulation * 30 * 86400)


def test_the_thread_that_notes_stops_ends_with_them(monkeypatch):
    monkeypatch.setattr(server_app.exchange, "TICK_S", 0.01)
    before = set(threading.enumerate())
    stops = Stops()
    (thread,) = set(threading.enumerate()) - before
    del stops
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("what", "why"), [("lost", "reply was lost"), ("killed", "ClientApp has ended")]
)
def test_a_reply_that_was_lost_is_asked_for_again_twice_at_most(hurry, caplog, what, why):
    grid = ToyGrid(lambda node, before: what if node == 6 or before == 0 else "reply")
    resent = []
    exchange = Exchange(grid, {5: "a", 6: "b"}.get, lambda nodes, timeout_s: {})
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        replies = exchange.ask(to(5, 6), 5, "round 1", before_resend=resent.append)
    assert outcomes(replies) == [(5, 5), (6, "not found")]
    assert sorted(resent) == [5, 6, 6]
    assert sorted(set(caplog.messages)) == [
        f"round 1: client a's {why}: asked again",
        f"round 1: client b's {why}: asked again",
    ]


def test_a_reply_that_is_too_large_is_named_and_not_asked_for_again(hurry):
    grid = ToyGrid(lambda node, before: "large")
    exchange = Exchange(grid, returned=lambda nodes, timeout_s: {})
    replies = exchange.ask(to(5), 5, "round 1", max_bytes=10)
    assert outcomes(replies) == [(5, "the reply has more than the bound of 10 bytes")]
    assert grid.pushes == [5]


@pytest.mark.parametrize(("at_s", "ttl_s"), [(20.0, [30.0]), (44.0, [6.0]), (45.1, [])])
def test_what_is_sent_again_expires_with_the_round_and_not_in_its_last_tenth(clock, at_s, ttl_s):
    grid = ToyGrid(lambda node, before: "reply" if before else "killed" * (clock.now >= at_s))
    push, sent = grid.push_messages, []

    def note(messages):
        sent.extend(message.metadata for message in messages)
        return push(messages)

    grid.push_messages = note
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {})
    exchange.ask(to(5), 50.0, "round 1", max_bytes=1000)
    assert [about.ttl for about in sent[1:]] == pytest.approx(ttl_s, abs=0.6)
    assert {reply_bound(about.group_id) for about in sent} == {1000}


def test_a_reply_that_another_pull_has_just_taken_is_not_asked_for_again(hurry, monkeypatch):
    """Two pulls at once, when one is slow: the second finds a reply that the first deletes."""
    monkeypatch.setattr(server_app.exchange, "MAX_POLL_S", 0.1)
    grid = ToyGrid(lambda node, before: "reply")
    pull, pulls = grid.pull_messages, []

    def both(message_ids):
        pulls.append(1)
        if len(pulls) == 1:  # takes the reply, and takes long
            replies = pull(message_ids)
            time.sleep(0.4)
            return replies
        lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
        return [] if len(pulls) > 2 else [Message(lost, reply_to=asked)]

    grid.pull_messages = both
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {})
    [asked] = to(5)
    assert outcomes(exchange.ask([asked], 5, "round 1")) == [(5, 5)]
    assert grid.pushes == [5]


def test_a_reply_that_arrives_together_with_word_that_it_is_gone_is_taken(hurry, monkeypatch):
    """As above, but both pulls end while nobody looks, the second one first."""
    for name, value in {"MAX_POLL_S": 0.2, "DEPLOYED_POLL_S": 0.2, "MAX_PULLS": 2}.items():
        monkeypatch.setattr(server_app.exchange, name, value)
    grid, second_ended = ToyGrid(lambda node, before: "reply"), threading.Event()
    pull, pulls = grid.pull_messages, []

    def both(message_ids):
        pulls.append(1)
        if len(pulls) == 1:
            replies = pull(message_ids)
            second_ended.wait(20)
            time.sleep(0.02)
            return replies
        time.sleep(0.3)  # longer than the exchange looks, shorter than until it looks again
        second_ended.set()
        lost = Error(ErrorCode.MESSAGE_UNAVAILABLE, "not found")
        return [Message(lost, reply_to=asked)]

    grid.pull_messages = both
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {})
    [asked] = to(5)
    assert outcomes(exchange.ask([asked], 5, "round 1")) == [(5, 5)]
    assert grid.pushes == [5]


@pytest.mark.end_to_end  # waits for three seconds
def test_a_reply_that_cannot_be_read_costs_its_client_alone(hurry):
    """From then on each is pulled by itself: Flower loses those that it has read before one."""
    grid = ToyGrid(lambda node, before: "unreadable" if node == 5 else "reply" * (len(nums) > 1))
    pull, nums = grid.pull_messages, []

    def note(message_ids):
        nums.append(len(message_ids))
        return pull(message_ids)

    grid.pull_messages = note
    assert outcomes(Exchange(grid, str).ask(to(5, 6), 3, "round 1")) == [
        (5, "no answer within round-timeout = 3 seconds"),
        (6, 6),
    ]
    assert nums[0] == 2
    assert set(nums[1:]) == {1}


def test_an_error_of_an_earlier_rounds_pull_does_not_end_the_run(hurry):
    class Broken(ToyGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            if replies and self.pushes == [6]:
                raise httpx.ReadError("connection reset by peer")
            return replies

    grid = Broken(lambda node, before: "slow" if node == 6 else "reply")
    exchange = Exchange(grid, str)
    exchange.ask(to(6), 0.05, "round 1")
    grid.release.set()
    wait_until(lambda: not exchange.pulled.empty())
    assert outcomes(exchange.ask(to(5), 5, "round 2")) == [(5, 5)]


def test_a_superlink_that_is_gone_for_good_ends_the_run():
    class Gone(ToyGrid):
        def pull_messages(self, message_ids):
            raise httpx.ConnectError("[Errno 111] Connection refused")

    with pytest.raises(httpx.ConnectError):
        Exchange(Gone(lambda node, before: "reply")).ask(to(5), 5, "round 1")


def test_messages_that_could_not_be_sent_are_sent_again(hurry):
    class Refusing(ToyGrid):
        def push_messages(self, messages):
            if not self.pushes:
                self.pushes.append(0)
                raise NotPushedError("object", 1, "session")
            return super().push_messages(messages)

    grid = Refusing(lambda node, before: "reply")
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {node: node for node in nodes})
    assert outcomes(exchange.ask(to(5, 6), 5, "round 1")) == [(5, 5), (6, 6)]


@pytest.mark.parametrize("what", ["gone", "killed"])
def test_a_message_that_could_not_be_sent_again_is_sent_once_more(hurry, what):
    class Refusing(ToyGrid):
        def push_messages(self, messages):
            if len(self.pushes) == 1:
                self.pushes.append(0)
                return []
            return super().push_messages(messages)

    grid = Refusing(lambda node, before: "reply" if before else what)
    exchange = Exchange(grid, str, lambda nodes, timeout_s: {node: node for node in nodes})
    assert outcomes(exchange.ask(to(5), 5, "round 1")) == [(5, 5)]
    assert grid.pushes == [5, 0, 5]
