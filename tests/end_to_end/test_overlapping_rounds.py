"""Rounds that are evaluated and written to disk while clients train in the next one."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message, MessageType
from run_fixtures import assert_same_run, history_of, resume, summary_of

import server_app.federation
import server_app.inline
import server_app.rounds
from server_app.inline import InlineGrid
from server_app.rounds import DivergedError
from server_app.run_directory import RunDirectory, read_arrays
from strategies import Average

Run = Callable[..., Path]
events: list[tuple[str, int]] = []  # what happened, and of which round


class Elsewhere(InlineGrid):
    """As if clients ran in processes of their own: they reply immediately."""

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
    score = server_app.rounds.global_score
    append = server_app.rounds.append_history

    def scored(*arguments: Any) -> dict[str, float]:
        written = [n for what, n in events if what == "written"]
        events.append(("evaluated", written[-1] + 1 if written else 1))
        return score(*arguments)

    def appended(path: Path, line: dict[str, Any]) -> None:
        append(path, line)
        events.append(("written", line["round"]))

    events.clear()
    monkeypatch.setattr(server_app.inline, "InlineGrid", Elsewhere)
    monkeypatch.setattr(server_app.rounds, "global_score", scored)
    monkeypatch.setattr(server_app.rounds, "append_history", appended)


APART = [(what, n) for n in (1, 2, 3) for what in ("trained", "evaluated", "written")]
OVERLAPPING = [
    ("trained", 1),
    ("evaluated", 1),
    ("written", 1),
    ("trained", 2),
    ("trained", 3),
    ("evaluated", 2),
    ("written", 2),
    ("evaluated", 3),
    ("written", 3),
]


def test_a_round_is_evaluated_and_written_while_clients_train_in_the_next(run):
    """But for the first: until then it is not known how long that takes."""
    run({"num-rounds": 3}, num_clients=1)
    assert events == OVERLAPPING


@pytest.mark.parametrize(
    "why", ["private releases", "a slow evaluation", "a late client", "clients in this process"]
)
def test_a_round_ends_before_the_next_with(run, monkeypatch, why):
    keys, expected = {"num-rounds": 3}, APART
    if why == "private releases":
        keys |= {"privacy.epsilon": 0.5, "privacy.delta": 1e-3}
    if why == "a slow evaluation":  # replies in a deployment expire meanwhile
        clock = SimpleNamespace(monotonic=itertools.count(step=100).__next__)
        monkeypatch.setattr(server_app.federation, "time", clock)  # other threads keep theirs
        keys |= {"round-timeout": 999.0}
    if why == "a late client":
        ask = server_app.federation.Exchange.ask

        def ask_with_late(exchange: Any, *arguments: Any, **options: Any) -> Any:
            exchange.late["1"] = "client-0007's reply"
            return ask(exchange, *arguments, **options)

        monkeypatch.setattr(server_app.federation.Exchange, "ask", ask_with_late)
        monkeypatch.setattr(server_app.federation.Exchange, "drain", lambda exchange: None)
    if why == "clients in this process":
        monkeypatch.setattr(Elsewhere, "has_own_clients", True)
    run(keys, num_clients=1)
    assert events == expected


@pytest.mark.parametrize("keys", [{"evaluate-every": 2}, {"checkpoint-every": 2}])
def test_the_first_round_of_a_kind_ends_before_the_next(run, keys):
    """Its evaluation or its checkpoint may take longer than replies wait."""
    run(keys | {"num-rounds": 5}, num_clients=1)
    apart = [(what, n) for n in (1, 2) for what in ("trained", "evaluated", "written")]
    both = [("evaluated", 3), ("written", 3), ("trained", 5), ("evaluated", 4), ("written", 4)]
    expected = [*apart, ("trained", 3), ("trained", 4), *both, ("evaluated", 5), ("written", 5)]
    if "evaluate-every" in keys:
        expected = [each for each in expected if each not in [("evaluated", n) for n in (1, 3)]]
    assert events == expected


def test_a_state_that_the_next_round_changes_in_place_is_written_as_it_was(run, monkeypatch):
    class Counting(Average):
        def __init__(self, *what: Any) -> None:
            super().__init__(*what)
            self.count = torch.zeros(1)

        def configure_train(self, *what: Any) -> Any:
            self.count += 1
            return super().configure_train(*what)

        def own_state(self) -> dict[str, torch.Tensor]:
            return {"count": self.count}

    monkeypatch.setattr(server_app.federation, "strategy_for", Counting)
    folder = run({"num-rounds": 4, "keep-state": True})
    paths = (folder / "checkpoints").glob("*.safetensors")
    counts = {path.name[:11]: read_arrays(path)[0]["state/own/count"].item() for path in paths}
    assert counts == {"round-00003": 3, "round-00004": 4}


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
    assert_same_run(folder, expected)


def test_the_seconds_of_all_rounds_are_those_of_the_clock(run, monkeypatch):
    """An evaluation beside training is in the seconds of that training alone."""
    now = 0.0
    score, save, train = (
        server_app.rounds.evaluate,
        RunDirectory.save_checkpoint,
        Elsewhere.pull_messages,
    )

    def lasts(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
        def after(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments)

        return after

    monkeypatch.setattr(server_app.federation.time, "perf_counter", lambda: now)
    monkeypatch.setattr(server_app.rounds, "evaluate", lasts(4.0, score))
    monkeypatch.setattr(RunDirectory, "save_checkpoint", lasts(8.0, save))
    monkeypatch.setattr(Elsewhere, "pull_messages", lasts(1.0, train))
    folder = run({"num-rounds": 4, "local-epochs": 0}, num_clients=1)
    lines = history_of(folder)
    assert [line["seconds"]["training"] for line in lines] == [1.0, 1.0, 13.0, 13.0]
    assert [line["seconds"]["evaluation"] for line in lines] == [4.0, 0.0, 0.0, 4.0]
    overlapped = [line.get("overlapped_evaluation_seconds") for line in lines]
    assert overlapped == [None, 4.0, 4.0, None]


@pytest.mark.parametrize(
    ("nodes", "threads", "expected"),
    [
        *([([], 0, 0), (["a"] * 6, 0, 2), (["a"] * 6, 1, 2), (["a"] * 8, 0, 1)]),
        *([(["a"] * 9, 0, 1), (["a", "b"] * 3, 0, 5), (["a"] * 3, 2, 2)]),
    ],
)
def test_an_evaluation_leaves_the_workers_their_cores(monkeypatch, nodes, threads, expected):
    monkeypatch.setattr(server_app.federation, "num_cores", lambda: 8)
    workers = [SimpleNamespace(node=node) for node in nodes]
    assert server_app.federation.threads_beside(workers, threads) == expected


@pytest.mark.parametrize("beside", [0, 3])
def test_an_evaluation_beside_workers_has_other_threads(run, monkeypatch, beside):
    evaluate, seen = server_app.rounds.evaluate, []

    def evaluated(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        if len(seen) == 4:
            raise OSError("no")
        return evaluate(*arguments)

    monkeypatch.setattr(server_app.federation, "threads_beside", lambda *workers: beside)
    monkeypatch.setattr(server_app.rounds, "evaluate", evaluated)
    with pytest.raises(OSError, match="no"):
        run({"num-rounds": 5, "threads": 1})
    assert seen == [1, beside or 1, beside or 1, beside or 1]
    assert torch.get_num_threads() == 1


STEPS = [
    (server_app.rounds, "evaluate"),
    (server_app.rounds, "append_history"),
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
    assert_same_run(broken, whole)


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
    assert_same_run(broken, whole)


def test_a_model_that_diverges_ends_the_run_after_the_round_before(run, monkeypatch):
    monkeypatch.setattr(
        server_app.rounds, "all_finite", lambda arrays: ("trained", 3) not in events
    )
    with pytest.raises(DivergedError, match="round 3"):
        run({"num-rounds": 4, "run-name": "diverged"})
    assert ("written", 2) in events
    assert ("written", 3) not in events
