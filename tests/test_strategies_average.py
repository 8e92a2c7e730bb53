"""The weighted average: its equation in loops, whom it samples, and which replies it leaves out."""

import json
import logging
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from run_fixtures import FACTS, answer, random_arrays, same_bits, sent
from safetensors.numpy import save
from torch import Tensor, nn

import strategies.average
from flower_adapter import assign_source_node
from protocol.config import resolve_config
from protocol.messages import (
    PACKED,
    RosterEntry,
    TrainReply,
    TrainRequest,
    array_record,
    last_accepted_round_of,
    read_request,
    reply_content,
    request_record,
    tensors,
)
from strategies.aggregation import weighted_mean
from strategies.average import Average, TooFewRepliesError
from strategies.scaffold import ScaffoldServer
from strategies.validation import by_reason

pytestmark = pytest.mark.usefixtures("task_identity")
shapes = {"conv": (2, 3, 1), "fc": (4,)}


def network() -> nn.Module:
    """Float parameters, float buffers and one whole number: what a model with BatchNorm has."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def reply_of(client: str, arrays: dict[str, Tensor], num_examples: float = 10, round_: int = 1):
    metrics = {"num-examples": num_examples, "seconds": 0.5, "cpu-seconds": 0.5}
    return TrainReply(client, round_, arrays, {}, metrics)


def roster_of(names: dict[int, str], counts: list[int]) -> dict[int, RosterEntry]:
    """counts: training samples of the clients on these nodes, as they declare them."""
    return {
        node: RosterEntry(name, [n, 0], [1, 1], [1, 28, 28], "cnn", 8, "", len(names))
        for (node, name), n in zip(names.items(), counts, strict=True)
    }


def average_of(
    num_clients: int = 5,
    counts: list[int] | None = None,
    half: type[Average] = Average,
    **keys: object,
) -> Average:
    """The strategy over clients named client-0, ... on nodes 100, 101, ...

    counts: their training samples; 10, 11, ... if not given. half: the server half.
    """
    config = resolve_config({name.replace("_", "-"): value for name, value in keys.items()})
    strategy = half(config, network())
    names = {100 + i: f"client-{i}" for i in range(num_clients)}
    strategy.roster = roster_of(names, counts or [10 + i for i in range(num_clients)])
    strategy.partition_sizes = {e.client: e.num_examples for e in strategy.roster.values()}
    return strategy


def ask(strategy: Average, arrays: dict[str, Tensor], server_round: int = 1) -> list[Message]:
    request = TrainRequest(strategy.config, FACTS, server_round, [0], False, "/run")
    record = request_record(request)
    return sent(
        list(strategy.configure_train(server_round, array_record(arrays), record, grid=None))
    )


def moved(arrays: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """What a client might send back: other floats, other whole numbers, variances above 0."""
    generator = torch.Generator().manual_seed(seed)
    other = {
        name: array + torch.randn(array.shape, generator=generator)
        if array.is_floating_point()
        else array + seed
        for name, array in arrays.items()
    }
    return other | {"1.running_var": other["1.running_var"].abs()}


# --- the average -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_examples", [[7], [3, 1], [1, 100, 17], [13, 13, 13, 13]])
def test_average_equals_the_formula_in_loops(num_examples):
    arrays = [random_arrays(shapes, seed) for seed in range(len(num_examples))]
    replies = [reply_of(f"c{i}", a) for i, a in enumerate(arrays)]
    mean = weighted_mean(replies, [float(n) for n in num_examples])
    for name, shape in shapes.items():
        for at in np.ndindex(shape):
            expected = 0.0
            for n, each in zip(num_examples, arrays, strict=True):  # sum_i n_i / n * w_i
                expected += n / sum(num_examples) * float(each[name][at])
            assert float(mean[name][at]) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_float32_stays_float32_and_is_as_exact_as_that():
    arrays = [{"w": random_arrays({"w": (50,)}, seed)["w"].float()} for seed in range(20)]
    mean = weighted_mean([reply_of("c", a) for a in arrays], [1.0 + i for i in range(20)])["w"]
    exact = sum(a["w"].double() * (1 + i) for i, a in enumerate(arrays)) / 210
    assert mean.dtype == torch.float32
    assert (mean.double() - exact).abs().max() < 1e-6


def test_whole_numbers_are_rounded_to_the_nearest_and_keep_their_type():
    large = 2**39 + 1  # more digits than float32 has
    counts = [torch.tensor([1, 10, -4, large]), torch.tensor([2, 40, -7, large])]
    mean = weighted_mean(
        [reply_of(c, {"steps": n}) for c, n in zip("ab", counts, strict=True)], [1.0, 3.0]
    )
    assert mean["steps"].tolist() == [2, 32, -6, large]  # 1.75, 32.5 (to even), -6.25
    assert mean["steps"].dtype == torch.int64


def test_the_average_touches_no_reply():
    arrays = [random_arrays(shapes, seed) for seed in (1, 2)]
    before = [{name: a.clone() for name, a in each.items()} for each in arrays]
    weighted_mean([reply_of("a", arrays[0]), reply_of("b", arrays[1])], [1.0, 2.0])
    assert all(same_bits(a, b) for a, b in zip(arrays, before, strict=True))


def test_one_client_gives_its_own_model_bit_for_bit():
    strategy = average_of(num_clients=1, counts=[17])
    current = network().state_dict()
    theirs = moved(current, seed=3)
    following, _ = strategy.aggregate_train(
        1, [answer(m, reply_of("client-0", theirs, 17)) for m in ask(strategy, current)]
    )
    assert same_bits(tensors(following), theirs)


def test_trainable_arrays_are_in_the_networks_order(monkeypatch):
    # the order of a set of names differs between processes: a server half's sum over it would too
    strategy, given = average_of(), []
    monkeypatch.setattr(
        strategy.server_optimizer,
        "step",
        lambda current, average, trainable: given.extend(trainable) or average,
    )
    expected = [name for name, _ in network().named_parameters()]
    current = {**network().state_dict()}
    strategy.current = current
    strategy.next_arrays(current, [reply_of("client-0", moved(current, 1))])
    assert list(strategy.trainable) == given == expected


def test_identical_clients_are_one_client():
    theirs = moved(network().state_dict(), seed=3)
    mean = weighted_mean([reply_of(c, theirs) for c in "abc"], [1.0, 5.0, 2.0])
    for name, array in theirs.items():
        torch.testing.assert_close(mean[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("weighting", "expected"), [("examples", (1 * 10 + 9 * 20) / 10), ("uniform", 15.0)]
)
def test_weighting_by_examples_or_all_the_same(weighting, expected):
    strategy = average_of(num_clients=2, counts=[1, 9], weighting=weighting)
    current = {name: torch.zeros_like(a) for name, a in network().state_dict().items()}
    messages = ask(strategy, current)
    ten, twenty = ({k: torch.full_like(a, v) for k, a in current.items()} for v in (10, 20))
    replies = [
        answer(messages[0], reply_of("client-0", ten, 1)),
        answer(messages[1], reply_of("client-1", twenty, 9)),
    ]
    following, _ = strategy.aggregate_train(1, replies)
    for array in tensors(following).values():
        assert array.double().flatten().tolist() == pytest.approx([expected] * array.numel())


def test_an_outlier_s_count_is_not_shrunk_where_no_update_is_longer_than_others():
    """With `local`, no client sends an update: an outlier's loss had the weight 0."""
    strategy = average_of(num_clients=3, counts=[10, 10, 2000], method="local")
    strategy.outliers = frozenset(["client-2"])
    replies = [reply_of(f"client-{i}", {}, n) for i, n in enumerate([10, 10, 2000])]
    assert strategy.counts(replies) == [10, 10, 2000]


