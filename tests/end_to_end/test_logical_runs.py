"""A run with logical clients has the bits of one with a node a client, on any number of workers."""

import json
import os
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from client_fixtures import add_small_cnn
from flwr.app import Error, Message
from run_fixtures import (
    NUM_CLIENTS,
    SMALL,
    all_models,
    assert_same_run,
    audit_of,
    history_of,
    resume,
    same_bits,
    without_times,
)

import client_app.handlers
import client_app.process_cache
import server_app.federation
import server_app.inline
import server_app.rounds
import server_app.simulated_roster
import strategies.average
import strategies.validation
from client_app.methods import method_of
from client_app.setup import build_network
from protocol.config import resolve_config
from protocol.messages import tensors
from server_app.exchange import Exchange
from server_app.inline import InlineGrid, run_inline
from server_app.load_model import load_model
from server_app.observers import RunObserver
from server_app.rounds import Run, note_scores, note_trained
from server_app.run_directory import RunDirectory
from server_app.simulated_roster import ByName
from strategies.aggregation import RunningMean
from strategies.average import TooFewRepliesError
from strategies.fedpac import FedPACServer

KEYS = {"fraction-train": 0.5, "local-test-fraction": 0.2, "num-rounds": 3}
# an objective, a stateful one, a procedure with arrays alongside the model, a personal one, one
# whose server sends each client something of its own; and one under a server optimizer with state
CASES = {
    "fedavg": {},
    "moon": {},
    "scaffold": {},
    "fedreco": {},
    "fedpac": {},
    "fedintr": {"server-optimizer": "fedadam"},
}


@pytest.mark.parametrize("method", CASES)
def test_bits_do_not_depend_on_the_workers(run, tmp_path, method):
    keys = SMALL | KEYS | {"method": method, "output-dir": str(tmp_path)} | CASES[method]
    whole = run(keys)
    one = run_inline(keys, NUM_CLIENTS, num_workers=1)
    parts = run_inline(keys | {"num-rounds": 2}, NUM_CLIENTS, num_workers=2)
    run_inline({"resume": str(parts), "num-rounds": 3}, NUM_CLIENTS, num_workers=3)
    for other in (one, parts):
        assert_same_run(other, whole)
        rosters, manifests = (
            [json.loads((f / name).read_text()) for f in (whole, other)]
            for name in ("roster.json", "manifest.json")
        )
        assert rosters[0] == rosters[1]
        assert manifests[0]["split"] == manifests[1]["split"]


@pytest.mark.parametrize("method", CASES)
def test_bits_do_not_depend_on_who_sums_large_updates(run, tmp_path, method, monkeypatch):
    """The server, as replies come, or 1, 2 or 3 workers, in any order, and after a resume."""
    keys = SMALL | KEYS | {"method": method, "output-dir": str(tmp_path)} | CASES[method]
    small = run(keys)
    sums, add, merge = [], RunningMean.add, RunningMean.merge
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    monkeypatch.setattr(RunningMean, "add", lambda s, c, *a: sums.append(1) or add(s, c, *a))
    monkeypatch.setattr(RunningMean, "merge", lambda s, c, a: sums.append(len(c)) or merge(s, c, a))
    whole = run(keys)
    size = NUM_CLIENTS // 2  # of a cohort
    assert sums == [1] * 3 * size
    monkeypatch.setattr(InlineGrid, "pull_messages", last_first(InlineGrid.pull_messages))
    reversed_ = run(keys)
    sums.clear()
    one = run_inline(keys, NUM_CLIENTS, num_workers=1)
    assert sums == [size] * 3
    parts = run_inline(keys | {"num-rounds": 2}, NUM_CLIENTS, num_workers=2)
    run_inline({"resume": str(parts), "num-rounds": 3}, NUM_CLIENTS, num_workers=3)
    assert sum(sums) == 6 * size
    for other in (reversed_, one, parts):
        assert_same_run(other, whole)
    for name, array in all_models(small).items():
        torch.testing.assert_close(all_models(whole)[name], array)


