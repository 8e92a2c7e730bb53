"""Logical clients: each is simulated once, by placement near the optimum, with its own reply."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import SMALL, same_bits

import client_app.app
import client_app.handlers
from client_app.setup import dataset_spec_of, model_for, open_source
from data.partitions import Parts
from flower_adapter import GPU_LOST, begin_task
from protocol.config import resolve_config
from protocol.messages import (
    RosterRequest,
    TrainReply,
    array_record,
    message_content,
    request_record,
    simulated_content,
)
from server_app.client_registry import gather_roster
from server_app.federation import exchange_of
from server_app.inline import InlineGrid, simulated_nodes
from server_app.logical_clients import LogicalGrid, place, with_logical_clients
from server_app.simulated_roster import ByName, SimulatedRoster, check_simulated_roster
from strategies import strategy_for
from strategies.sampling import ClientNames, name_order, sample_cohort, sample_numbers


def makespan(times, shares, rates):
    return max(
        rate * sum(times[i] for i in share) for share, rate in zip(shares, rates, strict=True)
    )


def optimum(times, rates):
    return min(
        makespan(
            times, [[i for i, w in enumerate(chosen) if w == v] for v in range(len(rates))], rates
        )
        for chosen in itertools.product(range(len(rates)), repeat=len(times))
    )


times_of_some = st.lists(st.integers(1, 50).map(float), min_size=1, max_size=6)


@given(times_of_some, st.integers(1, 3))
def test_placement_is_within_four_thirds_of_the_optimum(times, num_workers):
    rates = [0.5] * num_workers
    placed = place(times, rates)
    assert sorted(itertools.chain(*placed)) == list(range(len(times)))
    bound = 4 / 3 - 1 / (3 * num_workers)
    assert makespan(times, placed, rates) <= bound * optimum(times, rates) + 1e-9


@given(times_of_some, st.lists(st.integers(1, 8).map(float), min_size=1, max_size=3))
def test_placement_on_unequal_workers_is_within_five_thirds_of_the_optimum(times, rates):
    placed = place(times, rates)
    assert sorted(itertools.chain(*placed)) == list(range(len(times)))
    assert makespan(times, placed, rates) <= 5 / 3 * optimum(times, rates) + 1e-9


def optimum_of_equals(times, num_workers):
    """The makespan of the best placement on equal workers; whole times."""
    loads = {(0,) * num_workers}
    for time in times:
        loads = {
            tuple(sorted((*load[:w], load[w] + time, *load[w + 1 :])))
            for load in loads
            for w in range(num_workers)
        }
    return min(map(max, loads))


def some_times(num):
    return st.lists(st.integers(1, 50), min_size=num, max_size=num + 2)


@given(
    st.one_of(
        st.tuples(some_times(12), st.integers(2, 3)),
        st.tuples(st.one_of(some_times(30), some_times(64)), st.just(2)),
    )
)
def test_several_messages_a_worker_are_played_within_four_thirds_of_the_optimum(case):
    """Whoever is idle first plays the next message, as in Ray."""
    times, num_workers = case
    grid = LogicalGrid(InlineGrid(client_app.app.app, simulated_nodes(num_workers)), len(times))
    parts = grid.parts([float(time) for time in times], is_training=True)
    assert len(parts) > num_workers
    assert sorted(i for _, places in parts for i in places) == list(range(len(times)))
    idle_from = [0] * num_workers
    for _, places in parts:
        first = idle_from.index(min(idle_from))
        idle_from[first] += sum(times[i] for i in places)
    assert max(idle_from) <= 4 / 3 * optimum_of_equals(times, num_workers)


class Nodes(InlineGrid):
    """Records what is asked, and answers with each client's number, or fails."""

    fails = False
    simulates_clients = True

    def __init__(self, num):
        super().__init__(client_app.app.app, simulated_nodes(num))
        self.asked = []

    def answer(self, message):
        simulated = message.content.config_records["simulated"]
        self.asked.append((message.metadata.dst_node_id, list(simulated["clients"])))
        if self.fails:
            return Message(Error(9, "the worker died"), reply_to=message)
        content = RecordDict()
        for k, (client, last) in enumerate(
            zip(simulated["clients"], simulated["counted-rounds"], strict=True)
        ):
            if client == 3:
                content[f"error-{k}"] = ConfigRecord({"code": 1, "reason": "no data"})
            else:
                content[f"reply-{k}"] = ConfigRecord({"client": client, "last": last})
        return Message(content, reply_to=message)