def test_an_outlier_s_count_shrinks_with_the_length_of_its_update():
    """A quarter of the round (the cap), times the longest other update over its own."""
    strategy = average_of(4, [10, 10, 10, 1000])
    strategy.partition_sizes = {}  # as of sites
    current = network().state_dict()
    ask(strategy, current)
    strategy.outliers = frozenset(["client-3"])
    replies = [
        reply_of(f"client-{i}", {n: a + step for n, a in current.items()}, count)
        for i, (step, count) in enumerate([(1, 10), (2, 10), (0, 10), (8, 1000)])
    ]
    assert strategy.counts(replies) == pytest.approx([10, 10, 10, 10 * 2 / 8])
    assert strategy.counts(replies[:3]) == [10, 10, 10]
    assert strategy.counts(replies[3:]) == [1000]


def test_the_order_of_arrival_and_the_node_ids_do_not_show():
    current = network().state_dict()
    results = []
    for shuffle in range(6):
        rng = random.Random(shuffle)
        strategy = average_of()
        nodes = rng.sample(range(2**40), 5)  # random in every run, as Flower's are
        names = [f"client-{i}" for i in range(5)]
        counts = [3 + 7 * number for number in range(5)]
        strategy.roster = roster_of(dict(zip(nodes, names, strict=True)), counts)
        replies = []
        for message in ask(strategy, current):
            name = strategy.roster[message.metadata.dst_node_id].client
            number = int(name[-1])
            theirs = moved(current, seed=1000 + number)
            replies.append(answer(message, reply_of(name, theirs, 3 + 7 * number)))
        rng.shuffle(replies)
        following, _ = strategy.aggregate_train(1, replies)
        results.append(tensors(following))
    assert all(same_bits(arrays, results[0]) for arrays in results)


# --- who takes part --------------------------------------------------------------------------


def sampled_names(strategy: Average, server_round: int) -> list[str]:
    return [strategy.roster[node].client for node in strategy.sample(server_round)]


@pytest.mark.parametrize(
    ("num_clients", "fraction", "count"),
    [(10, 1.0, 10), (10, 0.3, 3), (10, 0.05, 1), (10, 0.01, 1), (7, 0.5, 4), (100, 0.02, 2)],
)
def test_a_fraction_of_the_clients_without_repeats_at_least_one(num_clients, fraction, count):
    strategy = average_of(num_clients, fraction_train=fraction)
    for server_round in range(1, 20):
        names = sampled_names(strategy, server_round)
        assert len(names) == len(set(names)) == count


def test_sampling_depends_on_names_seed_and_round_but_not_on_node_ids():
    strategy = average_of(20, fraction_train=0.25, seed=3)
    first = [sampled_names(strategy, r) for r in range(1, 6)]
    names = [f"client-{i}" for i in range(20)]
    nodes = random.Random(1).sample(range(10**9), 20)
    again = average_of(20, fraction_train=0.25, seed=3)
    shuffled = random.Random(2).sample(names, 20)
    again.roster = roster_of(dict(zip(nodes, shuffled, strict=True)), [10] * 20)
    assert [sampled_names(again, r) for r in range(1, 6)] == first
    assert all(cohort == sorted(cohort) for cohort in first)
    assert len({tuple(cohort) for cohort in first}) == 5  # another cohort every round
    other = average_of(20, fraction_train=0.25, seed=4)
    assert [sampled_names(other, r) for r in range(1, 6)] != first