def test_a_lost_reply_is_in_no_sum_of_control_variates(run, tmp_path, monkeypatch):
    """Unlike the models' mean, that sum is not scaled up for it."""
    train = client_app.handlers.handlers["train"]

    def lost(message, context):
        if context.node_config["partition-id"] == 2 and message.content["round"]["round"] == 2:
            raise ValueError("lost")
        return train(message, context)

    monkeypatch.setitem(client_app.handlers.handlers, "train", lost)
    keys = SMALL | {"method": "scaffold", "num-rounds": 3, "output-dir": str(tmp_path)}
    small = run(keys)
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    whole = run(keys)
    for name, array in all_models(small).items():
        torch.testing.assert_close(all_models(whole)[name], array)
    for num_workers in (1, 2):
        other = run_inline(keys, NUM_CLIENTS, num_workers=num_workers)
        assert same_bits(all_models(other), all_models(whole))
        for line, expected in zip(history_of(other), history_of(whole), strict=True):
            assert line["bytes_up"] == expected["bytes_up"]


def test_a_scaffold_worker_sends_nothing_but_sums(tmp_path, monkeypatch):
    """Of the models and of the changes of the control variates, for all of its clients."""
    sent, answer = [], InlineGrid.answer

    def recorded(grid, message):
        reply = answer(grid, message)
        if message.metadata.message_type == "train":
            sent.append({name: tensors(a) for name, a in reply.content.array_records.items()})
        return reply

    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    monkeypatch.setattr(InlineGrid, "answer", recorded)
    keys = SMALL | {"method": "scaffold", "num-rounds": 1, "output-dir": str(tmp_path)}
    run_inline(keys, NUM_CLIENTS, num_workers=2)
    assert len(sent) == 2
    for records in sent:
        assert {name for name, arrays in records.items() if arrays} == {"sum"}
        assert any(name.startswith("dc.") for name in records["sum"])


@pytest.mark.parametrize("snapshot_every", [1, 3])
def test_a_client_whose_extra_is_rejected_takes_no_other_with_it(
    run, tmp_path, monkeypatch, snapshot_every
):
    """The others of its worker train again, from the same state."""
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    monkeypatch.setattr(
        FedPACServer,
        "extra_reason",
        lambda half, reply: "it is odd" * (reply.client == "client-0002" and reply.round > 1),
    )
    keys = SMALL | KEYS | {"method": "fedpac", "fraction-train": 1.0}
    keys["output-dir"] = str(tmp_path)
    keys["snapshot-every"] = snapshot_every
    whole = run(keys)
    for num_workers in (1, 2, 3):
        other = run_inline(keys, NUM_CLIENTS, num_workers=num_workers)
        left_out = [line["left_out"] for line in history_of(other)]
        assert left_out == [{}, *[{"client-0002": "it is odd"}] * 2]
        assert same_bits(all_models(other), all_models(whole))
        sent = [line for line in audit_of(other, "sent") if line["round"] == 2]
        sent = [line for line in sent if line["kind"] == "train"]
        assert history_of(other)[1]["bytes_down"] == sum(each["bytes"] for each in sent)
        if num_workers == 1:
            others = [name for name in sent[0]["clients"] if name != "client-0002"]
            assert [each["clients"] for each in sent[1:]] == [others]


def test_a_round_is_the_same_whoever_rejects_an_update(run, tmp_path, monkeypatch):
    """The server, or a worker, which does not add it to its sum."""
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    train = client_app.handlers.handlers["train"]

    def spoilt(message, context):
        reply = train(message, context)
        if context.node_config["partition-id"] == 2:
            arrays = client_app.handlers.tensors(reply["arrays"])
            next(iter(arrays.values())).view(-1)[0] = 1e30
        return reply

    monkeypatch.setitem(client_app.handlers.handlers, "train", spoilt)
    keys = SMALL | {"num-rounds": 2, "output-dir": str(tmp_path)}
    whole = run(keys)
    [reason] = {line["left_out"]["client-0002"] for line in history_of(whole)}
    assert "holds 1e+30: the bound" in reason
    for num_workers in (1, 3):
        other = run_inline(keys, NUM_CLIENTS, num_workers=num_workers)
        for line, expected in zip(history_of(other), history_of(whole), strict=True):
            assert line["left_out"] == expected["left_out"]
            assert line["rejected"] == expected["rejected"] == 1
        assert same_bits(all_models(other), all_models(whole))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_rejected_update_costs_no_client_a_second_private_release(
    run, tmp_path, monkeypatch, num_workers
):
    """Had the worker summed them, the others would train again."""
    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    reject = strategies.validation.rejection_reason
    monkeypatch.setattr(
        strategies.validation,
        "rejection_reason",
        lambda reply, how: "odd" if reply.client == "client-0002" else reject(reply, how),
    )
    keys = SMALL | {"privacy.epsilon": 0.5, "num-rounds": 2, "output-dir": str(tmp_path)}
    folder = run_inline(keys, NUM_CLIENTS, num_workers=num_workers)
    directory = RunDirectory(folder)
    directory.close()
    assert set(directory.release_counts().values()) == {2}


