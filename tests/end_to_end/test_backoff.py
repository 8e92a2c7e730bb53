"""Clients that back off, in whole runs."""

import pytest
from flwr.app import Error, Message, MessageType
from method_fixtures import METHODS
from run_fixtures import SMALL, assert_same_run, history_of, resume

from flower_adapter import NO_REPLY
from server_app.pool import InlineWorkers, WorkerPool
from server_app.run import run_federation

short = {"local-epochs": 0, "evaluate-global": False}


@pytest.fixture
def failing(monkeypatch):
    """failing(rounds): client-0001 fails in these; returns the rounds in which it is asked."""
    train = METHODS["fedavg"].train
    asked: list[int] = []

    def in_rounds(rounds):
        def train_or_fail(method, ctx):
            if ctx.client == "client-0001":
                asked.append(ctx.round)
                if ctx.round in rounds:
                    raise OSError("no power")
            return train(method, ctx)

        monkeypatch.setattr(METHODS["fedavg"], "train", train_or_fail)
        asked.clear()
        return asked

    return in_rounds


def test_a_dead_client_is_asked_k_times_and_once_after_each_backoff_of_five_rounds(run, failing):
    asked = failing(range(1, 100))
    history = history_of(run(short | {"num-rounds": 14, "backoff-after": 2}))
    assert asked == [1, 2, 8, 14]
    backed_off = [line["round"] for line in history if line["backed_off"] == ["client-0001"]]
    assert backed_off == [3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
    assert [line["round"] for line in history if line["left_out"]] == [1, 2, 8, 14]


def test_a_client_that_succeeds_again_is_no_longer_backed_off(run, failing):
    asked = failing({1, 2})
    run(short | {"num-rounds": 10, "backoff-after": 2})
    assert asked == [1, 2, 8, 9, 10]


def test_nobody_is_backed_off_where_too_few_would_be_left(run, monkeypatch):
    train = METHODS["fedavg"].train

    def sometimes(method, ctx):
        if ctx.round == 1 and ctx.client != "client-0000":
            raise OSError("no power")
        return train(method, ctx)

    monkeypatch.setattr(METHODS["fedavg"], "train", sometimes)
    keys = short | {"num-rounds": 2, "backoff-after": 1, "fraction-train": 1.0}
    history = history_of(run(keys | {"min-replies": 1}))
    assert history[1]["backed_off"] == ["client-0001", "client-0002", "client-0003"]
    with pytest.raises(RuntimeError, match="min-replies"):  # of round 1, in which one replies
        run(keys | {"min-replies": 2})


def test_a_resumed_run_backs_off_the_same_clients(run, failing):
    keys = short | {"num-rounds": 7, "backoff-after": 2, "fraction-train": 0.75}
    failing({1, 2, 3, 4, 5})
    whole = run(keys)
    parts = run(keys | {"num-rounds": 4})
    resume(parts, num_rounds=7)
    assert any(line["backed_off"] for line in history_of(whole))
    assert_same_run(parts, whole)


class HungPool(WorkerPool):
    """Clients of which client-0001 answers no messages of `kinds`, in no time."""

    kinds, num_unanswered = (), 0

    def ask(self, messages, what, on_reply, **options):
        hung = {node for node, entry in self.roster.items() if entry.client == "client-0001"}
        silent = [
            message
            for message in messages
            if message.metadata.message_type in self.kinds and message.metadata.dst_node_id in hung
        ]
        self.num_unanswered += len(silent)
        others = [message for message in messages if message not in silent]
        found = super().ask(others, what, on_reply, **options)
        for message in silent:
            on_reply(Message(Error(NO_REPLY, "no answer in time"), reply_to=message))
        return found | {message.metadata.dst_node_id for message in silent}


in_training = {1: "no answer in this round's training", 3: "in backoff"}


@pytest.mark.parametrize(
    ("kinds", "not_evaluated"),
    [
        ((MessageType.TRAIN, MessageType.EVALUATE), in_training),
        ((MessageType.EVALUATE,), {3: "no answer to the last evaluations"}),
    ],
)
def test_a_client_that_hangs_is_waited_for_as_often_as_backoff_says(home, kinds, not_evaluated):
    keys = SMALL | short | {"method": "fedavg", "local-test-fraction": 0.2, "num-rounds": 4}
    keys |= {"evaluate-clients": "all", "backoff-after": 2, "min-replies": 2, "num-clients": 4}
    pools = []

    def make_pool(experiment, resumed):
        pools.append(HungPool(InlineWorkers(), experiment.config, experiment.source, 4))
        pools[0].kinds = kinds
        return pools[0]

    history = history_of(run_federation(make_pool, keys).path)
    assert pools[0].num_unanswered == 2
    for number, reason in not_evaluated.items():
        assert history[number - 1]["evaluation_left_out"]["client-0001"] == reason
    trains = "client-0001" in history[-1]["participants"]
    assert trains == (MessageType.TRAIN not in kinds)