def test_every_client_is_sampled_about_as_often():
    strategy = average_of(10, fraction_train=0.3)
    counts: dict[str, int] = {}
    for server_round in range(1, 1001):
        for name in sampled_names(strategy, server_round):
            counts[name] = counts.get(name, 0) + 1
    deviation = math.sqrt(1000 * 0.3 * 0.7)  # of a binomial count
    assert len(counts) == 10
    assert all(abs(count - 300) < 4.5 * deviation for count in counts.values())


def test_a_message_for_every_sampled_client_says_what_to_do_with_which_model():
    strategy = average_of(6, fraction_train=0.5, round_timeout=70.0)
    current = network().state_dict()
    messages = ask(strategy, current, server_round=4)
    assert [m.metadata.dst_node_id for m in messages] == strategy.sample(4)
    for message in messages:
        assert message.metadata.message_type == MessageType.TRAIN
        assert message.metadata.ttl == 70.0  # nobody is to train for a round that is over
        request = read_request(message, TrainRequest)
        assert (request.round, request.run_dir) == (4, "/run")
        assert same_bits(tensors(message.content.array_records["arrays"]), current)
        assert not message.content.array_records["extra"]


def test_evaluation_asks_everybody():
    strategy = average_of(6, fraction_train=0.34)
    record = request_record(TrainRequest(strategy.config, FACTS, 2, [0], True, "/run"))
    arrays = array_record(network().state_dict())
    messages = list(strategy.configure_evaluate(2, arrays, record, grid=None))
    assert len({m.metadata.dst_node_id for m in messages}) == 6
    assert all(m.metadata.message_type == MessageType.EVALUATE for m in messages)


# --- bad replies -----------------------------------------------------------------------------


def with_array(reply: TrainReply, name: str, array: Tensor) -> TrainReply:
    return replace(reply, arrays=reply.arrays | {name: array})


def without_array(reply: TrainReply, name: str) -> TrainReply:
    return replace(reply, arrays={k: v for k, v in reply.arrays.items() if k != name})


def poisoned(reply: TrainReply, value: float) -> TrainReply:
    weight = reply.arrays["0.weight"].clone()
    weight[1, 2] = value
    return with_array(reply, "0.weight", weight)


def with_examples(reply: TrainReply, count: float) -> TrainReply:
    return replace(reply, metrics=reply.metrics | {"num-examples": count})


bad_replies = {
    "missing": (lambda r: without_array(r, "1.running_var"), "'1.running_var' is missing (1 of 7)"),
    "extra": (lambda r: with_array(r, "head", torch.zeros(1)), "'head' is unknown (1 too many)"),
    "shape": (
        lambda r: with_array(r, "0.weight", torch.zeros(3, 2)),
        "'0.weight' is [3, 2], expected [2, 3]",
    ),
    "dtype": (
        lambda r: with_array(r, "0.bias", torch.zeros(2, dtype=torch.float64)),
        "'0.bias' is torch.float64, expected torch.float32",
    ),
    "nan": (lambda r: poisoned(r, math.nan), "'0.weight' holds 1 value that is not finite"),
    "inf": (lambda r: poisoned(r, math.inf), "'0.weight' holds 1 value that is not finite"),
    "-inf": (lambda r: poisoned(r, -math.inf), "'0.weight' holds 1 value that is not finite"),
    "round": (lambda r: replace(r, round=2), "it answers round 2"),
    "no examples": (lambda r: with_examples(r, 0), "num-examples is 0, the roster says 12"),
    "negative": (lambda r: with_examples(r, -3), "num-examples is -3"),
    "one too many": (lambda r: with_examples(r, 13), "num-examples is 13, the roster says 12"),
    "nan examples": (lambda r: with_examples(r, math.nan), "num-examples is nan"),
    "endless examples": (lambda r: with_examples(r, math.inf), "num-examples is inf"),
    "no count": (lambda r: replace(r, metrics={"seconds": 1.0}), "num-examples is missing"),
    "variance": (
        lambda r: with_array(r, "1.running_var", -r.arrays["1.running_var"]),
        "'1.running_var' holds negative variances",
    ),
    "counter": (  # with momentum=None, clients divide by it: an average of -1 ends the run
        lambda r: with_array(r, "1.num_batches_tracked", torch.tensor(-40)),
        "'1.num_batches_tracked' holds negative counts",
    ),
    "accuracy": (
        lambda r: replace(r, metrics=r.metrics | {"personal-accuracy": math.nan}),
        "personal-accuracy is nan, not from 0 to 1",
    ),
}


def content_with(name: str, record: ArrayRecord | ConfigRecord | MetricRecord | None):
    """A reply with this record in place of its own; None: without it."""

    def spoil(message: Message, reply: TrainReply) -> Message:
        records = {**reply_content(reply), name: record}
        return Message(
            RecordDict({k: v for k, v in records.items() if v is not None}), reply_to=message
        )

    return spoil