class Slow(InlineGrid):
    """One worker in a thread, which takes 0.3 s for each client."""

    has_own_clients = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.to_do, self.done = queue.SimpleQueue(), {}
        self.is_idle, Slow.newest = threading.Event(), self
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            message_id, message = self.to_do.get()
            self.done[message_id] = self.answer(message)
            self.is_idle.set()

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        for each in ids:
            self.to_do.put((each, self.waiting.pop(each)))
        return ids

    def pull_messages(self, message_ids):
        return [self.done.pop(each) for each in message_ids if each in self.done]


@pytest.mark.parametrize("hangs", [False, True])
def test_the_time_limit_is_for_each_client_of_a_worker(tmp_path, monkeypatch, hangs):
    """The limit of a round on one worker is four times that of one with four.

    Four clients of a second are more than one limit.
    """
    train, is_over = client_app.handlers.handlers["train"], threading.Event()

    def slow(message, context):
        is_over.wait(60 if hangs else 1.0)
        return train(message, context)

    monkeypatch.setitem(client_app.handlers.handlers, "train", slow)
    monkeypatch.setattr(server_app.inline, "InlineGrid", Slow)
    keys = SMALL | {
        "num-rounds": 1,
        "round-timeout": 0.9 if hangs else 3.0,
        "output-dir": str(tmp_path),
    }
    os.umask(umask := os.umask(0))
    if hangs:
        with pytest.raises(TooFewRepliesError, match=r"within 4 x round-timeout = 3\.6 seconds"):
            run_inline(keys, NUM_CLIENTS, num_workers=1)
        is_over.set()
        Slow.newest.is_idle.wait(30)
        os.umask(umask)  # the client outlived the run, and put back the run's own
    else:
        (line,) = history_of(run_inline(keys, NUM_CLIENTS, num_workers=1))
        assert len(line["participants"]) == NUM_CLIENTS


def test_a_sum_that_comes_after_its_round_is_not_used(tmp_path, monkeypatch):
    """It is read once other clients are asked to evaluate."""
    drain, is_late, held = Exchange.drain, threading.Event(), []

    class Late(InlineGrid):
        has_own_clients = False

        def push_messages(self, messages):
            ids = list(super().push_messages(messages))
            held[:] = held or ids[:1]  # the first worker's in round 1
            return ids

        def pull_messages(self, message_ids):
            return super().pull_messages(set(message_ids) - set(() if is_late.is_set() else held))

    def drain_late(exchange):
        if exchange.late:
            is_late.set()
        drain(exchange)

    monkeypatch.setattr(strategies.average, "STREAM_BYTES", 1)
    monkeypatch.setattr(server_app.inline, "InlineGrid", Late)
    monkeypatch.setattr(Exchange, "drain", drain_late)
    keys = SMALL | {"local-test-fraction": 0.2, "evaluate-clients": "cohort", "num-rounds": 2}
    keys |= {"round-timeout": 2.0, "output-dir": str(tmp_path)}
    first, second = history_of(run_inline(keys, NUM_CLIENTS, num_workers=2))
    assert len(first["left_out"]) == len(first["late"]) == len(first["participants"]) == 2
    assert len(second["participants"]) == NUM_CLIENTS


def test_more_workers_than_clients_give_the_same_bits(run, tmp_path):
    keys = SMALL | {"num-rounds": 2, "output-dir": str(tmp_path)}
    assert_same_run(run_inline(keys, NUM_CLIENTS, num_workers=NUM_CLIENTS + 3), run(keys))


def test_the_models_of_many_clients_follow_from_the_config(tmp_path, monkeypatch):
    add_small_cnn(monkeypatch)
    monkeypatch.setattr(server_app.simulated_roster, "MAX_LISTED", NUM_CLIENTS - 1)
    keys = {"method": "fedreco", "client-models": "cnn-fedreco,small-cnn", "num-rounds": 1}
    keys |= {"local-test-fraction": 0.2, "output-dir": str(tmp_path)}
    monkeypatch.setattr(server_app.simulated_roster.SimulatedRoster, "values", None)
    folder = run_inline(SMALL | keys, NUM_CLIENTS, num_workers=2)
    for number, model in enumerate(["cnn-fedreco", "small-cnn"] * 2):
        found = load_model(folder, f"client-{number:04d}").network
        expected = build_network(resolve_config(keys), (1, 32, 32), 10, model)
        assert str(found) == str(expected)


