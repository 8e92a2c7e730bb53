"""Clients that back off, in whole runs."""

import pytest
from flwr.app import Error, Message, MessageType
from method_fixtures import METHODS
from run_fixtures import SMALL, history_of

from flower_adapter import NO_REPLY
from server_app.pool import InlineWorkers, WorkerPool
from server_app.run import run_federation

short = {"local-epochs": 0, "evaluate-global": False}


class HungPool(WorkerPool):
    """Clients that answer no messages of `kinds` in `rounds`, in no time; `asked`: the rounds."""

    kinds, hung, rounds = (MessageType.TRAIN,), ("client-0001",), range(100)
    back = 100  # the round from which they answer a query

    def __init__(self, *about):
        super().__init__(*about)
        self.asked, self.round = [], 0

    def ask(self, messages, what, on_reply, **options):
        self.round = int(what.split()[-1])
        nodes = {node for node, entry in self.roster.items() if entry.client in self.hung}
        to_hung = [
            message
            for message in messages
            if message.metadata.message_type in self.kinds and message.metadata.dst_node_id in nodes
        ]
        self.asked += [self.round] * bool(to_hung)
        silent = to_hung if self.round in self.rounds else []
        others = [message for message in messages if message not in silent]
        found = super().ask(others, what, on_reply, **options)
        for message in silent:
            on_reply(Message(Error(NO_REPLY, "no answer in time"), reply_to=message))
        return found | {message.metadata.dst_node_id for message in silent}

    def returned(self, clients):
        return clients if self.round + 1 >= self.back else set()


@pytest.fixture
def hung(home):
    """hung(keys, ...): (history, pool) of a run of four clients on a HungPool with attributes."""

    def played(keys, **attributes):
        pools = []

        def make_pool(experiment, resumed):
            pools.append(HungPool(InlineWorkers(), experiment.config, experiment.source, 4))
            vars(pools[0]).update(attributes)
            return pools[0]

        keys = SMALL | short | {"method": "fedavg", "num-clients": 4} | keys
        directory = run_federation(make_pool, keys).path
        return history_of(directory), pools[0]

    return played


def test_a_dead_client_is_asked_k_times_and_once_after_each_backoff_of_five_rounds(hung):
    history, pool = hung({"num-rounds": 14, "backoff-after": 2})
    assert pool.asked == [1, 2, 8, 14]
    backed_off = [line["round"] for line in history if line["backed_off"] == ["client-0001"]]
    assert backed_off == [3, 4, 5, 6, 7, 9, 10, 11, 12, 13]
    assert [line["round"] for line in history if line["left_out"]] == [1, 2, 8, 14]


def test_a_client_that_answers_again_takes_part_again_at_once(hung):
    history, pool = hung({"num-rounds": 6, "backoff-after": 2}, rounds=range(1, 4), back=4)
    assert pool.asked == [1, 2, 4, 5, 6]
    assert [line["round"] for line in history if "client-0001" in line["participants"]] == [4, 5, 6]


def test_a_client_that_answers_with_an_error_is_asked_in_every_round(run, monkeypatch):
    """Such as one whose disk is full: it costs no timeout, and may be well again in any round."""
    train = METHODS["fedavg"].train

    def full(method, ctx):
        if ctx.client == "client-0001" and ctx.round <= 3:
            raise OSError(28, "No space left on device")
        return train(method, ctx)

    monkeypatch.setattr(METHODS["fedavg"], "train", full)
    history = history_of(run(short | {"num-rounds": 6}))
    assert [line["round"] for line in history if line["left_out"]] == [1, 2, 3]
    assert [line["round"] for line in history if "client-0001" in line["participants"]] == [4, 5, 6]


def test_nobody_is_backed_off_where_too_few_would_be_left(hung):
    silent = {"hung": ("client-0001", "client-0002", "client-0003"), "rounds": [1]}
    keys = {"num-rounds": 2, "backoff-after": 1, "train-fraction": 1.0}
    history, _ = hung(keys | {"min-replies": 1}, **silent)
    assert history[1]["backed_off"] == ["client-0001", "client-0002", "client-0003"]
    with pytest.raises(RuntimeError, match="min-replies"):  # of round 1, in which one replies
        hung(keys | {"min-replies": 2}, **silent)


in_training = {1: "no answer in this round's training", 3: "in backoff"}


@pytest.mark.parametrize(
    ("kinds", "not_evaluated"),
    [
        ((MessageType.TRAIN, MessageType.EVALUATE), in_training),
        ((MessageType.EVALUATE,), {3: "no answer to the last evaluations"}),
    ],
)
def test_a_client_that_hangs_is_waited_for_as_often_as_backoff_says(hung, kinds, not_evaluated):
    keys = {"local-test-fraction": 0.2, "num-rounds": 4}
    keys |= {"evaluate-clients": "all", "backoff-after": 2, "min-replies": 2}
    history, pool = hung(keys, kinds=kinds)
    assert len(pool.asked) == 2
    for number, reason in not_evaluated.items():
        assert history[number - 1]["evaluation_left_out"]["client-0001"] == reason
    trains = "client-0001" in history[-1]["participants"]
    assert trains == (MessageType.TRAIN not in kinds)