def bytes_for_numbers(data: bytes):
    """A reply whose arrays are these bytes."""
    array = Array(dtype="uint8", shape=(len(data),), stype=PACKED, data=data)
    return content_with("arrays", ArrayRecord({"arrays": array}))


def packed_bytes(names: Sequence[str] = ("0.bias",)) -> bytes:
    """One array, and the names of these."""
    return save({"0.bias": np.zeros(2, "f4")}, {"names": json.dumps([*names])})


def huge_header() -> bytes:
    """The header of 10^14 floats, and none of them."""
    about = {"dtype": "F32", "shape": [10**14], "data_offsets": [0, 4 * 10**14]}
    names = {"names": json.dumps(["0.bias"])}
    header = json.dumps({"__metadata__": names, "0.bias": about}).encode()
    return len(header).to_bytes(8, "little") + header


def test_no_client_fills_the_log():
    """What it says of itself is one line, and not a long one."""
    current, strategy = network().state_dict(), average_of()
    asked, _ = all_answers(strategy, current)[0]
    words = Message(Error(1, "x\n" * 10**6), reply_to=asked)
    strategy.aggregate_evaluate(1, [words])
    (reason,) = strategy.report.left_out.values()
    assert len(reason) == 300
    assert "\n" not in reason


WORDS = ArrayRecord({"0.bias": Array(np.array(["nonsense", "words"]))})
ROUNDS = ConfigRecord({"client": "client-2", "round": [1, 2]})
COUNTS = MetricRecord({"num-examples": [1, 2]})
bad_messages = {
    "error": (lambda m, r: Message(Error(1, "ValueError: no disk"), reply_to=m), "no disk"),
    "error without words": (lambda m, r: Message(Error(7), reply_to=m), "error 7"),
    "empty": (lambda m, r: Message(RecordDict(), reply_to=m), "no record 'reply'"),
    "no arrays": (content_with("arrays", None), "no record 'arrays'"),
    "no metrics": (content_with("metrics", None), "no record 'metrics'"),
    "words": (content_with("arrays", WORDS), "unreadable"),
    "no bytes": (bytes_for_numbers(b""), "unreadable"),
    "zip": (bytes_for_numbers(b"PK\x03\x04xx"), "unreadable"),
    "cut": (bytes_for_numbers(packed_bytes()[:-4]), "unreadable"),
    "no names": (bytes_for_numbers(save({"0.bias": np.zeros(2, "f4")})), "unreadable"),
    "a name more": (bytes_for_numbers(packed_bytes(["0.bias", "more"])), "other arrays than it"),
    "an array more": (bytes_for_numbers(packed_bytes([])), "other arrays than it names"),
    "too long a header": (bytes_for_numbers(b"\xff" * 100), "holds no arrays packed by Keel"),
    "too large": (bytes_for_numbers(huge_header()), "unreadable"),
    "list for round": (content_with("reply", ROUNDS), "unreadable"),
    "list for count": (content_with("metrics", COUNTS), "unreadable"),
}


def all_answers(strategy: Average, current: dict[str, Tensor]) -> list[tuple[Message, TrainReply]]:
    return [
        (message, reply_of(f"client-{i}", moved(current, seed=i), 10 + i))
        for i, message in enumerate(ask(strategy, current))
    ]


def spoilt_answers(
    strategy: Average, current: dict[str, Tensor], kind: str
) -> tuple[list[Message], str]:
    """Everybody's replies, that of client-2 spoilt; and what has to be said about it."""
    messages = []
    for message, reply in all_answers(strategy, current):
        if reply.client != "client-2":
            messages.append(answer(message, reply))
        elif kind in bad_replies:
            spoil, words = bad_replies[kind]
            messages.append(answer(message, spoil(reply)))
        else:
            make, words = bad_messages[kind]
            messages.append(make(message, reply))
    return messages, words


def told(messages: list[Message]) -> dict[int, int]:
    """By node: the last round that counted, as the message says."""
    return {m.metadata.dst_node_id: last_accepted_round_of(m) for m in messages}


def test_every_client_is_told_its_last_round_that_counted():
    current, strategy = network().state_dict(), average_of()
    messages, _ = spoilt_answers(strategy, current, "words")  # client-2's is refused
    nodes = {entry.client: node for node, entry in strategy.roster.items()}
    strategy.aggregate_train(1, messages)
    after_one = {nodes[f"client-{i}"]: 0 if i == 2 else 1 for i in range(5)}
    assert told(ask(strategy, current, 2)) == after_one
    record = request_record(TrainRequest(strategy.config, FACTS, 1, [0], False, "/run"))
    judged = strategy.configure_evaluate(1, array_record(current), record, None)
    assert told(list(judged)) == after_one
    resumed = average_of()
    resumed.load(strategy.state())
    assert told(ask(resumed, current, 2)) == after_one
    with pytest.raises(TooFewRepliesError):  # a round that fails counts for nobody
        strategy.aggregate_train(2, [])
    assert told(ask(strategy, current, 2)) == after_one


def test_a_node_that_was_not_asked_is_no_client_that_failed():
    strategy = average_of(backoff_after=1)
    replies = [answer(*pair) for pair in all_answers(strategy, network().state_dict())]
    assign_source_node(replies[0], 999)
    strategy.aggregate_train(1, replies)
    assert list(strategy.report.left_out) == ["node 999"]
    assert strategy.backoff.failures == {}