def asked(grid, nodes, kind="train"):
    arrays, none = array_record({}), array_record({})
    return list(
        grid.push_messages(
            Message(
                message_content(ConfigRecord({"round": 1}), arrays, none, node * 10),
                dst_node_id=node,
                message_type=kind,
            )
            for node in nodes
        )
    )


def test_a_cuda_error_of_one_client_ends_the_whole_message(monkeypatch):
    """The process can train no other, and is to be replaced: the message is sent again."""
    trained = []

    def fail(message, context):
        trained.append(context.node_config["partition-id"])
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(client_app.handlers.handlers, "train", fail)
    content = message_content(ConfigRecord({"round": 1}), array_record({}), array_record({}), 0)
    whole = simulated_content([content, content], [4, 7], 9)
    grid = InlineGrid(client_app.app.app, simulated_nodes(1))
    (node,) = grid.get_node_ids()
    message = Message(whole, dst_node_id=node, message_type="train")
    (reply,) = grid.pull_messages(grid.push_messages([message]))
    assert reply.error.code == GPU_LOST
    assert "illegal memory access" in reply.error.reason
    assert trained == [4]


@given(st.sets(st.integers(2, 41), min_size=1, max_size=40), st.integers(1, 5))
def test_everybody_is_asked_once_and_answers_for_itself(nodes, num_workers):
    below = Nodes(num_workers)
    grid = LogicalGrid(below, 40)
    grid.expected_time = lambda node: float(node % 7)
    ids = asked(grid, sorted(nodes))
    replies = {}
    while new := list(grid.pull_messages(ids)):
        replies |= {r.metadata.reply_to_message_id: r for r in new}
    assert sorted(itertools.chain(*(clients for _, clients in below.asked))) == sorted(
        node - 2 for node in nodes
    )
    assert len(below.asked) <= 2 * num_workers
    for message_id, node in zip(ids, sorted(nodes), strict=True):
        reply = replies[message_id]
        assert reply.metadata.src_node_id == node
        if node == 5:
            assert (reply.error.code, reply.error.reason) == (1, "no data")
        else:
            assert dict(reply.content["reply"]) == {"client": node - 2, "last": node * 10}
    assert list(grid.pull_messages(ids)) == []
    assert (grid.sent, grid.carrier, grid.arrived) == ({}, {}, {})


def test_the_workers_message_lives_as_long_as_its_clients(monkeypatch):
    grid, lifetimes = LogicalGrid(Nodes(1), 2), []
    monkeypatch.setattr(
        grid.grid, "push_messages", lambda wholes: lifetimes.extend(m.metadata.ttl for m in wholes)
    )
    content = message_content(ConfigRecord({"round": 1}), array_record({}), array_record({}), 0)
    grid.push_messages(
        [Message(content, dst_node_id=node, message_type="train", ttl=77.0) for node in (2, 3)]
    )
    assert lifetimes == [77.0]


def test_a_reply_is_held_until_it_is_asked_for():
    grid = LogicalGrid(Nodes(1), 3)
    ids = asked(grid, [2, 3, 4])
    for message_id in ids:  # all came with the first
        (reply,) = grid.pull_messages([message_id])
        assert reply.metadata.reply_to_message_id == message_id


@given(st.integers(1, 40), st.integers(1, 5))
def test_evaluating_everybody_is_one_message_a_worker(num_clients, num_workers):
    below = Nodes(num_workers)
    grid = LogicalGrid(below, 40)
    turns = exchange_of(grid, None, None, num_workers).turns
    ids = asked(grid, range(2, 2 + num_clients), "evaluate")
    while list(grid.pull_messages(ids)):
        pass
    workers = [worker for worker, _ in below.asked]
    assert len(workers) == len(set(workers)) == min(num_workers, num_clients)
    clients = sorted(itertools.chain(*(share for _, share in below.asked)))
    assert clients == list(range(num_clients))
    assert turns(num_clients) == max(len(share) for _, share in below.asked)