def last_first(pull):
    """`pull_messages` that answers the newest message first."""

    def pull_messages(grid, message_ids):
        grid.waiting = dict(reversed(grid.waiting.items()))
        return pull(grid, message_ids)

    return pull_messages


def test_nothing_is_asked_of_clients_that_are_not_sampled(run, monkeypatch):
    asked, answer = [], InlineGrid.answer

    def recorded(grid, message):
        simulated = message.content.config_records["simulated"]
        asked.append((message.metadata.message_type, len(simulated["clients"])))
        return answer(grid, message)

    monkeypatch.setattr(InlineGrid, "answer", recorded)
    keys = {"partition": "iid", "num-rounds": 2, "fraction-train": 3 / 1400, "run-name": "wide"}
    keys["data-fraction"] = 1.0  # a sample for each
    folder = run(keys, 1400)
    assert asked == [("train", 3), ("train", 3)]
    lines = audit_of(folder)
    assert [line["event"] for line in lines][:2] == ["started", "joined"]
    assert lines[1]["simulated"] == 1400


@pytest.mark.parametrize(
    ("keys", "num_read"), [({"method": "fedlc"}, 0), ({"method": "fedpac"}, NUM_CLIENTS)]
)
def test_the_start_reads_no_clients_counts_twice(tmp_path, monkeypatch, keys, num_read):
    read, get = [], ByName.__getitem__
    monkeypatch.setattr(
        ByName, "__getitem__", lambda self, name: read.append(name) or get(self, name)
    )
    monkeypatch.setattr(server_app.federation, "run_rounds", lambda *run: None)
    keys = SMALL | KEYS | keys | {"output-dir": str(tmp_path)}
    run_inline(keys, NUM_CLIENTS, num_workers=1)
    assert len(read) == num_read


@pytest.mark.parametrize("every", [1, 2])
def test_no_client_is_asked_twice_for_the_same_score(run, monkeypatch, every):
    """A reply that is lost in round 3 may have changed its client's model."""
    asked, answer = {}, InlineGrid.answer

    def recorded(grid, message):
        kind, reply = message.metadata.message_type, answer(grid, message)
        number = message.content["round"]["round"] if kind != "query" else 0
        if kind == "train":
            assert message.content["round"]["evaluate"] == (number % every == 0)
        if kind == "evaluate":
            place = grid.contexts[message.metadata.dst_node_id].node_config["partition-id"]
            asked.setdefault(number, set()).add(f"client-{place:04d}")
        elif number == 3 and not hasattr(grid, "has_lost"):
            grid.has_lost = True
            return Message(Error(1, "lost"), reply_to=message)
        return reply

    monkeypatch.setattr(InlineGrid, "answer", recorded)
    keys = KEYS | {"method": "fedreco", "num-rounds": 10, "evaluate-every": every}
    whole = history_of(run(keys))
    assert whole[2]["left_out"]
    trained: set[str] = set()
    known: set[str] = set()
    sent: set[str] = set()  # who was ever asked to train
    for line in whole:
        trained = trained - set(line["left_out"]) | set(line["participants"])
        known -= {*line["left_out"], *line["participants"]}
        sent |= {*line["left_out"], *line["participants"]}
        if line["round"] % every == 0:
            everyone = {f"client-{k:04d}" for k in range(NUM_CLIENTS)}
            assert set(line["personal"]["clients"]) == everyone
            known |= set(line["participants"])  # in the replies
            assert asked.pop(line["round"], set()) == sent - known
            known = set(trained)

    part = run(keys | {"num-rounds": 6})
    assert without_times(history_of(resume(part, num_rounds=10))) == without_times(whole)
    monkeypatch.setattr(Run, "keeps_scores", False)  # then everybody is asked each time
    again = history_of(run(keys))
    assert [line.get("personal") for line in again] == [line.get("personal") for line in whole]


def test_the_score_of_a_client_that_was_asked_to_train_does_not_hold():
    run = SimpleNamespace(scores={"b": 0.5, "c": 0.25}, asked={"c"})
    note_trained(run, {"participants": ["a"], "left_out": {"b": "no answer in time"}})
    assert run.scores == {"a": None, "c": 0.25}
    assert run.asked == {"a", "b", "c"}


