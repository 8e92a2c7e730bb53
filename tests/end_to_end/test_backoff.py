"""Clients that back off, in whole runs."""

import logging

import pytest
from flwr.app import MessageType
from method_fixtures import METHODS
from run_fixtures import (
    SMALL,
    assert_same_run,
    final_model,
    history_of,
    resume,
    same_bits,
    summary_of,
)

import client_app.app
from server_app.federation import run_federation
from server_app.inline import InlineGrid, simulated_nodes


@pytest.fixture
def failing(monkeypatch):
    """failing(rounds): client-0001 fails in these; what it gives holds when it was asked."""
    train = METHODS["fedavg"].train
    asked: list[int] = []

    def in_rounds(rounds):
        def train_or_fail(method, now):
            if now.client == "client-0001":
                asked.append(now.round)
                if now.round in rounds:
                    raise OSError("no power")
            return train(method, now)

        monkeypatch.setattr(METHODS["fedavg"], "train", train_or_fail)
        asked.clear()
        return asked

    return in_rounds


short = {"local-epochs": 0, "evaluate-global": False}


def test_a_client_that_is_dead_is_asked_k_times_and_once_after_every_rest(run, failing, caplog):
    asked = failing(range(1, 100))
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run(short | {"num-rounds": 12, "backoff-after": 2, "backoff-rounds": 3})
    assert asked == [1, 2, 6, 10]
    history = history_of(folder)
    assert [line["round"] for line in history if line["backed_off"]] == [3, 4, 5, 7, 8, 9, 11, 12]
    assert [line["round"] for line in history if line["left_out"]] == [1, 2, 6, 10]
    assert all(len(line["participants"]) == 3 for line in history)
    lines = [text for text in caplog.messages if "in a row" in text]
    assert (
        lines[0]
        == "round 2: client client-0001 failed 2 times in a row; it is not sampled for 3 rounds"
    )
    assert len(lines) == 3


def test_a_client_that_comes_back_takes_part_again(run, failing):
    asked = failing(range(1, 4))
    folder = run(short | {"num-rounds": 10})  # the defaults: 3 failures, 5 rounds
    assert asked == [1, 2, 3, 9, 10]
    assert len(history_of(folder)[-1]["participants"]) == 4
    assert summary_of(folder)["left_out"] == 3


def test_where_everybody_fails_nobody_rests(run, monkeypatch):
    train = METHODS["fedavg"].train

    def sometimes(method, now):
        if now.round in (1, 2) and now.client != "client-0000":
            raise OSError("no power")
        return train(method, now)

    monkeypatch.setattr(METHODS["fedavg"], "train", sometimes)
    given = {"num-rounds": 3, "backoff-after": 1, "min-replies": 1, "fraction-train": 1.0}
    folder = run(short | given)
    assert [line["backed_off"] for line in history_of(folder)][1] == [
        *("client-0001", "client-0002", "client-0003")
    ]
    with pytest.raises(RuntimeError, match="min-replies = 2"):  # all are asked, and three fail
        run(short | given | {"min-replies": 2})


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_run_that_is_resumed_rests_the_same_clients(run, failing, cut):
    keys = {"num-rounds": 7, "backoff-after": 2, "backoff-rounds": 2, "fraction-train": 0.75}
    failing({1, 2, 3, 4, 5})
    whole = run(keys)
    parts = run(keys | {"num-rounds": cut})
    resume(parts, num_rounds=7)
    assert any(line["backed_off"] for line in history_of(whole))
    assert_same_run(parts, whole)


def test_sampling_is_as_without_rests_as_long_as_nobody_fails(run):
    keys = {"num-rounds": 3, "fraction-train": 0.5}
    one, other = run(keys), run(keys | {"backoff-after": 0})
    assert same_bits(final_model(one), final_model(other))
    assert SMALL["num-rounds"] == 2


class HungGrid(InlineGrid):
    """A deployment in which client-0001 is connected and does not answer messages of `kinds`."""

    is_in_process = has_own_clients = False

    def __init__(self, *kinds):
        super().__init__(client_app.app.app, simulated_nodes(4))
        self.kinds, self.num_unanswered = kinds, 0

    def push_messages(self, messages):
        messages = list(messages)
        about = [m.metadata for m in messages if m.metadata.dst_node_id == HUNG_NODE]
        self.num_unanswered += sum(each.message_type in self.kinds for each in about)
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        about = {i: self.waiting[i].metadata for i in message_ids if i in self.waiting}
        hung = [
            i
            for i, each in about.items()
            if each.dst_node_id == HUNG_NODE and each.message_type in self.kinds
        ]
        return super().pull_messages([i for i in message_ids if i not in hung])


HUNG_NODE = 3
all_messages = (MessageType.TRAIN, MessageType.EVALUATE)


in_training = {1: "no answer in this round's training", 3: "in backoff"}


@pytest.mark.parametrize(
    ("method", "kinds", "not_evaluated"),
    [
        ("fedavg", all_messages, in_training),
        ("fedreco", all_messages, in_training),
        ("fedavg", [MessageType.EVALUATE], {3: "no answer to the last evaluations"}),
    ],
)
def test_a_client_that_hangs_is_waited_for_as_often_as_backoff_says(
    home, caplog, method, kinds, not_evaluated
):
    keys = {"method": method, "local-test-fraction": 0.2, "evaluate-clients": "all"}
    keys |= {"num-rounds": 4, "round-timeout": 5.0, "backoff-after": 2, "backoff-rounds": 3}
    grid = HungGrid(*kinds)
    folder = run_federation(grid, SMALL | short | keys | {"min-replies": 2}).path
    history = history_of(folder)
    assert grid.num_unanswered == 2
    for number, reason in not_evaluated.items():
        assert history[number - 1]["evaluation_left_out"]["client-0001"] == reason
    trains = "client-0001" in history[-1]["participants"]
    assert trains == (MessageType.TRAIN not in kinds)
    assert "client-0001" in " ".join(text for text in caplog.messages if "in a row" in text)
