"""Rounds that are evaluated and written to disk while clients train in the next one."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message, MessageType
from run_fixtures import all_models, history_of, resume, same_bits, summary_of, without_times

import server_app.federation
import server_app.inline
from server_app.federation import DivergedError
from server_app.inline import InlineGrid
from server_app.run_directory import RunDirectory
from strategies import Average

Run = Callable[..., Path]
events: list[tuple[str, int]] = []  # what happened, and in which round; 0 for an evaluation


class Elsewhere(InlineGrid):
    """As if clients ran in processes of their own and were fast: they answer when asked."""

    has_own_clients: ClassVar[bool] = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        self.answered: dict[str, Message] = getattr(self, "answered", {})
        for message_id, message in zip(ids, messages, strict=True):
            self.answered[message_id] = self.answer(self.waiting.pop(message_id))
            if message.metadata.message_type == MessageType.TRAIN:
                events.append(("trained", int(message.content["round"]["round"])))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answered.pop(each) for each in message_ids if each in self.answered]


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All runs of this file have such clients; `events` has their training and the evaluations."""
    score = server_app.federation.global_score
    append = server_app.federation.append_history

    def scored(*arguments: Any) -> dict[str, float]:
        events.append(("evaluated", 0))
        return score(*arguments)

    def appended(path: Path, line: dict[str, Any]) -> None:
        append(path, line)
        events.append(("written", line["round"]))

    events.clear()
    monkeypatch.setattr(server_app.inline, "InlineGrid", Elsewhere)
    monkeypatch.setattr(server_app.federation, "global_score", scored)
    monkeypatch.setattr(server_app.federation, "append_history", appended)


def test_a_round_is_evaluated_and_written_once_clients_train_in_the_next(run):
    run({"num-rounds": 3}, num_clients=1)
    assert events == [
        ("trained", 1),
        ("trained", 2),
        ("evaluated", 0),
        ("written", 1),
        ("trained", 3),
        ("evaluated", 0),
        ("written", 2),
        ("evaluated", 0),
        ("written", 3),
    ]


@pytest.mark.parametrize(
    "keys",
    [
        {"method": "moon"},
        {"method": "scaffold", "evaluate-every": 2},
        {"method": "fedreco", "local-test-fraction": 0.2, "fraction-train": 0.5},
        {"method": "fedavg", "local-test-fraction": 0.2, "evaluate-clients": "all"},
        {"server-optimizer": "fedadam", "checkpoint-every": 2, "diagnostics": "drift"},
    ],
)
def test_history_and_models_are_those_of_rounds_one_after_the_other(run, monkeypatch, keys):
    folder = run(keys | {"num-rounds": 4})
    monkeypatch.setattr(server_app.inline, "InlineGrid", InlineGrid)
    expected = run(keys | {"num-rounds": 4})
    assert without_times(history_of(folder)) == without_times(history_of(expected))
    assert same_bits(all_models(folder), all_models(expected))


def test_the_seconds_of_all_rounds_are_those_of_the_clock(run, monkeypatch):
    """An evaluation during the next round counts once."""
    now = 0.0
    score, train = server_app.federation.global_score, Elsewhere.answer

    def clock() -> float:
        return now

    def scored(*arguments: Any) -> dict[str, float]:
        nonlocal now
        now += 100.0
        return score(*arguments)

    def trained(grid: Elsewhere, message: Message) -> Message:
        nonlocal now
        now += 1.0
        return train(grid, message)

    monkeypatch.setattr(server_app.federation.time, "perf_counter", clock)
    monkeypatch.setattr(server_app.federation, "global_score", scored)
    monkeypatch.setattr(Elsewhere, "answer", trained)
    folder = run({"num-rounds": 3, "local-epochs": 0}, num_clients=2)
    seconds = [line["seconds"] for line in history_of(folder)]
    assert [s["training"] for s in seconds] == [2.0, 2.0, 2.0]
    assert [s["evaluation"] for s in seconds] == [100.0, 100.0, 100.0]