def test_a_resumed_run_knows_the_median_norm_that_bounds_the_next_round():
    strategy, resumed = (average_of(norm_bound="median") for _ in range(2))
    replies = [answer(*pair) for pair in all_answers(strategy, network().state_dict())]
    strategy.aggregate_train(1, replies)
    assert strategy.norm_reference.value > 0
    resumed.load(strategy.state())
    assert resumed.norm_reference.value == strategy.norm_reference.value


def test_a_reply_rejected_for_its_arrays_beside_the_model_does_not_raise_the_median_norm():
    strategy = average_of(half=ScaffoldServer, method="scaffold", norm_bound="median")
    current = network().state_dict()
    first = next(iter(strategy.c))
    replies = []
    for (message, reply), length in zip(
        all_answers(strategy, current), [1.0, 2.0, 3.0, 9.0, 9.0], strict=True
    ):
        arrays = {name: array.clone() for name, array in current.items()}
        arrays[first].view(-1)[0] += length
        extra = {name: torch.zeros_like(a) for name, a in strategy.expected_extra().items()}
        extra[f"dc.{first}"].view(-1)[0] = 100.0 if length == 9 else 1.0
        replies.append(answer(message, replace(reply, arrays=arrays, extra=extra)))
    strategy.aggregate_train(1, replies)
    assert list(strategy.report.left_out) == ["client-3", "client-4"]
    assert strategy.norm_reference.value == pytest.approx(2.0)  # with them, it was 3


def test_the_state_has_one_array_for_the_backoff_and_one_for_each_client_is_still_read():
    names = [f"client/{i}" for i in range(3)]
    strategy, resumed, older = (average_of(3) for _ in range(3))
    for number in (1, 2, 3):
        strategy.backoff.note(number, names[:1], names[1:])
    state = strategy.state()
    assert len(state) == 2
    resumed.load(state)
    before = {f"attendance/{name}": torch.tensor([3, 8]) for name in names[1:]}
    older.load({"counted": state["counted"]} | before)
    for other in (resumed, older):
        assert other.backoff.failures == dict.fromkeys(names[1:], 3)
        assert other.backoff.last_rounds == strategy.backoff.last_rounds
        assert same_bits(other.state(), state)


def test_clients_that_are_away_are_not_asked_while_enough_others_are_there():
    strategy = average_of(fraction_train=0.4, min_replies=2)
    nodes = {entry.client: node for node, entry in strategy.roster.items()}
    strategy.away = {"client-0", "client-2", "client-4"}
    for server_round in range(1, 9):
        assert sorted(strategy.sample(server_round)) == sorted(
            [nodes["client-1"], nodes["client-3"]]
        )
    strategy.away = {"client-0", "client-1", "client-2", "client-4"}  # one is too few: wait for all
    assert {n for r in range(1, 30) for n in strategy.sample(r)} == set(nodes.values())
    strategy.away = {"client-0", "client-2"}
    for client, is_left_out in (("client-1", True), ("client-3", False)):  # one would remain
        for server_round in range(4):
            strategy.backoff.note(server_round, set(), {client})
        assert ("client-1" in strategy.backed_off(4)) == is_left_out


def test_statistics_far_off_are_beyond_the_norm_bound():
    current = network().state_dict()
    strategy = average_of(norm_bound="fixed", norm_bound_value=1e3)
    answers = all_answers(strategy, current)
    far = {"1.running_mean": torch.full_like(current["1.running_mean"], 5e3)}
    messages = [
        answer(m, replace(r, arrays=r.arrays | far) if r.client == "client-2" else r)
        for m, r in answers
    ]
    strategy.aggregate_train(1, messages)
    assert "norm" in strategy.report.left_out["client-2"]


def test_an_extra_array_does_not_hide_one_of_the_model_with_its_name():
    """The model's array was not compared with its bound, so one client could set it."""

    class Named(Average):
        def expected_extra(self):
            return {"0.bias": torch.zeros(2)}

    current = network().state_dict()
    strategy = average_of(half=Named)
    messages = []
    for message, reply in all_answers(strategy, current):
        far = {"0.bias": torch.full((2,), 1e20)} if reply.client == "client-2" else {}
        extra = {"0.bias": torch.zeros(2)}
        messages.append(answer(message, replace(reply, arrays=reply.arrays | far, extra=extra)))
    strategy.aggregate_train(1, messages)
    assert list(strategy.report.left_out) == ["client-2"]
    assert "array '0.bias' holds 1e+20: the bound" in strategy.report.left_out["client-2"]


@pytest.mark.parametrize("norm_bound", ["off", "median"])
def test_one_client_cannot_raise_a_counter_until_all_others_are_beyond_its_bound(norm_bound):
    """It sends the most that was allowed, 2^40; the average nears that, and the others count on."""
    strategy = average_of(4, [10] * 4, norm_bound=norm_bound, backoff_after=0)
    strategy.partition_sizes = {}  # sites
    arrays, name = network().state_dict(), "1.num_batches_tracked"
    for server_round in range(1, 90):
        for i, message in enumerate(ask(strategy, arrays, server_round)):
            trained = moved(arrays, seed=20) | ({name: torch.tensor(2**40)} if i == 3 else {})
            strategy.accept(
                server_round, answer(message, reply_of(f"client-{i}", trained, 10, server_round))
            )
        arrays = tensors(strategy.aggregate_train(server_round, ())[0])
        change = 2**40 - 20 * (server_round - 1)
        assert strategy.report.left_out == {
            "client-3": f"array {name!r} differs by {change} from what was sent: the bound on "
            "integers is 16777216"
        }
    assert arrays[name] == 20 * server_round