def test_the_score_of_a_client_that_was_never_asked_is_not_kept():
    """Its model is made from the newest u_0, which the next round changes."""
    scores = {"a": None}
    note_scores(scores, {"personal": {"clients": {"a": 0.5, "b": 0.25}}})
    assert scores == {"a": 0.5}


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "local", "model": "resnet20", "norm": "batch"},
        {"method": "fedreco", "client-models": "small-cnn,cnn-fedreco"},
    ],
)
def test_the_server_scores_clients_that_have_not_trained_as_they_do(run, monkeypatch, keys):
    add_small_cnn(monkeypatch)
    keys = KEYS | keys | {"fraction-train": 1 / NUM_CLIENTS, "local-test-fraction": 0.4}
    num_asked, ask = [], server_app.rounds.evaluate_on_clients
    monkeypatch.setattr(
        server_app.rounds,
        "evaluate_on_clients",
        lambda *what: num_asked.append(len(what[-1])) or ask(*what),
    )
    lines = history_of(run(keys))
    assert not num_asked
    assert all(len(line["personal"]["clients"]) == NUM_CLIENTS for line in lines)
    monkeypatch.setattr(method_of(resolve_config(keys)).__class__, "starts_alike", False)
    assert [line["personal"] for line in history_of(run(keys))] == [
        line["personal"] for line in lines
    ]
    assert num_asked


def test_the_servers_scores_keep_the_networks_that_clients_have(run, monkeypatch):
    built, build = [], client_app.process_cache.build_network
    monkeypatch.setattr(
        client_app.process_cache, "build_network", lambda *what: built.append(1) or build(*what)
    )
    keys = {"method": "fedreco", "local-test-fraction": 0.2, "fraction-train": 1 / NUM_CLIENTS}
    run(keys | {"num-rounds": 4})
    assert len(built) == 2  # the client's and the extractor


def test_clients_with_names_of_their_own_are_asked(tmp_path):
    """A simulation that `run_inline` was given: the split does not follow from the names."""
    nodes = [
        {"partition-id": k, "num-partitions": 3, "name": f"client-{(k + 1) % 3:04d}"}
        for k in range(3)
    ]
    keys = SMALL | {"method": "local", "local-test-fraction": 0.4, "num-rounds": 1}
    keys |= {"fraction-train": 1 / 3, "output-dir": str(tmp_path)}
    (line,) = history_of(run_inline(keys, 3, nodes))
    assert line["evaluation_bytes_up"] > 0
    assert len(line["personal"]["clients"]) == 3


class StopInRound(RunObserver):
    """An observer that interrupts the run."""

    def __init__(self, number):
        self.number = number

    def on_round(self, line):
        if line["round"] == self.number:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_with_a_million_clients_resumes_with_the_same_bits(tmp_path):
    num, pictures = 10**6, tmp_path / "pictures.npz"
    images = np.random.default_rng(0).integers(0, 256, (num, 16, 16), dtype=np.uint8)
    labels = np.arange(num) % 10
    np.savez(pictures, x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    keys = {"source": f"npz:{pictures}", "model": "cnn-fedreco", "partition": "iid"}
    keys |= {"method": "moon", "fraction-train": 10 / num, "num-rounds": 3, "keep-state": True}
    keys |= {"diagnostics": "drift", "device": "cpu", "output-dir": str(tmp_path)}
    whole = run_inline(keys | {"run-name": "whole"}, num)
    part = keys | {"run-name": "part"}
    with pytest.raises(KeyboardInterrupt):
        run_inline(part, num, observers=[StopInRound(2)])
    resume(tmp_path / "part", num)
    assert same_bits(all_models(tmp_path / "part"), all_models(whole))
    assert len(list((whole / "clients").iterdir())) <= 30
    assert sum(path.stat().st_size for path in whole.rglob("*.json*")) < 10**7


def test_scores_that_a_damaged_history_may_not_know_to_be_old_are_not_used(run, tmp_path):
    keys = KEYS | {"method": "local", "lr": 0.1, "local-epochs": 3, "local-test-fraction": 0.3}
    keys |= {"num-rounds": 8, "evaluate-every": 4}
    whole = run(keys)
    with pytest.raises(KeyboardInterrupt):
        run_inline(
            SMALL | keys | {"output-dir": str(tmp_path), "run-name": "part"},
            NUM_CLIENTS,
            observers=[StopInRound(7)],
        )
    path = tmp_path / "part" / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], "{damaged\n", "{damaged\n", *lines[6:]]))
    resume(path.parent)
    assert history_of(path.parent)[-1]["personal"] == history_of(whole)[-1]["personal"]
