"""The default server half: what it sends, the average that it takes, and what it leaves out."""

import math
import random
from dataclasses import replace

import pytest
import torch
from flwr.app import Error, Message, MessageType
from run_fixtures import FACTS, answer, same_bits, sent
from torch import nn

from protocol.array_records import array_record, tensors
from protocol.config import resolve_config
from protocol.messages import (
    RESET_NEEDED,
    RosterEntry,
    TrainReply,
    TrainRequest,
    request_record,
)
from strategies.average import Average
from strategies.validation import TooFewRepliesError

pytestmark = pytest.mark.usefixtures("task_identity")


def network() -> nn.Module:
    """Float parameters, float buffers and one whole number: what a model with BatchNorm has."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


CURRENT = network().state_dict()


def average_of(num_clients=5, half=Average, are_checked=True, **keys) -> Average:
    """The strategy over clients client-0, ... on nodes 100, ... with 10, 11, ... samples."""
    strategy = half(resolve_config({k.replace("_", "-"): v for k, v in keys.items()}), network())
    strategy.roster = {
        100 + i: RosterEntry(f"client-{i}", [10 + i, 0], [1, 1], [1, 28, 28], "cnn", 8, "", 5)
        for i in range(num_clients)
    }
    if are_checked:  # by the partition, as in a simulation
        strategy.partition_sizes = {e.client: e.num_examples for e in strategy.roster.values()}
    return strategy


def ask(strategy, server_round=1, current=CURRENT):
    request = TrainRequest(strategy.config, FACTS, server_round, [0], False, "/run")
    record = request_record(request)
    return sent(
        list(strategy.configure_train(server_round, array_record(current), record, grid=None))
    )


def moved(seed, scale=1.0):
    """What a client might send back: other floats, other whole numbers, variances above 0."""
    generator = torch.Generator().manual_seed(seed)
    other = {
        name: array + scale * torch.randn(array.shape, generator=generator)
        if array.is_floating_point()
        else array + seed
        for name, array in CURRENT.items()
    }
    return other | {"1.running_var": other["1.running_var"].abs()}


def replies_to(messages, strategy, server_round=1, extra=None):
    """(message, reply) of each client, which has the name and count of its roster entry."""
    found = []
    for message in messages:
        entry = strategy.roster[message.metadata.dst_node_id]
        metrics = {"num-examples": float(entry.num_examples), "seconds": 0.5}
        arrays = moved(entry.num_examples)
        found.append(
            (message, TrainReply(entry.client, server_round, arrays, extra or {}, metrics))
        )
    return found


def play(strategy, spoil=lambda replies: replies, server_round=1, current=CURRENT):
    """The next arrays of a round; `spoil` changes its (message, reply) pairs."""
    pairs = spoil(replies_to(ask(strategy, server_round, current), strategy, server_round))
    replies = [answer(m, r) if isinstance(r, TrainReply) else r for m, r in pairs]
    following, _ = strategy.aggregate_train(server_round, replies)
    return tensors(following)


def mean_of(numbers, weights):
    """The weighted mean of the clients' arrays in float64."""
    pairs, total = list(zip(numbers, weights, strict=True)), sum(weights)
    return {
        name: sum(w * moved(10 + i)[name].double() for i, w in pairs) / total for name in CURRENT
    }


def assert_mean(found, numbers, weights):
    for name, exact in mean_of(numbers, weights).items():
        expected = exact if found[name].is_floating_point() else exact.round()
        torch.testing.assert_close(found[name], expected.to(found[name].dtype), rtol=1e-6, atol=0)


# --- the average ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        ({}, [10, 11, 12, 13, 14]),
        ({"weighting": "uniform"}, [1] * 5),
        ({"norm_bound": "fixed", "norm_bound_value": 1e9}, [1] * 5),
    ],
    ids=["examples", "uniform", "uniform with a norm bound"],
)
def test_the_next_model_is_the_weighted_mean(keys, weights):
    assert_mean(play(average_of(**keys)), range(5), weights)


class Reads(Average):
    """Reads each update."""

    def next_arrays(self, current, replies):
        assert all(reply.arrays for reply in replies)
        return super().next_arrays(current, replies)


class Sums(Average):
    """Reads `extra` only through its sum."""

    needs_updates = False

    def expected_extra(self):
        return {"dc": torch.zeros(2)}

    def extra_shares(self, clients):
        return dict.fromkeys(clients, 0.125)

    def next_arrays(self, current, replies):
        self.total = self.extra_sum(replies)["dc"].tolist()
        self.held = [bool(reply.arrays or reply.extra) for reply in replies]
        return super().next_arrays(current, replies)


def test_updates_are_held_only_where_each_is_needed_and_the_bits_are_the_same():
    results = []
    held = {"max_weight_share": 0.9, "are_checked": False}
    for keys in ({}, {"half": Reads}, held, {"keeps": True}):
        keeps = keys.pop("keeps", False)
        strategy = average_of(**keys)
        strategy.keeps_updates = keeps
        results.append(play(strategy))
        assert all(bool(r.arrays) == bool(keys or keeps) for r in strategy.report.accepted)
    assert all(same_bits(found, results[0]) for found in results)