@pytest.mark.parametrize("kind", [*bad_replies, *bad_messages])
def test_a_bad_reply_is_left_out_and_named_and_the_others_are_averaged(kind, caplog):
    current = network().state_dict()
    strategy = average_of()
    messages, words = spoilt_answers(strategy, current, kind)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        following, _ = strategy.aggregate_train(1, messages)
    good = [r for _, r in all_answers(average_of(), current) if r.client != "client-2"]
    expected = weighted_mean(good, [r.metrics["num-examples"] for r in good])
    assert same_bits(tensors(following), expected)
    assert [r.client for r in strategy.report.accepted] == [r.client for r in good]
    assert list(strategy.report.left_out) == ["client-2"]
    assert words in strategy.report.left_out["client-2"]
    [line] = caplog.messages
    assert line.startswith("round 1: left out client client-2: ")
    assert words in line
    assert "\n" not in line


def test_clients_that_are_left_out_for_one_reason_are_named_in_one_line(caplog):
    strategy = average_of()
    replies = [
        Message(Error(1, "no disk" if i == 2 else "no power"), reply_to=message)
        for i, message in enumerate(ask(strategy, network().state_dict()))
    ]
    with pytest.raises(TooFewRepliesError), caplog.at_level(logging.WARNING, logger="keel.server"):
        strategy.aggregate_train(1, replies)
    assert caplog.messages == [
        "round 1: left out clients client-0, client-1, client-3, client-4: no power",
        "round 1: left out client client-2: no disk",
    ]


def test_many_reasons_that_differ_in_numbers_are_one_line_of_the_log():
    """500 clients beyond `norm-bound` were 325 warnings, as each has another norm."""
    reasons = {f"client-{i}": f"its update's norm is {i}.5e+0{i}, more than 3" for i in range(7)}
    assert by_reason(reasons | {"client-7": "no power"}) == {
        reasons["client-0"]: [*reasons],
        "no power": ["client-7"],
    }
    few = dict(list(reasons.items())[:5])
    assert by_reason(few) == {reason: [client] for client, reason in few.items()}


def streaming(monkeypatch, **keys: Any) -> Average:
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 0)
    return average_of(**keys)


@pytest.mark.parametrize("kind", ["words", "no arrays", "error"])
def test_updates_summed_as_they_come_leave_out_a_bad_one(monkeypatch, kind):
    current = network().state_dict()
    messages, _ = spoilt_answers(strategy := streaming(monkeypatch), current, kind)
    good = [r for _, r in all_answers(average_of(), current) if r.client != "client-2"]
    expected = weighted_mean(good, [r.metrics["num-examples"] for r in good])
    for message in reversed(messages):
        strategy.accept(1, message)
    assert not any(reply.arrays for reply in strategy.validation.accepted.values())
    following, _ = strategy.aggregate_train(1, [])
    assert [r.client for r in strategy.report.accepted] == [r.client for r in good]
    for name, array in tensors(following).items():
        torch.testing.assert_close(array, expected[name])


@pytest.mark.parametrize("optimizer", ["fedavg", "fedavgm", "fedadam", "fedacg"])
def test_clients_may_send_a_part_of_the_model_under_any_server_optimizer(optimizer):
    """All but the first ended in a KeyError."""

    class OnlyBias(Average):
        def expected(self, current):
            return {"0.bias": current["0.bias"]}

        def next_arrays(self, current, replies):
            return current | super().next_arrays(current, replies)

    current, found = network().state_dict(), []
    for half in (Average, OnlyBias):
        strategy = average_of(half=half, server_optimizer=optimizer)
        messages = [
            answer(m, replace(r, arrays={n: r.arrays[n] for n in strategy.expected(current)}))
            for m, r in all_answers(strategy, current)
        ]
        found.append(tensors(strategy.aggregate_train(1, messages)[0]))
    whole, part = found
    assert same_bits(part, current | {"0.bias": whole["0.bias"]})


def test_a_server_half_that_changes_what_it_was_given_is_refused():
    """The model is the run's if the next is not finite; a reply may be a client's state."""

    class InPlace(Average):
        def next_arrays(self, current, replies):
            following = super().next_arrays(current, replies)
            self.changed(current, replies).mul_(0.5)
            return following

    current = network().state_dict()
    name = next(iter(current))
    for changed in (
        lambda self, current, replies: current[name],
        lambda self, current, replies: replies[1].arrays[name],
    ):
        InPlace.changed = changed
        strategy = average_of(half=InPlace)
        messages = [answer(*each) for each in all_answers(strategy, current)]
        with pytest.raises(ValueError, match=r"InPlace.next_arrays \(.*\) changes the arrays that"):
            strategy.aggregate_train(1, messages)


class CountedDict(dict[str, TrainReply]):
    """Counts how often all of its keys are looked at."""

    num_looks = 0

    def keys(self):
        self.num_looks += 1
        return super().keys()