def test_a_slow_worker_is_measured_and_gets_less(monkeypatch):
    """One of two takes three times as long a sample: in the next round it gets a quarter.

    Each answers its node's first message; who is done first, the other node's second one too.
    """
    below = Nodes(2)
    grid = LogicalGrid(below, 40)
    grid.expected_time = lambda node: 1.0 + node % 3
    answer = below.answer

    def timed(message):
        content = answer(message).content
        simulated = message.content.config_records["simulated"]
        node = message.metadata.dst_node_id
        is_slow = (node == min(grid.workers)) == (node not in answered)
        answered.append(node)
        for k, client in enumerate(simulated["clients"]):
            seconds = 0.1 * (3.0 if is_slow else 1.0) * grid.expected_time(client + 2)
            content[f"metrics-{k}"] = MetricRecord({"seconds": seconds})
        return Message(content, reply_to=message)

    monkeypatch.setattr(below, "answer", timed)
    units = {}
    for _ in range(3):
        below.asked, answered = [], []
        ids = asked(grid, range(10, 42))
        while list(grid.pull_messages(ids)):
            pass
        for worker in grid.workers:
            clients = [c for w, share in below.asked if w == worker for c in share]
            units[worker] = sum(grid.expected_time(client + 2) for client in clients)
    slow, fast = (units[worker] for worker in grid.workers)
    assert slow / (slow + fast) == pytest.approx(1 / 4, abs=0.05)


def test_a_worker_that_was_not_measured_counts_as_the_mean_of_the_others():
    grid = LogicalGrid(Nodes(3), 60)
    first, second, third = grid.workers
    grid.seconds_per_unit = {first: 0.01, second: 0.03}
    num = Counter[int]()
    for worker, places in grid.parts([1.0] * 60, is_training=False):
        num[worker] += len(places)
    speeds = [100, 100 / 3, 50]  # units a second
    expected = [60 * speed / sum(speeds) for speed in speeds]
    assert [num[w] for w in (first, second, third)] == pytest.approx(expected, abs=1)


def test_a_worker_that_was_slow_once_is_tried_again():
    grid = LogicalGrid(Nodes(4), 40)
    slow = grid.workers[-1]
    grid.seconds_per_unit = {worker: 100.0 if worker == slow else 1.0 for worker in grid.workers}
    num_idle = 0
    while slow not in dict(grid.parts([1.0] * 16, is_training=True)):
        asked(grid, range(2, 18))
        num_idle += 1
        assert num_idle < 10
    assert num_idle > 0


def test_a_worker_without_clients_moves_halfway_to_the_mean():
    grid = LogicalGrid(Nodes(2), 4)
    grid.seconds_per_unit = {1: 9.0, 2: 1.0}
    grid.relax_idle({2})
    assert grid.seconds_per_unit == {1: 7.0, 2: 1.0}


def test_a_second_measurement_of_a_worker_counts_as_much_as_what_was_known():
    grid = LogicalGrid(Nodes(1), 4)
    [worker] = grid.workers
    grid.expected_time = lambda node: 2.0
    message = Message(RecordDict(), dst_node_id=2, message_type="train")
    for seconds, expected in ((8.0, 4.0), (4.0, 3.0), (2.0, 2.0)):
        content = RecordDict({"metrics": MetricRecord({"seconds": seconds})})
        grid.learn(worker, [message, message], [content, Error(9, "died")])
        assert grid.seconds_per_unit == {worker: expected}


def test_many_clients_are_sent_in_parts_that_get_smaller():
    grid = LogicalGrid(Nodes(3), 40)
    assert len(grid.parts([1.0] * 11, is_training=True)) == 3
    assert len(grid.parts([1.0] * 12, is_training=True)) == 3 + 1
    assert len(grid.parts([1.0] * 12, is_training=False)) == 3
    parts = grid.parts([float(time) for time in range(200)], is_training=True)
    # the longest first: 175 clients, then 22, then 3
    assert [len(places) for _, places in parts] == [59, 58, 58, 7, 7, 8, 1, 1, 1]
    assert [max(places) for _, places in parts[::3]] == [199, 24, 2]
    assert len(LogicalGrid(Nodes(1), 40).parts([1.0] * 12, is_training=True)) == 1