@pytest.mark.parametrize("keeps", [False, True])
def test_the_sum_of_what_is_beside_the_model_has_the_same_bits_held_or_not(keeps):
    strategy = average_of(half=Sums)
    strategy.keeps_updates = keeps

    def with_extra(pairs):
        return [
            (m, replace(r, extra={"dc": torch.tensor([i + 1.0, -8.0])}))
            for i, (m, r) in enumerate(pairs)
        ][:4]

    play(strategy, with_extra)
    assert strategy.total == [10 / 8, -4.0]  # a missing reply is not made up for
    assert strategy.held == [keeps] * 4


@pytest.mark.parametrize("keys", [{}, {"aggregation": "krum"}, {"max_weight_share": 0.22}])
def test_neither_the_order_of_replies_and_arrays_nor_the_name_in_them_shows(keys):
    """A reply counts for the node that sent it."""

    def shuffled(pairs, seed):
        return [
            (m, replace(r, client="client-0", arrays=dict(reversed(r.arrays.items()))))
            for m, r in random.Random(seed).sample(pairs, len(pairs))
        ]

    expected = play(average_of(are_checked=False, **keys))
    for seed in range(3):
        strategy = average_of(are_checked=False, **keys)
        assert same_bits(play(strategy, lambda pairs, s=seed: shuffled(pairs, s)), expected)
        assert [r.client for r in strategy.report.accepted] == [f"client-{i}" for i in range(5)]


def test_a_lying_sample_count_weighs_no_more_than_max_weight_share():
    def lying(**keys):
        strategy = average_of(4, are_checked=False, **keys)
        strategy.roster[101] = replace(strategy.roster[101], label_counts=[10**9, 0])

        def spoil(pairs):  # its arrays are those of client-1
            return [(m, replace(r, arrays=moved(10 + i))) for i, (m, r) in enumerate(pairs)]

        return strategy, play(strategy, spoil)

    strategy, found = lying(max_weight_share=0.25)
    assert_mean(found, range(4), [1] * 4)  # of four sites none weighs more than a quarter
    strategy, found = lying(max_weight_share=0.5)
    others = 10 + 12 + 13
    assert_mean(found, range(4), [10, others, 12, 13])
    assert strategy.counts(strategy.report.accepted)[1] == others


# --- bad replies ---------------------------------------------------------------------------------


def test_bad_replies_are_left_out_and_the_round_is_as_without_them():
    def spoil(pairs):
        (m0, r0), (m1, _), (m2, r2), *rest = pairs
        bad = replace(r0, arrays=r0.arrays | {"0.bias": r0.arrays["0.bias"] * math.nan})
        failed = Message(Error(RESET_NEEDED, "its state is lost"), reply_to=m1)
        return [(m0, bad), (m1, failed), (m2, replace(r2, round=7)), *rest]

    strategy = average_of()
    assert_mean(play(strategy, spoil), [3, 4], [13, 14])
    report = strategy.report
    assert [r.client for r in report.accepted] == ["client-3", "client-4"]
    assert list(report.left_out) == ["client-0", "client-1", "client-2"]
    assert (report.rejected, report.reset_needed) == (2, ["client-1"])
    size = sum(a.numel() * a.element_size() for a in CURRENT.values())
    assert 4 * size < report.bytes_up < 4 * size + 10_000  # and the records around them


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"min_replies": 3}, "min-replies = 3"),
        ({"aggregation": "median"}, "aggregation = 'median'"),
    ],
)
def test_too_few_good_replies_end_the_round_and_name_clients_and_reasons(keys, named):
    def spoil(pairs):
        (m0, r0), (m1, r1), (m2, _), *_ = pairs
        return [(m0, r0), (m1, r1), (m2, Message(Error(1, "disk full"), reply_to=m2))]

    with pytest.raises(TooFewRepliesError) as caught:
        play(average_of(3, **keys), spoil)
    for part in (named, "client-2", "disk full"):
        assert part in str(caught.value)


def test_evaluation_leaves_out_bad_replies_too():
    strategy = average_of(3)
    record = request_record(TrainRequest(strategy.config, FACTS, 1, [0], True, "/run"))
    about = MessageType.EVALUATE, strategy.roster, array_record(CURRENT), record
    messages = sent(strategy.messages(*about))
    scores = [0.2, 1.2]
    replies = [
        answer(m, TrainReply("x", 1, {}, {}, {"num-examples": 10.0 + i, "global-accuracy": a}))
        for i, (m, a) in enumerate(zip(messages, scores, strict=False))
    ]
    strategy.aggregate_evaluate(1, replies)
    assert [r.metrics["global-accuracy"] for r in strategy.report.accepted] == [0.2]
    assert list(strategy.report.left_out) == ["client-1"]