@pytest.mark.parametrize(
    ("nodes", "cores", "expected"),
    [([], 8, 0), (["a"] * 6, 8, 2), (["a"] * 8, 8, 1), (["a"] * 9, 8, 1), (["a", "b"] * 3, 8, 5)],
)
def test_an_evaluation_leaves_the_workers_their_cores(monkeypatch, nodes, cores, expected):
    monkeypatch.setattr(server_app.federation, "num_cores", lambda: cores)
    workers = [SimpleNamespace(node=node) for node in nodes]
    assert server_app.federation.threads_beside(workers) == expected


@pytest.mark.parametrize("threads", [0, 3])
def test_only_an_evaluation_beside_workers_has_other_threads(run, monkeypatch, threads):
    evaluate, seen = server_app.federation.evaluate, []

    def evaluated(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return evaluate(*arguments)

    monkeypatch.setattr(server_app.federation, "threads_beside", lambda workers: threads)
    monkeypatch.setattr(server_app.federation, "evaluate", evaluated)
    run({"num-rounds": 2, "threads": 1})
    assert seen == [threads or 1] * 2
    assert torch.get_num_threads() == 1


def test_with_private_releases_each_round_ends_before_the_next(run):
    run({"num-rounds": 2, "privacy.epsilon": 0.5, "privacy.delta": 1e-3}, num_clients=1)
    assert [e for e in events if e[0] != "evaluated"] == [
        ("trained", 1),
        ("written", 1),
        ("trained", 2),
        ("written", 2),
    ]


STEPS = [
    (server_app.federation, "evaluate"),
    (server_app.federation, "append_history"),
    (RunDirectory, "save_checkpoint"),
]


@pytest.mark.parametrize(("owner", "step"), STEPS)
@pytest.mark.parametrize("method", ["moon", "fedavg-ft", "fedreco"])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_kill_while_clients_are_a_round_ahead_changes_nothing_in_the_end(
    run, monkeypatch, method, owner, step, is_damaged
):
    """Even if a resume has to begin from the older checkpoint."""
    keys = {"method": method, "num-rounds": 6, "local-test-fraction": 0.2}
    if (method, step) == ("fedreco", "evaluate"):
        pytest.skip("no global model is evaluated")
    whole, function = run(keys), getattr(owner, step)
    calls = 0

    def kill(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, kill)
        with pytest.raises(KeyboardInterrupt):
            run(keys | {"run-name": "killed"})
    broken = whole.parent / "killed"
    assert ("trained", 5) in events[events.index(("trained", 6)) + 1 :]  # after `whole`'s
    assert summary_of(broken)["status"] == "stopped"
    newest = max((broken / "checkpoints").iterdir())
    assert newest.name.startswith("round-00003")
    if is_damaged:
        newest.write_bytes(b"damaged")
    resume(broken)
    assert same_bits(all_models(broken), all_models(whole))
    assert without_times(history_of(broken)) == without_times(history_of(whole))


def test_a_round_is_written_if_the_next_one_cannot_begin(run, monkeypatch):
    configure = Average.configure_train

    def fail(strategy: Average, server_round: int, *rest: Any) -> Any:
        if server_round == 3:
            raise OSError("the network is down")
        return configure(strategy, server_round, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Average, "configure_train", fail)
        with pytest.raises(OSError, match="the network is down"):
            run({"num-rounds": 4, "run-name": "cut"})
    whole = run({"num-rounds": 4})
    broken = whole.parent / "cut"
    assert [line["round"] for line in history_of(broken)] == [1, 2]
    resume(broken)
    assert without_times(history_of(broken)) == without_times(history_of(whole))


def test_a_model_that_diverges_ends_the_run_after_the_round_before(run, monkeypatch):
    monkeypatch.setattr(
        server_app.federation, "all_finite", lambda arrays: ("trained", 3) not in events
    )
    with pytest.raises(DivergedError, match="round 3"):
        run({"num-rounds": 4, "run-name": "diverged"})
    assert ("written", 2) in events
    assert ("written", 3) not in events