def test_a_worker_that_dies_is_an_error_of_each_of_its_clients():
    below = Nodes(2)
    below.fails = True
    grid = LogicalGrid(below, 8)
    ids = asked(grid, range(2, 8))
    replies = [reply for _ in range(2) for reply in grid.pull_messages(ids)]
    assert {reply.error.reason for reply in replies} == {"the worker died"}
    assert sorted(reply.metadata.src_node_id for reply in replies) == list(range(2, 8))


def test_clients_are_logical_where_a_simulation_has_fewer_nodes():
    below = Nodes(3)
    assert with_logical_clients(below, 0) is below
    assert with_logical_clients(below, 3) is below
    one_each = InlineGrid(client_app.app.app, simulated_nodes(3))
    assert with_logical_clients(one_each, 4) is one_each
    logical = with_logical_clients(below, 4)
    assert list(logical.get_node_ids()) == [2, 3, 4, 5]
    assert with_logical_clients(logical, 5) is logical


@pytest.mark.parametrize("num_clients", [1, 9999, 10_000, 10_001, 123_456])
def test_numbers_are_ordered_as_their_names(num_clients):
    names = [f"client-{n:04d}" for n in name_order(num_clients)]
    assert names == sorted(f"client-{n:04d}" for n in range(num_clients))


def test_who_is_sampled_is_the_same_in_every_version():
    names = [f"client-{n:04d}" for n in range(10)]
    chosen = [
        sample_cohort(names, ["client-0003"], 0.3, 5, server_round) for server_round in (1, 2)
    ]
    assert chosen == [
        ["client-0000", "client-0005", "client-0009"],
        ["client-0001", "client-0004", "client-0009"],
    ]


def test_numbers_are_sampled_as_their_names():
    names = ClientNames(10_050)
    everyone = set(names)
    assert len(everyone) == len(names) == 10_050
    assert everyone <= names
    away = {"client-0007", "client-10049", *(f"client-{n:04d}" for n in range(9000, 9900))}
    for server_round in (1, 2):
        chosen = sample_cohort(everyone, away, 0.01, 5, server_round)
        numbers = [names.number(name) for name in away]
        found = sample_numbers(names.in_order, numbers, 0.01, 5, server_round)
        assert [f"client-{n:04d}" for n in found] == chosen
    for name in ("client-10050", "client-7", "client-00007", "client--007", "site-a", "client-²"):
        assert name not in names


@pytest.mark.parametrize(
    "keys",
    [
        *({}, {"local-test-fraction": 0.3}, {"local-test-fraction": 0.01}),
        {"partition": "shards", "data-fraction": 0.5},
    ],
)
def test_the_computed_roster_is_what_clients_would_answer(keys):
    config = resolve_config(SMALL | keys)
    source = open_source(config)
    query = request_record(RosterRequest(config, dataset_spec_of(config, source)))
    grid = InlineGrid(client_app.app.app, simulated_nodes(6))
    gathered = gather_roster(grid, config, query, source)
    roster = SimulatedRoster(config, source, 6)
    assert dict(roster) == gathered
    counts = [[e.num_examples, e.num_test_examples] for e in gathered.values()]
    assert roster.sizes.tolist() == counts
    assert roster.num_train == sum(n for n, _ in counts)
    roster._entry = lambda number: pytest.fail("made an entry for a client's label counts")
    assert dict(roster.label_counts) == {e.client: e.label_counts for e in gathered.values()}
    check_simulated_roster(roster, bool(config.data.local_test_fraction))
    if not config.data.local_test_fraction:
        with pytest.raises(ValueError, match="client client-0000 has no local test part"):
            check_simulated_roster(roster, True)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_scaffold_weighs_without_an_entry_of_each_client(weighting):
    given = {"method": "scaffold", "scaffold.control-weighting": weighting}
    config = resolve_config(SMALL | given | {"local-test-fraction": 0.3})
    source = open_source(config)
    roster, model = SimulatedRoster(config, source, 6), model_for(config, source)
    made, entry = [], roster._entry
    roster._entry = lambda number: made.append(number) or entry(number)
    current = {name: array.clone() for name, array in model.state_dict().items()}
    sizes = ByName(roster, lambda n: int(roster.sizes[n, 0]))
    replies = []
    for k in (1, 4):
        torch.manual_seed(k)
        dc = {f"dc.{name}": torch.randn_like(p) for name, p in model.named_parameters()}
        metrics = {"num-examples": roster[2 + k].num_examples}
        replies.append(TrainReply(f"client-{k:04d}", 1, current, dc, metrics))

    def next_c(entries):
        server = strategy_for(config, model)
        server.roster, server.partition_sizes = entries, sizes
        server.next_arrays(current, replies)
        return server.own_state()

    computed = next_c(roster)
    assert set(made) == {1, 4}
    assert same_bits(computed, next_c(dict(roster)))