@pytest.mark.parametrize(
    ("count", "share", "is_left_out"),
    [(100_000, 0.25, True), (20, 0.25, False), (100_000, 1.0, False)],
)
def test_a_client_that_declares_many_samples_and_opposes_the_others_is_left_out(
    count, share, is_left_out
):
    strategy = average_of(counts=[10, 11, 12, 13, count], max_weight_share=share)
    strategy.partition_sizes = {}
    current = network().state_dict()
    for i, message in enumerate(ask(strategy, current)):
        step, num = (-0.1, count) if i == 4 else (0.1, 10 + i)
        arrays = {n: a + step if a.is_floating_point() else a for n, a in current.items()}
        strategy.accept(1, answer(message, reply_of(f"client-{i}", arrays, num)))
    left_out = strategy.validation.report().left_out
    assert list(left_out) == ["client-4"] * is_left_out
    assert all("points against the others' (median cosine -1)" in why for why in left_out.values())


@pytest.mark.parametrize(("num_clients", "is_large"), [(5, False), (6, True)])
def test_a_round_is_large_by_the_updates_of_all_its_clients(monkeypatch, num_clients, is_large):
    current = network().state_dict()
    update = sum(array.nbytes for array in current.values())
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 5 * update)
    strategy = average_of(num_clients)
    ask(strategy, current)
    assert strategy.is_large == is_large


def test_updates_are_measured_from_the_model_that_was_sent():
    """FedACG's look-ahead model: a client that does not move has an update of norm 0."""
    strategy = average_of(server_optimizer="fedacg", norm_bound="fixed", norm_bound_value=1e-5)
    strategy.server_optimizer.load({"0.weight": torch.full((2, 3), 1e3)})
    messages = ask(strategy, network().state_dict())
    replies = [reply_of(f"client-{i}", strategy.sent, 10 + i) for i in range(5)]
    for message, reply in zip(messages, replies, strict=True):
        strategy.accept(1, answer(message, reply))
    assert strategy.validation.report().left_out == {}
    largest = float(strategy.sent["0.weight"].max())
    assert largest > 800
    assert strategy.limits["0.weight"] == pytest.approx(1e4 * largest)


def test_arrays_that_were_not_sent_are_no_part_of_an_update():
    strategy, current = average_of(), network().state_dict()
    ask(strategy, current)
    update = strategy.update_of(reply_of("client-0", current | {"gradient": torch.ones(2)}))
    assert update.keys() == {n for n, array in current.items() if array.is_floating_point()}


def test_the_bounds_on_values_have_room_for_noise():
    strategy = average_of(**{"privacy.epsilon": 0.001, "privacy.clip_norm": 10.0})
    ask(strategy, network().state_dict())
    assert strategy.limits["0.weight"] == 100 * 10 / 0.001


NEEDS_ALL = {  # updates that are compared with each other, or kept
    "median": {"aggregation": "median"},
    "krum": {"aggregation": "krum", "num_malicious": 1},
    "norm bound": {"norm_bound": "median"},
    "diagnostics": {},
    "counts that nothing supports": {},
    "a small round": {},
}


def test_diagnostics_change_no_bit_of_a_large_round_in_which_a_reply_is_rejected(monkeypatch):
    """Enough values that some of the sums lie halfway between two float32 numbers."""
    model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
    monkeypatch.setattr(sys.modules[__name__], "network", lambda: model)
    found = []
    for keeps_updates in (False, True):
        strategy = streaming(monkeypatch)
        messages, _ = spoilt_answers(strategy, model.state_dict(), "words")
        strategy.keeps_updates = keeps_updates
        following, _ = strategy.aggregate_train(1, messages)
        assert list(strategy.report.left_out) == ["client-2"]
        found.append(tensors(following))
    assert same_bits(*found)


def test_the_order_of_a_reply_s_arrays_does_not_decide_what_krum_selects():
    """Krum compares arrays by place: exchanged, two wrong ones would look like the others'."""
    strategy = average_of(aggregation="krum", num_malicious=1)
    answers = all_answers(strategy, start := network().state_dict())
    one = torch.ones(2)
    middle = start | {"0.bias": start["0.bias"] - one, "1.bias": start["1.bias"] + one}
    for i, (message, reply) in enumerate(answers):
        shift = 0.01 * (i - 2)  # client-2 is nearest to the others
        arrays = {n: a + shift if a.is_floating_point() else a for n, a in middle.items()}
        answers[i] = message, replace(reply, arrays=arrays)
    message, reply = answers[2]
    wrong = start | {"0.bias": start["0.bias"] + one, "1.bias": start["1.bias"] - one}
    order = {"0.bias": "1.bias", "1.bias": "0.bias"}
    arrays = {order.get(name, name): wrong[order.get(name, name)] for name in wrong}
    answers[2] = message, replace(reply, arrays=arrays)
    following, _ = strategy.aggregate_train(1, [answer(*each) for each in answers])
    assert not torch.equal(tensors(following)["0.bias"], wrong["0.bias"])


def test_a_reply_counts_for_the_node_that_sent_it_whatever_name_it_gives():
    strategy = average_of()
    answers = all_answers(strategy, network().state_dict())
    as_another = [answer(m, replace(r, client="client-0")) for m, r in answers]
    strategy.aggregate_train(1, as_another)
    assert [r.client for r in strategy.report.accepted] == [f"client-{i}" for i in range(5)]