@pytest.mark.parametrize(
    ("networks", "found"),
    [
        ("cnn-fedreco", "cnn-fedreco 84 (6 clients)"),
        ("cnn-fedreco,resnet20", "cnn-fedreco 84 (3 clients), resnet20 64 (3 clients)"),
    ],
)
def test_networks_that_do_not_fit_the_runs_model_are_refused_with_all_widths(networks, found):
    keys = {"method": "fedreco", "model": "resnet20", "norm": "group", "client-models": networks}
    config = resolve_config(SMALL | keys)
    roster = SimulatedRoster(config, open_source(config), 6)
    with pytest.raises(ValueError, match="widths differ") as refused:
        check_simulated_roster(roster, False)
    assert f"{found}; the run's model resnet20 has 64" in str(refused.value)


def test_a_network_that_no_client_trains_may_have_another_width():
    networks = {"model": "resnet20", "norm": "group", "client-models": "resnet20,resnet20,resnet18"}
    config = resolve_config(SMALL | networks | {"method": "fedreco"})
    check_simulated_roster(SimulatedRoster(config, open_source(config), 2), False)


@pytest.mark.parametrize("metrics", ["exact", "withheld"])
def test_a_class_that_no_client_has_is_named_where_clients_tell_their_counts(metrics):
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "privacy.metrics": metrics}
    config = resolve_config(SMALL | keys)
    source = open_source(config)
    roster = SimulatedRoster(config, source, 6)
    of_others = np.flatnonzero(np.asarray(source.train.labels) != 3)
    roster.parts = Parts(of_others, np.arange(len(of_others)) % 6, 6)
    if metrics == "withheld":
        check_simulated_roster(roster, False)
    else:
        with pytest.raises(ValueError, match=f"class.*{source.class_names[3]}"):
            check_simulated_roster(roster, False)


def test_the_digest_of_a_split_is_of_all_that_it_depends_on():
    def digest(num_clients=4, **keys):
        config = resolve_config(SMALL | keys)
        return SimulatedRoster(config, open_source(config), num_clients).digest()

    same, others = digest(), [{"seed": 9}, {"local-test-fraction": 0.2}, {"partition": "shards"}]
    assert digest(lr=0.5) == same
    assert len({same, digest(5), *(digest(**keys) for keys in others)}) == 5


def test_a_message_from_a_server_with_other_code_is_refused():
    config = resolve_config(SMALL)
    source = open_source(config)
    record = request_record(RosterRequest(config, dataset_spec_of(config, source)))
    begin_task(1)
    context = Context(1, 2, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})

    def answer(record):
        message = Message(RecordDict({"round": record}), dst_node_id=2, message_type="query")
        return client_app.handlers.answer(message, context)

    assert isinstance(answer(record), RecordDict)
    other = ConfigRecord({**record, "code": "0123456789abcdef"})
    refused = answer(other)
    assert isinstance(refused, Error)
    assert "the server 0123456789abcdef: start the SuperLink" in refused.reason
    assert isinstance(answer(ConfigRecord({k: v for k, v in record.items() if k != "code"})), Error)