@pytest.mark.parametrize("is_large", [False, True])
def test_a_second_reply_of_a_client_changes_nothing(is_large, monkeypatch):
    found = []
    for comes_again in (False, True):
        strategy = streaming(monkeypatch) if is_large else average_of()
        answers = all_answers(strategy, network().state_dict())
        replies = [answer(message, reply) for message, reply in answers]
        message, reply = answers[2]
        other = replace(reply, arrays=moved(reply.arrays, seed=9))
        replies += [answer(message, other)] * comes_again
        following, _ = strategy.aggregate_train(1, replies)
        found.append(tensors(following))
        assert (strategy.report.rejected, strategy.report.left_out) == (int(comes_again), {})
    assert same_bits(*found)


def test_a_reply_counts_for_its_client_though_that_is_another_node_by_now():
    """It replied, and restarted before the server had the reply."""
    strategy = average_of()
    replies = [answer(m, r) for m, r in all_answers(strategy, network().state_dict())]
    strategy.accept(1, replies[0])
    for node in list(strategy.roster):
        strategy.roster[node + 100] = strategy.roster.pop(node)
    strategy.aggregate_train(1, replies[1:])
    assert [r.client for r in strategy.report.accepted] == [f"client-{i}" for i in range(5)]
    assert strategy.report.left_out == {}


def test_too_few_good_replies_end_the_round_with_one_line_that_names_them_all():
    strategy = average_of(num_clients=3, min_replies=2)
    (m0, r0), (m1, r1), (m2, _) = all_answers(strategy, network().state_dict())
    replies = [
        Message(Error(1, "OSError: disk full"), reply_to=m2),
        answer(m1, poisoned(r1, math.nan)),
        answer(m0, r0),
    ]
    with pytest.raises(TooFewRepliesError) as caught:
        strategy.aggregate_train(1, replies)
    assert str(caught.value) == (
        "round 1: 1 accepted reply, min-replies = 2. client-1: array '0.weight' holds 1 value "
        "that is not finite; client-2: OSError: disk full"
    )


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("disk full", "client-0, client-1, client-2, client-3, client-4 and 3 more: disk full"),
        ("disk {} full", "client-3, client-4 and 3 more: disk 0 full"),
        ("no {letter}", "; client-3: no d; client-4: no e; and 3 more: see run.log"),
    ],
)
def test_the_line_of_a_round_with_too_few_replies_gives_each_reason_once(reason, end):
    strategy = average_of(num_clients=8)
    messages = ask(strategy, network().state_dict())
    replies = [
        Message(Error(1, reason.format(n, letter="abcdefgh"[n])), reply_to=message)
        for n, message in enumerate(messages)
    ]
    with pytest.raises(TooFewRepliesError) as caught:
        strategy.aggregate_train(1, replies)
    assert str(caught.value).endswith(end)


def test_of_two_replies_a_robust_aggregation_takes_neither():
    """Their median is their mean: one liar would steer it."""
    strategy = average_of(num_clients=3, aggregation="median")
    (m0, r0), (m1, r1), _ = all_answers(strategy, network().state_dict())
    with pytest.raises(TooFewRepliesError, match=r"2 accepted replies, aggregation = 'median' nee"):
        strategy.aggregate_train(1, [answer(m0, r0), answer(m1, r1)])


def test_clients_in_backoff_are_asked_where_a_robust_aggregation_needs_them():
    strategy = average_of(num_clients=4, aggregation="median", backoff_after=1)
    strategy.away = {"client-0"}
    assert strategy.backed_off(1) == {"client-0"}
    strategy.away = {"client-0", "client-1"}
    assert strategy.backed_off(1) == set()


def test_the_report_counts_the_bytes_of_all_that_arrived():
    strategy = average_of(num_clients=2)
    current = network().state_dict()
    (m0, r0), (m1, r1) = all_answers(strategy, current)
    strategy.aggregate_train(1, [answer(m0, r0), answer(m1, poisoned(r1, math.nan))])
    size = sum(a.numel() * a.element_size() for a in current.values())
    assert 2 * size < strategy.report.bytes_up < 2 * size + 5000  # and the records around them


def test_evaluation_leaves_out_bad_replies_too():
    strategy = average_of(num_clients=3, counts=[1, 3, 5], evaluate_clients="all")
    record = request_record(TrainRequest(strategy.config, FACTS, 1, [0], True, "/run"))
    arrays = array_record(network().state_dict())
    messages = sent(list(strategy.configure_evaluate(1, arrays, record, grid=None)))
    scores = (0.2, 0.8)
    replies = [
        answer(m, TrainReply("x", 1, {}, {}, {"num-examples": 1.0 + 2 * i, "global-accuracy": a}))
        for i, (m, a) in enumerate(zip(messages, scores, strict=False))
    ]
    replies.append(Message(Error(1, "ValueError: no test part"), reply_to=messages[2]))
    strategy.aggregate_evaluate(1, replies)
    accepted = {reply.client: reply.metrics for reply in strategy.report.accepted}
    assert [each["global-accuracy"] for each in accepted.values()] == [0.2, 0.8]
    assert strategy.report.left_out == {"client-2": "ValueError: no test part"}


@pytest.mark.parametrize("text", [None, "", "\n \u202e"])
def test_an_error_without_a_printable_reason_is_named_by_its_code(text):
    """In the history and the audit log; the reason was empty."""
    strategy, current = average_of(num_clients=2), network().state_dict()
    first, second = ask(strategy, current)
    good = answer(second, reply_of("client-1", current, 11))
    strategy.aggregate_train(1, [Message(Error(5, text), reply_to=first), good])
    assert strategy.report.left_out == {"client-0": "error 5"}
