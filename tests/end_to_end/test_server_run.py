"""Whole runs on the inline engine: what they leave, whether they repeat, and how they resume."""

import errno
import fcntl
import gc
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import server_app.client_registry
import server_app.federation
import server_app.rounds
import torch
import torch.nn.functional as F
from data_fixtures import make_folder, make_npz, random_images
from flwr.app import Error, Message, MessageType
from flwr.common.constant import ErrorCode
from method_fixtures import METHODS
from run_fixtures import (
    NUM_CLIENTS,
    SMALL,
    Overrides,
    all_models,
    assert_same_run,
    audit_of,
    final_model,
    history_of,
    resume,
    same_bits,
    summary_of,
)
from server_app.rounds import DivergedError

import protocol.files
import server_app.inline
import server_app.run_directory
import server_app.summary
from client_app.method import Update
from client_app.methods import method_of
from client_app.objective import LocalObjective
from client_app.setup import client_indices, model_for, open_source, pixels_of
from client_app.state import StateFolder
from keel.cli.status import status_lines
from keel.experiments.verify import checks
from keel.runs import find_run
from protocol.config import default_config, resolve_config
from protocol.messages import TrainReply
from protocol.seeds import seed_of
from server_app.history import Line
from server_app.inline import InlineGrid, run_inline
from server_app.load_model import load_model
from server_app.observers import RunObserver
from server_app.run_directory import Checkpoint, RunDirectory, new_run_directory, read_arrays
from server_app.summary import read_manifest, remove_state
from strategies.average import Average, TooFewRepliesError

Run = Callable[..., Path]
half_of_them = {"fraction-train": 0.5, "local-test-fraction": 0.2}


def checkpoints_of(folder: Path) -> list[str]:
    """Their names without the digest of the content."""
    return sorted(path.name[: len("round-00000")] for path in (folder / "checkpoints").iterdir())


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other_run(one: Path) -> Path:
    """The directory of the only other run beside it."""
    [other] = {path for path in one.parent.iterdir() if path.is_dir()} - {one}
    return other


def checkpoint_of(folder: Path, name: str) -> Path:
    [path] = (folder / "checkpoints").glob(f"{name}-*.safetensors")
    return path


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_own", "expected"), [(True, 0), (False, 4)])
def test_freed_memory_is_given_back_twice_a_round_where_clients_are_elsewhere(
    run, monkeypatch, has_own, expected
):
    """After aggregation, and after evaluation."""
    given_back = []
    monkeypatch.setattr(
        server_app.federation, "give_back_freed_memory", lambda: given_back.append(1)
    )
    monkeypatch.setattr(server_app.federation, "has_own_clients", lambda grid: has_own)
    run({"method": "fedavg", "num-rounds": 2})
    assert len(given_back) == expected


class HeldUpdates(RunObserver):
    """How many clients' updates this process holds when a round has been written."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_round(self, line: Line) -> None:
        replies = (each for each in gc.get_objects() if type(each) is TrainReply)
        self.found.append(sum(bool(reply.arrays) for reply in replies))


def test_no_update_is_held_after_its_round(tmp_path):
    observer = HeldUpdates()
    keys = {"aggregation": "median", "num-rounds": 3, "output-dir": str(tmp_path)}  # needs them all
    held = TrainReply("client-0000", 1, {"weight": torch.ones(1)}, {}, {})
    run_inline(SMALL | keys, NUM_CLIENTS, observers=[observer])
    assert observer.found == [1, 1, 1]  # this one
    assert held.arrays


# --- what a run leaves -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of FedAvg with two of four clients, everything evaluated; not to be changed."""
    base = tmp_path_factory.mktemp("finished")
    keys = {"num-rounds": 3, "evaluate-clients": "all", "last-rounds": 2, "output-dir": str(base)}
    return run_inline(SMALL | half_of_them | keys, NUM_CLIENTS)


def test_the_folder_holds_config_history_checkpoints_model_and_pictures(finished):
    names = {path.name for path in finished.iterdir()} - {".lock"}
    assert names == {
        *("config.json", "roster.json", "history.jsonl", "summary.json", "model.safetensors"),
        *("run.log", "manifest.json", "checkpoints", "accuracy.png", "labels.png", "audit.jsonl"),
    }
    assert re.fullmatch(r"\d{8}-\d{6}-fedavg-digits(-\d+)?", finished.name)
    for picture in ("accuracy.png", "labels.png"):
        assert (finished / picture).read_bytes().startswith(b"\x89PNG")
    assert checkpoints_of(finished) == ["round-00002", "round-00003"]
    arrays, about = read_arrays(finished / "model.safetensors")
    assert about["classes"].split("\n") == [str(digit) for digit in range(10)]
    assert about["shape"] == "1,32,32"
    newest, _ = read_arrays(checkpoint_of(finished, "round-00003"))
    model = {name: a for name, a in newest.items() if name.startswith("model/")}
    assert same_bits({f"model/{name}": a for name, a in arrays.items()}, model)


def test_config_json_resolves_to_the_config_that_ran(finished):
    kept = json.loads((finished / "config.json").read_text())
    assert kept["overrides"]["last-rounds"] == 2
    assert kept["config"]["momentum"] == 0.9  # a default, not given
    assert dict(resolve_config(kept["overrides"]).flat) == kept["config"]


def test_every_round_has_a_line_with_who_trained_on_what_and_how_it_went(finished):
    history = history_of(finished)
    assert [line["round"] for line in history] == [1, 2, 3]
    names = {f"client-{i:04d}" for i in range(NUM_CLIENTS)}
    size_bytes = sum(a.numel() * a.element_size() for a in final_model(finished).values())
    for line in history:
        assert len(line["participants"]) == 2
        assert set(line["participants"]) < names
        assert line["participants"] == sorted(line["participants"])
        assert line["left_out"] == {}
        assert line["losses"]["supervised"] > 0
        assert 0 < line["global"]["accuracy"] <= 1
        assert line["global"]["loss"] > 0
        assert line["local_global"]["clients"].keys() == names
        assert "personal" not in line
        assert line["seconds"].keys() >= {"training", "aggregation", "evaluation"}
        assert all(value >= 0 for value in line["seconds"].values())
        assert line["client_seconds"] > 0
        assert line["client_cpu_seconds"] > 0
        for key in ("bytes_down", "bytes_up"):  # two models and a little around them
            assert 2 * size_bytes < line[key] < 2 * size_bytes + 20_000
    assert len({tuple(line["participants"]) for line in history}) > 1
    assert history[-1]["losses"]["supervised"] < history[0]["losses"]["supervised"]


def test_accuracies_of_clients_are_summed_up_by_mean_and_worst_tenth(finished):
    for line in history_of(finished):
        values = sorted(line["local_global"]["clients"].values())
        assert line["local_global"]["mean"] == pytest.approx(sum(values) / len(values))
        assert line["local_global"]["worst_decile"] == values[0]  # a tenth of four: one


def test_the_summary_has_final_best_mean_and_median_of_the_last_evaluations(finished):
    summary = summary_of(finished)
    accuracies = [line["global"]["accuracy"] for line in history_of(finished)]
    found = summary["results"]["global.accuracy"]
    assert found["final"] == accuracies[-1]
    assert found["best"] == max(accuracies)
    assert found["mean of last 2"] == pytest.approx(sum(accuracies[1:]) / 2)
    assert found["median of last 2"] == pytest.approx(statistics.median(accuracies[1:]))
    assert (summary["status"], summary["rounds"]) == ("finished", 3)
    assert summary["directory"] == str(finished)
    assert summary["seconds"] > 0
    assert summary["seconds_per_round"] > 0
    assert summary["left_out"] == 0
    assert summary["privacy"] is None


def test_the_accuracy_in_the_history_is_that_of_the_model_in_the_folder(finished):
    config = resolve_config(json.loads((finished / "config.json").read_text())["overrides"])
    source = open_source(config)
    model = model_for(config, source)
    model.load_state_dict(final_model(finished))
    model.eval()
    x = (torch.tensor(np.array(source.test.images)) / 255.0 - source.mean[0]) / source.std[0]
    right = model(x).argmax(1) == torch.tensor(np.array(source.test.labels))
    assert history_of(finished)[-1]["global"]["accuracy"] == pytest.approx(
        right.float().mean().item(), abs=1.5 / len(right)
    )


def test_privacy_spent_counts_the_busiest_clients_releases(run):
    keys = {"method": "fedreco", "privacy.epsilon": 0.5, "num-rounds": 3} | half_of_them
    folder = run(keys)
    counts: dict[str, int] = {}
    for line in history_of(folder):
        for client in line["participants"]:
            counts[client] = counts.get(client, 0) + 1
    spent = summary_of(folder)["privacy"]
    assert spent["releases"] == max(counts.values()) > 1
    assert spent["composed"]["epsilon"] > spent["per_release"]["epsilon"] == 0.5


# --- evaluation ------------------------------------------------------------------------------


def test_evaluation_every_other_round_and_always_in_the_last(run):
    folder = run({"num-rounds": 5, "evaluate-every": 2, "local-epochs": 0})
    assert [("global" in line) for line in history_of(folder)] == [False, True, False, True, True]
    found = summary_of(folder)["results"]["global.accuracy"]
    assert "median of last 3" in found  # fewer evaluations than last-rounds = 10


@pytest.mark.parametrize("method", ["fedavg", "fedreco"])
@pytest.mark.parametrize("whom", ["auto", "none", "cohort", "all"])
def test_whose_test_parts_are_evaluated_on(run, method, whom):
    if (method, whom) == ("fedreco", "none"):
        pytest.skip("refused: nothing would be evaluated")
    is_personal = method == "fedreco"
    folder = run(half_of_them | {"method": method, "evaluate-clients": whom})
    key = "personal" if is_personal else "local_global"
    everybody = [f"client-{i:04d}" for i in range(NUM_CLIENTS)]
    for line in history_of(folder):
        assert ("global" in line) != is_personal
        if whom == "none" or (whom == "auto" and not is_personal):
            assert "personal" not in line
            assert "local_global" not in line
            continue
        participants = whom == "cohort"
        assert list(line[key]["clients"]) == (line["participants"] if participants else everybody)


def test_the_global_evaluation_can_be_left_out(run):
    folder = run({"evaluate-global": False, "num-rounds": 1})
    assert "global" not in history_of(folder)[0]
    assert summary_of(folder)["results"] == {}


# --- the limits ------------------------------------------------------------------------------


def digits_of(config):
    source = open_source(config)
    x = pixels_of(config, source).normalise(torch.tensor(np.array(source.train.images)))
    return source, x, torch.tensor(np.array(source.train.labels))


@pytest.mark.usefixtures("in_float64")  # in float32 the largest of a pool can be another
def test_one_client_is_plain_sgd_with_a_fresh_optimiser_every_round(run):
    keys = {"local-epochs": 2, "momentum": 0.9, "weight-decay": 1e-3, "seed": 7, "lr": 0.005}
    folder = run(keys, num_clients=1)
    config = resolve_config(SMALL | keys)
    source, x, y = digits_of(config)
    own, _ = client_indices(config, 0, 1)
    x, y = x[own], y[own]
    model = model_for(config, source).train()
    velocity: dict[str, torch.Tensor] = {}
    for server_round in (1, 2):
        velocity = {}
        for epoch in (0, 1):
            seed = seed_of(7, server_round, "client-0000", "batches", epoch)
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
            for batch in order.split(64):
                loss = F.cross_entropy(model(x[batch]), y[batch])
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for name, weight in model.named_parameters():
                        gradient = weight.grad + 1e-3 * weight
                        velocity[name] = 0.9 * velocity.get(name, 0.0) + gradient
                        weight -= 0.005 * velocity[name]
    for name, array in final_model(folder).items():
        torch.testing.assert_close(array, model.state_dict()[name])


def test_one_full_batch_step_on_every_client_is_one_centralised_step(run):
    """With weights n_i / n, whatever the split: eq. (1) of FedAvg with K = 1."""
    keys = {"num-rounds": 1, "batch-size": 2000, "momentum": 0.0, "weight-decay": 0.0, "alpha": 0.3}
    keys |= {"data-fraction": 1.0}
    folder = run(keys)
    config = resolve_config(SMALL | keys)
    source, x, y = digits_of(config)
    model = model_for(config, source)
    F.cross_entropy(model(x), y).backward()
    before = {name: a.clone() for name, a in model.named_parameters()}
    for name, array in final_model(folder).items():
        expected = before[name] - 0.05 * model.get_parameter(name).grad
        torch.testing.assert_close(array, expected.detach(), rtol=1e-4, atol=1e-6)


def test_no_local_training_leaves_the_model_as_it_is(run):
    folder = run({"local-epochs": 0})
    config = resolve_config(SMALL)
    start = model_for(config, open_source(config)).state_dict()
    for name, array in final_model(folder).items():
        torch.testing.assert_close(array, start[name], rtol=1e-6, atol=1e-7)


# --- the same again --------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_in_a_folder_of_its_own(finished, run):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    keys = {"num-rounds": 3, "evaluate-clients": "all", "last-rounds": 2} | half_of_them
    again = run(keys | {"output-dir": str(finished.parent)})
    assert again != finished
    assert_same_run(again, finished)
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("epochs", [0, 1])
def test_another_seed_gives_other_weights_to_start_from_and_to_end_with(run, epochs):
    keys = {"num-rounds": 1, "local-epochs": epochs}
    one, other = (run(keys | {"seed": seed}, num_clients=1) for seed in (1, 2))
    assert not same_bits(final_model(one), final_model(other))


def test_two_runs_of_one_second_get_folders_of_their_own(run, monkeypatch):
    monkeypatch.setattr("server_app.run_directory.time.strftime", lambda form: "20260101-120000")
    folders = [run({"num-rounds": 1, "local-epochs": 0}) for _ in range(3)]
    names = [folder.name for folder in folders]
    stem = "20260101-120000-fedavg-digits"
    assert names == [stem, f"{stem}-1", f"{stem}-2"]


def test_what_a_kill_left_half_written_goes_when_the_folder_is_opened(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    part = protocol.files.part_of(tmp_path / "checkpoints" / "round-00001.safetensors")
    part.touch()
    RunDirectory(tmp_path).close()
    assert not part.exists()


def test_a_folder_that_another_run_made_a_moment_before_stays_its_own(tmp_path, monkeypatch):
    paths = iter([tmp_path, tmp_path / "free"])
    monkeypatch.setattr(server_app.run_directory, "new_path", lambda config: next(paths))
    directory = new_run_directory(resolve_config({}))
    directory.close()
    assert directory.path == tmp_path / "free"


# --- checkpoint and resume -------------------------------------------------------------------

resumable = {
    "fedavg": {"method": "fedavg"},
    "moon": {"method": "moon"},
    "fedintr": {"method": "fedintr"},
    "fedreco": {"method": "fedreco", "fedreco.eta-0": 0.5},
    "fedreco, private": {"method": "fedreco", "privacy.epsilon": 0.9},
    "fedadam": {"server-optimizer": "fedadam"},
    "fedavgm": {"server-optimizer": "fedavgm"},
}


@pytest.mark.parametrize("keys", resumable.values(), ids=resumable.keys())
def test_two_rounds_and_two_more_are_the_same_as_four(run, keys):
    whole = run(keys | half_of_them | {"num-rounds": 4})
    parts = run(keys | half_of_them | {"num-rounds": 2})
    assert resume(parts, num_rounds=4) == parts
    assert_same_run(parts, whole)
    assert summary_of(parts)["results"] == summary_of(whole)["results"]
    assert summary_of(parts)["status"] == "finished"


def test_a_run_that_ended_in_its_first_round_begins_again(run, interrupted):
    keys = half_of_them | {"method": "moon", "server-optimizer": "fedadam", "num-rounds": 2}
    whole, parts = run(keys), interrupted(keys, 1)
    assert not history_of(parts)
    assert resume(parts) == parts
    assert same_bits(all_models(parts), all_models(whole))


@pytest.mark.slow
@pytest.mark.parametrize("server", ["fedavg", "fedacg"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_as_if_never_interrupted(run, crash, method, server):
    """A resume between two rounds and one after a crash within a round."""
    if server != "fedavg" and not METHODS[method].supports_server_optimizer:
        pytest.skip(f"{method} has a server update of its own")
    keys = half_of_them | {"method": method, "server-optimizer": server, "num-rounds": 4}
    if not issubclass(METHODS[method], LocalObjective):
        keys["fedacg.beta"] = 0.0  # its client term is for local objectives
    if method_of(resolve_config({"method": method})).depends_on_num_rounds():
        pytest.skip(f"{method} would not be the same run with another number of rounds")
    whole = run(keys)
    parts = run(keys | {"num-rounds": 2})
    crash(3, after=1)
    with pytest.raises(KeyboardInterrupt):
        resume(parts, num_rounds=4)
    resume(parts, num_rounds=4)
    assert_same_run(parts, whole)


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """crash(round, after): interrupt the run once `after` clients have trained in that round."""
    answer = InlineGrid.answer

    def crash_in(server_round: int, after: int) -> None:
        trained = 0

        def answer_or_die(grid: InlineGrid, message: Message) -> Message:
            nonlocal trained
            is_training = message.metadata.message_type == MessageType.TRAIN
            if is_training and message.content.config_records["round"]["round"] == server_round:
                if trained == after:
                    monkeypatch.setattr(InlineGrid, "answer", answer)
                    raise KeyboardInterrupt
                trained += 1
            return answer(grid, message)

        monkeypatch.setattr(InlineGrid, "answer", answer_or_die)

    return crash_in


@pytest.fixture
def interrupted(run: Run, crash: Callable[..., None], tmp_path: Path) -> Callable[..., Path]:
    """interrupted(keys, round, after) -> folder: a run named "cut" that ends as `crash` says."""

    def run_until(keys: Overrides, server_round: int, after: int = 1) -> Path:
        crash(server_round, after)
        with pytest.raises(KeyboardInterrupt):
            run(keys | {"run-name": "cut"})
        return tmp_path / "cut"

    return run_until


@pytest.mark.parametrize("every", [{"snapshot-every": 2}, {"checkpoint-every": 2}])
@pytest.mark.parametrize(("method", "server_round"), [("moon", 1), ("fedpac", 4)])
def test_a_run_with_few_snapshots_resumes_from_the_last(
    run, interrupted, method, every, server_round
):
    keys = half_of_them | {"method": method, "num-rounds": 7}
    whole, parts = run(keys), interrupted(keys | every, server_round)
    before = history_of(parts)
    resume(parts)
    assert [line["round"] for line in before] == list(range(1, server_round))
    assert_same_run(parts, whole)
    assert checkpoints_of(parts) == ["round-00006", "round-00007"]


@pytest.mark.parametrize("damaged", [[], ["round-00007"]])
def test_a_client_keeps_no_more_versions_than_a_resume_from_either_checkpoint_reads(
    run, crash, damaged
):
    """The older of rounds 6 and 7: of a run that was continued for more rounds."""
    keys = half_of_them | {"method": "moon", "num-rounds": 12}
    whole = run(keys)
    parts = run(keys | {"num-rounds": 7, "checkpoint-every": 6, "run-name": "cut"})
    crash(12, after=1)
    with pytest.raises(KeyboardInterrupt):
        resume(parts, num_rounds=12)
    assert checkpoints_of(parts) == ["round-00006", "round-00007"]
    for client in (parts / "clients").iterdir():
        assert len(list(client.iterdir())) <= 4
    for name in damaged:
        checkpoint_of(parts, name).write_bytes(b"cut")
    resume(parts)
    assert_same_run(parts, whole)


def test_between_snapshots_nothing_of_a_client_is_written(interrupted):
    keys = {"method": "moon", "num-rounds": 6, "snapshot-every": 3}
    parts = interrupted(keys, 4, after=NUM_CLIENTS - 1)
    names = {p.name[: len("round-00000")] for p in parts.glob("clients/*/*")}
    assert names == {"round-00003"}


@pytest.mark.parametrize("method", ["fedrep", "fedpac"])
@pytest.mark.parametrize("every", [{"snapshot-every": 2}, {"checkpoint-every": 2}])
def test_a_head_of_before_the_last_rounds_of_a_stopped_run_is_not_joined_to_its_model(
    interrupted, method, every
):
    keys = {"method": method, "local-test-fraction": 0.2, "num-rounds": 4}
    parts = interrupted(half_of_them | keys | every, 4)
    trained = {line["round"]: line["participants"] for line in history_of(parts)}
    for client in {*trained[2], *trained[3]}:
        if client in trained[3] and (method == "fedpac" or "snapshot-every" in every):
            rule = rf"client = '{client}': it trained in round 3, and .*round-0000[12].* is older"
            with pytest.raises(ValueError, match=rule):
                load_model(parts, client)
        else:
            load_model(parts, client)
    assert trained[3]
    assert set(trained[2]) - set(trained[3])
    resume(parts)
    for client in {*trained[2], *trained[3]}:
        load_model(parts, client)


def test_messages_carry_the_runs_id_which_a_resume_keeps_and_a_new_run_does_not(run, monkeypatch):
    answer, seen = InlineGrid.answer, []

    def noted(grid: InlineGrid, message: Message) -> Message | None:
        if message.metadata.message_type != MessageType.QUERY:
            seen.append(message.content.config_records["round"]["run-id"])
        return answer(grid, message)

    monkeypatch.setattr(InlineGrid, "answer", noted)
    keys = half_of_them | {"num-rounds": 1, "run-name": "a", "evaluate-clients": "all"}
    resume(folder := run(keys), num_rounds=2)
    assert len(seen) > 2
    assert len(set(seen)) == 1
    assert seen[0]
    shutil.rmtree(folder)
    run(keys)
    assert len(set(seen)) == 2


@pytest.mark.parametrize(("method", "num_rounds"), [("moon", 1), ("fedpac", 2)])
def test_a_finished_run_gives_up_its_state_but_not_its_models(run, method, num_rounds):
    keys = {"method": method, "num-rounds": num_rounds, "local-test-fraction": 0.2}
    kept = run(keys)
    removed = run(keys | {"keep-state": default_config()["keep-state"]})
    assert same_bits(final_model(kept), final_model(removed))
    personal = method == "fedpac"
    assert (removed / "checkpoints").exists() == (removed / "clients").exists() == personal
    if personal:
        assert len(list(removed.glob("checkpoints/*"))) == 1
        for n in range(NUM_CLIENTS):
            name = f"client-000{n}"
            one, two = (load_model(f, name).network.state_dict() for f in (kept, removed))
            assert same_bits(one, two)
    else:
        rule = "it finished with keep-state = false, which removes its checkpoints: start a new run"
        with pytest.raises(ValueError, match=rule):
            resume(removed, num_rounds=3)


def test_a_run_whose_state_cannot_be_removed_finishes_and_says_so(run, monkeypatch, caplog):
    def removed(path, ignore_errors=False):  # as the data cache asks, when it is first filled
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    keys = {"method": "moon", "keep-state": False, "diagnostics": "all"}
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="keel.server"):
        patch.setattr(server_app.summary.shutil, "rmtree", removed)
        folder = run(keys)
    assert summary_of(folder)["status"] == "finished"
    assert list((folder / "diagnostics").glob("*.png"))
    left = f"state of the finished run is left: {folder / 'checkpoints'}: Directory not empty"
    assert left in caplog.text


def folder_of(output: Path) -> Path:
    """The directory of the only run there."""
    (history,) = output.glob("*/history.jsonl")
    return history.parent


@pytest.mark.parametrize(
    ("method", "num_left", "why"),
    [
        ("moon", 0, "finished with keep-state = false, which removes its checkpoints"),
        ("fedpac", 1 + NUM_CLIENTS, "has finished its 2 rounds: set more"),
    ],
)
def test_a_resume_completes_the_removal_that_a_kill_cut_short(
    run, tmp_path, monkeypatch, method, num_left, why
):
    """Killed after the manifest was signed, a run kept its state, maybe gigabytes, for good."""

    def killed(*_, **__):
        raise KeyboardInterrupt

    keys = {"method": method, "local-test-fraction": 0.2, "keep-state": False}
    with monkeypatch.context() as patch:
        patch.setattr("server_app.federation.remove_state", killed)
        with pytest.raises(KeyboardInterrupt):
            run(keys)
    folder = folder_of(tmp_path)
    assert len(list(folder.rglob("round-*.safetensors"))) > num_left
    with pytest.raises(ValueError, match=why):
        resume(folder, num_rounds=2)
    assert len(list(folder.rglob("round-*.safetensors"))) == num_left


@pytest.mark.parametrize("num_rounds", [2, 3])
def test_a_kill_between_the_two_folders_of_state_leaves_neither_for_good(
    run, tmp_path, monkeypatch, num_rounds
):
    """Nor may a longer run go on from checkpoints whose clients have lost their state."""
    real_rmtree = shutil.rmtree

    def killed(path, **how):
        real_rmtree(path, **how)
        if path.parent == folder_of(tmp_path):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(server_app.summary.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run({"method": "moon", "keep-state": False})
    folder = folder_of(tmp_path)
    assert list(folder.rglob("round-*.safetensors"))
    with pytest.raises(ValueError, match="finished with keep-state = false, which removes"):
        resume(folder, num_rounds=num_rounds)
    assert not list(folder.rglob("round-*.safetensors"))


def test_a_refused_resume_of_a_finished_run_removes_nothing(run):
    """Not even where its history was cut, so that its state seems to be of later rounds."""
    folder = run({"method": "fedrep", "local-test-fraction": 0.2, "keep-state": False})
    before = sorted(folder.rglob("*.safetensors"))
    (folder / "history.jsonl").write_text("")
    remove_state(folder, 0, keeps_personal=True)
    with pytest.raises(ValueError):
        resume(folder, num_rounds=1, lr=0.5)
    assert sorted(folder.rglob("*.safetensors")) == before


@pytest.mark.parametrize("keys", [{}, {"local-test-fraction": 0.2, "evaluate-clients": "cohort"}])
def test_a_client_that_lost_what_it_kept_is_named_and_left_out_until_it_may_begin_anew(run, keys):
    folder = run({"method": "moon"} | keys)
    lost = folder / "clients" / "client-0002"
    shutil.rmtree(lost)
    resume(folder, num_rounds=3)
    last = history_of(folder)[-1]
    assert "client-0002" not in last["participants"]
    assert last["reset_needed"] == ["client-0002"]
    assert str(lost) in last["left_out"]["client-0002"]
    (lost / "reset-state").touch()
    resume(folder, num_rounds=4)
    last = history_of(folder)[-1]
    assert "client-0002" in last["participants"]
    assert last["reset_needed"] == []


class Deployed(InlineGrid):
    """As a deployment's: who is connected may change."""

    is_in_process = False
    gone: ClassVar[set[int]] = set()

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node not in self.gone]


def test_a_deployment_is_resumed_while_a_client_is_away(run, monkeypatch):
    monkeypatch.setattr(server_app.client_registry, "RETURN_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server_app.inline, "InlineGrid", Deployed)
    monkeypatch.setattr(Deployed, "gone", set())
    keys = {"method": "moon", "evaluate-clients": "all", "num-clients": NUM_CLIENTS}
    folder = run(keys | {"local-test-fraction": 0.2})
    rows = json.loads((folder / "roster.json").read_text())
    away = next(row["node"] for row in rows if row["client"] == "client-0001")
    monkeypatch.setattr(Deployed, "gone", {away})
    resume(folder, num_rounds=3)
    last = history_of(folder)[-1]
    assert last["backed_off"] == ["client-0001"]
    assert last["left_out"] == {}
    assert last["evaluation_left_out"] == {"client-0001": "not connected"}
    assert last["late"] == []
    monkeypatch.setattr(Deployed, "gone", set())
    resume(folder, num_rounds=4)
    assert "client-0001" in history_of(folder)[-1]["participants"]


class Restarting(Deployed):
    """Client-0001's SuperNode is restarted once it has trained, and has another id then."""

    def answer(self, message: Message) -> Message:
        reply, node = super().answer(message), message.metadata.dst_node_id
        if (node, message.metadata.message_type) == (3, MessageType.TRAIN):
            self.contexts[60] = self.contexts.pop(node)
        return reply


def test_a_client_that_returns_as_another_node_takes_part_and_is_in_the_roster(run, monkeypatch):
    monkeypatch.setattr(server_app.inline, "InlineGrid", Restarting)
    folder = run({})
    assert len(history_of(folder)[1]["participants"]) == NUM_CLIENTS
    rows = json.loads((folder / "roster.json").read_text())
    assert [row["node"] for row in rows] == [2, 60, 4, 5]


def test_a_server_with_a_stand_in_for_the_data_makes_the_model_that_it_makes_with_all_images(
    tmp_path, monkeypatch
):
    """docs/how-to/deployment.md says so: a server may be barred from holding any site's images."""
    monkeypatch.setattr(server_app.inline, "InlineGrid", Deployed)
    sites = [make_folder(tmp_path / f"site-{n}", random_images(8, 32, 32, seed=n)) for n in (0, 1)]
    stand_in = make_folder(tmp_path / "stand-in", np.zeros((2, 32, 32), np.uint8))
    keys = {"model": "cnn-fedintr", "image-size": 32, "normalise": "half", "num-clients": 2}
    keys |= {"method": "fedintr", "num-rounds": 2}
    keys |= {"evaluate-global": False, "evaluate-clients": "all", "output-dir": str(tmp_path)}
    nodes = [{"name": f"site-{n}", "source": source} for n, source in enumerate(sites)]
    runs = [
        # named, as two runs of one second would have the same name, which the sites refuse
        run_inline(keys | {"source": source, "run-name": name}, 2, nodes)
        for name, source in (("images", sites[0]), ("none", stand_in))
    ]
    assert same_bits(*map(final_model, runs))
    assert [*history_of(runs[1])[-1]["local_global"]["clients"]] == ["site-0", "site-1"]


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedreco"])
def test_a_crash_in_the_middle_of_round_3_changes_nothing_in_the_end(run, interrupted, method):
    keys = half_of_them | {"method": method, "num-rounds": 4, "fraction-train": 0.75}
    whole, broken = run(keys), interrupted(keys, 3, after=2)
    assert summary_of(broken)["status"] == "stopped"
    assert len(history_of(broken)) == 2
    if method != "fedavg":  # two clients have kept what they ended round 3 with
        assert len(list(broken.glob("clients/*/round-00003-*"))) == 2
    resume(broken)
    assert_same_run(broken, whole)


def with_a_bit_flipped(content):
    middle = len(content) // 2  # in a weight: the file can still be read
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("method", "damage"), [("moon", lambda c: c[:-100]), ("fedreco", with_a_bit_flipped)]
)
def test_with_the_newest_checkpoint_damaged_too_the_one_before_serves(
    run, interrupted, caplog, method, damage
):
    """Whatever clients kept for the older checkpoint has to be there still."""
    keys = half_of_them | {"method": method, "num-rounds": 4, "fraction-train": 1.0}
    whole, broken = run(keys), interrupted(keys, 4, after=3)
    assert checkpoints_of(broken) == ["round-00002", "round-00003"]
    newest = checkpoint_of(broken, "round-00003")
    assert "damaged" not in "\n".join(status_lines(find_run(str(broken))))
    newest.write_bytes(damage(newest.read_bytes()))
    said = f"damaged   checkpoints/{newest.name}: a resume skips it"
    assert said in status_lines(find_run(str(broken)))
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="keel"):
        resume(broken)
    warning, *others = caplog.messages
    assert warning == f"{newest} is damaged: skipped, the run continues from round 2"
    assert all(text.startswith("lr has no effect: fedreco uses") for text in others)
    assert warning in (broken / "run.log").read_text()
    assert_same_run(broken, whole)


@pytest.mark.parametrize("damage", ["empty", "half", "header"])
def test_no_readable_checkpoint_is_one_line_and_nothing_is_touched(run, damage):
    folder = run({"num-rounds": 2, "local-epochs": 0})
    for path in (folder / "checkpoints").iterdir():
        content = path.read_bytes()
        spoilt = {"empty": b"", "half": content[: len(content) // 2], "header": b"x" + content[1:]}
        path.write_bytes(spoilt[damage])
    before = contents(folder)
    with pytest.raises(ValueError) as caught:
        resume(folder, num_rounds=4)
    assert str(caught.value).startswith(
        f"resume = {str(folder)!r}: no intact checkpoint (2 damaged): restore "
    )
    after = contents(folder)
    for name in ("history.jsonl", "model.safetensors", "summary.json"):
        assert after[folder / name] == before[folder / name]


@pytest.mark.parametrize("changed", ["labels", "pixels", "nothing"])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_resume_on_changed_data_is_refused_and_changes_nothing(run, tmp_path, changed, is_old):
    """is_old: a run whose manifest has no digest of the data: its split alone is compared."""
    images, labels = random_images(40, 28, 28), np.arange(40) % 2
    test = {"x_test": images[:4], "y_test": labels[:4]}
    spec = make_npz(tmp_path / "a.npz", x_train=images, y_train=labels, **test)
    keys = {"source": spec, "method": "local", "data-fraction": 1.0, "local-epochs": 0}
    folder = run(keys | {"local-test-fraction": 0.2})
    if is_old:
        manifest = read_manifest(folder)
        del manifest["data"]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    images, labels = {"labels": (images, 1 - labels), "pixels": (255 - images, labels)}.get(
        changed, (images, labels)
    )
    make_npz(tmp_path / "a.npz", x_train=images, y_train=labels, **test)
    before = contents(folder)
    if changed == "nothing" or (is_old and changed == "pixels"):
        resume(folder, num_rounds=3)
        return
    what = "the split over clients" if is_old else "the data"
    expected = f"resume = '{folder}': {what} of source = '{spec}' has changed"
    with pytest.raises(ValueError, match=re.escape(expected)) as refusal:
        resume(folder, num_rounds=3)
    assert "\n" not in str(refusal.value)
    assert contents(folder) == before


def test_a_later_run_of_the_process_trains_on_what_the_file_holds_by_then(run, tmp_path):
    """Labels alone change: not the shape, the classes or the normalisation, which are compared."""
    images, labels = random_images(40, 28, 28), np.arange(40) % 2
    test = {"x_test": images[:4], "y_test": labels[:4]}
    keys = {"method": "fedavg", "data-fraction": 1.0, "num-rounds": 1, "partition": "iid"}
    specs = [make_npz(tmp_path / "a.npz", x_train=images, y_train=labels, **test)]
    folders = [run(keys | {"source": specs[0]})]
    for name in ("a", "b"):
        specs.append(make_npz(tmp_path / f"{name}.npz", x_train=images, y_train=1 - labels, **test))
        folders.append(run(keys | {"source": specs[-1]}))
    before, after, expected = ((read_manifest(f)["data"], final_model(f)) for f in folders)
    assert before[0] != after[0] == expected[0]
    assert same_bits(after[1], expected[1])


@pytest.mark.parametrize(
    ("owner", "step"), [(RunDirectory, "save_checkpoint"), (server_app.rounds, "append_history")]
)
@pytest.mark.parametrize("server_round", [1, 3])
def test_a_crash_while_a_round_is_recorded_loses_no_line(
    run, monkeypatch, owner, step, server_round
):
    keys = {"method": "moon", "num-rounds": 4}
    whole = run(keys)
    record = getattr(owner, step)

    def record_or_die(place, what, *more):
        if (what["round"] if isinstance(what, dict) else what.round) == server_round:
            raise KeyboardInterrupt
        return record(place, what, *more)

    monkeypatch.setattr(owner, step, record_or_die)
    with pytest.raises(KeyboardInterrupt):
        run(keys)
    monkeypatch.setattr(owner, step, record)
    broken = other_run(whole)
    resume(broken)
    assert_same_run(broken, whole)


def test_a_resume_that_repeats_two_snapshots_sets_no_state_aside(run, monkeypatch, tmp_path):
    keys = {"method": "moon", "fraction-train": 1.0, "snapshot-every": 2, "checkpoint-every": 4}
    with monkeypatch.context() as patch:
        patch.delattr(RunDirectory, "save_checkpoint")
        with pytest.raises(AttributeError):  # in round 4, whose state is written already
            run(keys | {"num-rounds": 5, "run-name": "cut"})
    assert {p.name[:11] for p in tmp_path.glob("cut/clients/*/*")} == {"round-00002", "round-00004"}
    resume(tmp_path / "cut")
    assert not list(tmp_path.rglob("*.set-aside"))


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_checkpoint_ahead_of_the_history_is_passed_over(run, is_cut):
    """As after a power cut that left the checkpoint; is_cut: killed while a line was written."""
    whole, broken = run({"num-rounds": 4}), run({"num-rounds": 3})
    first, second, third = (broken / "history.jsonl").read_text().splitlines(keepends=True)
    (broken / "history.jsonl").write_text(first + second + (third[:-40] if is_cut else ""))
    resume(broken, num_rounds=4)
    assert_same_run(broken, whole)


def with_a_damaged_line(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\0 not json\n" + lines[2])


@pytest.mark.parametrize(
    ("spoil", "rounds_left"),
    [
        (Path.unlink, [4]),
        (with_a_damaged_line, [1, 3, 4]),
        (lambda path: path.write_bytes(b"\xff\xfe\n[1]\n"), [4]),
    ],
)
def test_a_lost_or_damaged_history_does_not_stop_a_resume(run, caplog, spoil, rounds_left):
    whole, broken = run({"num-rounds": 4}), run({"num-rounds": 3})
    history, aside = broken / "history.jsonl", broken / "history.jsonl.damaged"
    spoil(history)
    damaged = history.read_bytes() if history.exists() else None
    (broken / ".config.json.999999.part").touch()  # of a killed process
    (broken / "checkpoints" / ".round-00003.999999.part").touch()
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        resume(broken, num_rounds=4)
    assert same_bits(final_model(broken), final_model(whole))
    assert [line["round"] for line in history_of(broken)] == rounds_left
    assert re.search(r"history.jsonl: the lines of \d of 3 rounds are lost", caplog.text)
    assert (aside.read_bytes() if aside.exists() else None) == damaged
    assert not list(broken.rglob(".*.part"))


@pytest.mark.parametrize("participants", [None, [["client-0000"]]])
def test_a_history_with_damaged_names_does_not_stop_a_personal_run_s_resume(
    run, caplog, participants
):
    """Whose kept scores depend on who has trained; the scores are measured again."""
    keys = half_of_them | {"method": "fedreco", "fedreco.eta-0": 0.5}
    whole, broken = run(keys | {"num-rounds": 4}), run(keys | {"num-rounds": 3})
    lines = history_of(broken)
    del lines[1]["participants"]
    if participants:
        lines[1]["participants"] = participants
    (broken / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    resume(broken, num_rounds=4)
    assert same_bits(final_model(broken), final_model(whole))
    assert history_of(broken)[-1]["personal"] == history_of(whole)[-1]["personal"]
    assert "round 2 is damaged: " in caplog.text


def test_a_damaged_history_before_the_first_checkpoint_does_not_stop_a_resume(run, interrupted):
    keys = half_of_them | {"method": "moon", "num-rounds": 5, "snapshot-every": 4}
    whole, parts = run(keys), interrupted(keys, 4)
    with_a_damaged_line(parts / "history.jsonl")
    resume(parts)
    assert_same_run(parts, whole)


def fill_up(monkeypatch, name, rounds):
    """After this many files called `name`, no other can be written."""
    written = []

    def fsync(descriptor):
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        written.append(name in target)
        if sum(written) > rounds and Path(target).is_file():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(protocol.files.os, "fsync", fsync)


@pytest.mark.parametrize("name", ["round-", "history.jsonl"])
def test_a_full_disk_ends_the_run_in_one_line_and_a_resume_goes_on(run, monkeypatch, name):
    whole = run({"num-rounds": 4})
    with monkeypatch.context() as patch:
        fill_up(patch, name, 2)
        with pytest.raises(OSError, match=r"No space left on device: '.*'$") as caught:
            run({"num-rounds": 4})
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)  # what ended the run, not the summary
    broken = other_run(whole)
    assert not list(broken.rglob(".*.part"))
    resume(broken)
    assert_same_run(broken, whole)


def test_a_client_whose_disk_is_full_is_named_and_goes_on_when_there_is_room(run, monkeypatch):
    save, fulls = StateFolder.save, []

    def save_or_fail(folder, round_, groups):
        if round_ == 2 and folder.folder.name == "client-0001":
            fulls.append(round_)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "round-00002")
        save(folder, round_, groups)

    monkeypatch.setattr(StateFolder, "save", save_or_fail)
    folder = run({"method": "moon", "num-rounds": 3, "fraction-train": 1.0})
    lines = history_of(folder)
    reason = lines[1]["left_out"]["client-0001"]
    assert reason.endswith("OSError: [Errno 28] No space left on device: 'round-00002'")
    assert "client-0001" in lines[2]["participants"]
    assert fulls == [2]


def test_what_a_run_writes_is_for_its_user_alone(run):
    folder = run({"method": "moon", "num-rounds": 1})
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_no_file_of_a_run_is_written_in_place(run, monkeypatch, tmp_path):
    """A kill in between would leave half a file where the next command expects a whole one."""
    written, opened = set(), io.open

    def note(file, mode="r", *how, **more):
        if "w" in mode and tmp_path in Path(file).parents:
            written.add(re.sub(r"[.][0-9a-f.]{20,}part$", ".part", Path(file).name))
        return opened(file, mode, *how, **more)

    monkeypatch.setattr(io, "open", note)  # of pathlib
    resume(run({"method": "moon", "num-rounds": 1}), num_rounds=2)
    names = ("config", "roster", "manifest", "summary")
    assert {".model.safetensors.part", *(f".{name}.json.part" for name in names)} < written
    assert {name for name in written if not name.endswith(".part")} == {".lock"}


def test_a_damaged_checkpoint_goes_when_its_round_is_done_again_and_the_good_one_stays(tmp_path):
    folder = RunDirectory(tmp_path)

    def save(number: int, value: float) -> None:
        folder.save_checkpoint(Checkpoint(number, {"w": torch.full((2,), value)}, {}), "toy")

    save(1, 1.0)
    save(2, 2.0)
    checkpoint_of(tmp_path, "round-00002").write_bytes(b"cut")
    save(2, 3.0)  # from round 1, with other bits
    assert checkpoints_of(tmp_path) == ["round-00001", "round-00002"]
    newest, _ = read_arrays(checkpoint_of(tmp_path, "round-00002"))
    assert newest["model/w"].tolist() == [3.0, 3.0]
    save(3, 4.0)
    assert checkpoints_of(tmp_path) == ["round-00002", "round-00003"]
    save(2, 5.0)  # the history's last lines were lost
    assert checkpoints_of(tmp_path) == ["round-00002"]
    folder.close()


def test_the_newest_two_checkpoints_are_kept_however_far_apart(tmp_path):
    with closing(RunDirectory(tmp_path)) as directory:
        directory.checkpoint_interval = 3
        for number in (3, 6, 9, 10):  # the last round has one too
            directory.save_checkpoint(Checkpoint(number, {}, {}), "cnn-fedreco")
            kept = directory.checkpoint_rounds()
            assert kept == {3: [3], 6: [3, 6], 9: [6, 9], 10: [9, 10]}[number]


def test_a_closed_folder_leaves_the_level_of_the_log_as_it_was(tmp_path, monkeypatch):
    logger = logging.getLogger("keel")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    with closing(RunDirectory(tmp_path)) as directory:
        directory.start_log()
        assert logger.level == logging.INFO
    assert logger.level == logging.NOTSET


def test_a_file_that_cannot_be_opened_is_refused_with_the_reason(tmp_path):
    """safetensors would say that there is no such file."""
    with pytest.raises(IsADirectoryError):
        read_arrays(tmp_path)


def test_a_release_of_somebody_unknown_counts(tmp_path):
    folder = RunDirectory(tmp_path)
    (tmp_path / "releases.jsonl").write_text('{"round": 1, "cli\n{"round": 2\n')
    assert folder.read_releases() == [["unknown"], ["unknown"]]
    folder.close()


def test_a_checkpoint_of_another_model_is_refused_by_file_and_array(run):
    folder = run({"num-rounds": 1, "local-epochs": 0})
    other = run({"num-rounds": 1, "local-epochs": 0, "model": "cnn-fedcka"})
    path = checkpoint_of(folder, "round-00001")
    path.unlink()
    theirs = checkpoint_of(other, "round-00001")
    path = path.with_name(theirs.name)
    path.write_bytes(theirs.read_bytes())
    with pytest.raises(ValueError) as caught:
        resume(folder, num_rounds=2)
    text = str(caught.value)
    assert text.startswith(
        f"{path} is a checkpoint of another model (cnn-fedcka, the run's is cnn-fedreco): array "
    )
    assert len(history_of(folder)) == 1


def test_a_folder_that_another_run_is_writing_is_refused(run):
    folder = run({"num-rounds": 1, "local-epochs": 0})
    other = RunDirectory(folder)
    with pytest.raises(ValueError, match=re.escape(f"{folder} is being written by another")):
        resume(folder, num_rounds=2)
    other.close()
    resume(folder, num_rounds=2)  # and free again
    assert len(history_of(folder)) == 2


def test_only_the_number_of_rounds_may_be_new_on_resume(run):
    folder = run({"num-rounds": 1, "local-epochs": 0})
    with pytest.raises(ValueError) as caught:
        resume(folder, num_rounds=3, lr=0.1)
    assert str(caught.value) == (
        f"resume = {str(folder)!r}: lr cannot be changed: a resumed run keeps its config; only "
        "num-rounds can be changed"
    )
    assert json.loads((folder / "config.json").read_text())["overrides"]["num-rounds"] == 1


def test_a_run_whose_result_depends_on_its_number_of_rounds_keeps_it(run):
    """FedRep with final epochs: after its last round, each client has tuned its head already."""
    keys = {"method": "fedrep", "fedrep.final-head-epochs": 1, "num-rounds": 1}
    folder = run(half_of_them | keys)
    before = contents(folder)
    with pytest.raises(ValueError, match="num-rounds = 2: the result of fedrep depends on it: it"):
        resume(folder, num_rounds=2)
    assert contents(folder) == before


@pytest.mark.parametrize("now", [2, 6])
def test_a_resume_with_another_number_of_clients_is_refused_and_leaves_the_folder_free(run, now):
    """Their data would be split anew: another experiment that looks like the same."""
    folder = run({"num-rounds": 1, "local-epochs": 0})
    with pytest.raises(ValueError) as caught:
        resume(folder, num_clients=now, num_rounds=2)
    assert "num-clients = 4" in str(caught.value)
    assert f"{now} SuperNodes" in str(caught.value)
    assert len(history_of(folder)) == 1
    resume(folder, num_rounds=2)  # while the traceback still holds all that was open
    assert len(history_of(folder)) == 2


def test_a_resume_of_a_finished_run_without_more_rounds_is_refused_and_changes_nothing(run):
    folder = run({"num-rounds": 3})
    before = contents(folder)
    for num_rounds in (3, 1):
        with pytest.raises(ValueError, match="its 3 rounds: set more, such as num-rounds=6"):
            resume(folder, num_rounds=num_rounds)
    assert contents(folder) == before


@pytest.mark.parametrize("keeps_state", [True, False])
def test_an_interrupted_run_that_is_ended_at_the_rounds_done_goes_on(run, interrupted, keeps_state):
    """A client had begun round 3: neither its state of round 3 nor its personal model is used."""
    keys = {"method": "fedreco", "local-test-fraction": 0.2, "num-rounds": 4}
    whole, two = run(keys), run(keys | {"num-rounds": 2})
    parts = interrupted(keys | {"keep-state": keeps_state}, 3)
    rule = "2 rounds are done, which a resume keeps: num-rounds = 1 is fewer; set 2 or more"
    with pytest.raises(ValueError, match=rule):
        resume(parts, num_rounds=1)
    resume(parts, num_rounds=2)
    for n in range(NUM_CLIENTS):
        ours, theirs = (load_model(f, f"client-000{n}").network.state_dict() for f in (parts, two))
        assert same_bits(ours, theirs)
    assert read_manifest(parts)["kept"] == read_manifest(two)["kept"]
    resume(parts, num_rounds=4)
    assert_same_run(parts, whole)


def test_an_interrupted_run_does_not_end_without_an_evaluation(interrupted):
    """It was finished, and had no accuracy at all."""
    parts = interrupted({"num-rounds": 10, "evaluate-every": 5}, 4)
    config = (parts / "config.json").read_bytes()
    with pytest.raises(ValueError, match="and the last was not evaluated: set num-rounds=4"):
        resume(parts, num_rounds=3)
    assert (parts / "config.json").read_bytes() == config
    resume(parts, num_rounds=4)
    assert summary_of(parts)["final_accuracy"]


def test_a_path_with_dots_is_that_of_the_run(run, tmp_path):
    """Clients refuse one: a finished run became one that had failed."""
    (tmp_path / "other").mkdir()
    folder = run({"num-rounds": 1, "output-dir": f"{tmp_path}/other/../runs", "keep-state": True})
    assert folder.parent == tmp_path / "runs"
    resume(tmp_path / "other" / ".." / "runs" / folder.name, num_rounds=2)
    assert summary_of(folder)["status"] == "finished"
    odd = folder.rename(folder.with_name("a (copy)"))
    before = contents(odd)
    with pytest.raises(ValueError, match=r"expected a name of letters, .*: rename the directory"):
        resume(odd, num_rounds=3)
    assert contents(odd) == before


def test_a_damaged_summary_does_not_stop_a_resume_without_a_checkpoint(run, interrupted):
    parts = interrupted({"num-rounds": 2}, 1)
    (parts / "summary.json").write_text("{broken")
    resume(parts)
    assert_same_run(parts, run({"num-rounds": 2}))


def test_a_directory_without_a_config_does_not_name_a_command_that_refuses_it(run, tmp_path):
    """As after a kill before the config was written."""
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"exists: choose another name, or remove it: it has no"):
        run({"run-name": "a"})


@pytest.mark.parametrize("keys", [{}, {"privacy.epsilon": 0.5, "privacy.metrics": "exact"}])
def test_a_resumed_run_is_verified(run, interrupted, keys):
    """A repeated private round counts more releases, which are no part of what is compared."""
    parts = interrupted(keys | {"num-rounds": 3, "keep-state": True}, 2)
    resume(parts)
    whole = run(keys | {"num-rounds": 3})
    assert read_manifest(parts)["rounds"] == read_manifest(whole)["rounds"]
    assert all(check.passed for check in checks(parts, 2))
    resume(parts, num_rounds=4)
    assert all(check.passed for check in checks(parts, 3))


def test_a_round_whose_digest_was_not_noted_is_noted_by_the_resume(run, monkeypatch):
    """A kill in between ended the noting of all later rounds, which verified nothing."""
    note = server_app.rounds.note_round

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(server_app.rounds, "note_round", killed)
    with pytest.raises(KeyboardInterrupt):
        run({"num-rounds": 3, "run-name": "cut"})
    monkeypatch.setattr(server_app.rounds, "note_round", note)
    whole = run({"num-rounds": 3})
    parts = whole.with_name("cut")
    assert not read_manifest(parts).get("rounds")
    resume(parts)
    assert read_manifest(parts)["rounds"] == read_manifest(whole)["rounds"]


def test_a_run_that_was_extended_is_verified(run):
    """Its former last round was evaluated for being the last."""
    folder = run({"num-rounds": 2, "evaluate-every": 5, "keep-state": True})
    resume(folder, num_rounds=4)
    assert all(check.passed for check in checks(folder, 2))
    assert json.loads((folder / "config.json").read_text())["overrides"]["num-rounds"] == 4


def test_what_the_defaults_have_become_since_is_named(run):
    folder = run({"num-rounds": 1, "local-epochs": 0})
    kept = json.loads((folder / "config.json").read_text())
    kept["config"]["momentum"] = 0.5
    (folder / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"the defaults changed since: momentum was 0\.5, is 0\.9"):
        resume(folder, num_rounds=2)


# --- clients that fail -----------------------------------------------------------------------

Bad = Callable[[str, int], str]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bad], None]:
    """spoil(bad): bad(client, round) is what becomes of a client's round: "", "raise", "nan"."""

    def spoil_with(bad: Bad) -> None:
        for cls in METHODS.values():
            monkeypatch.setattr(cls, "train", spoilt(trains[cls], bad))

    trains = {cls: cls.train for cls in METHODS.values()}

    return spoil_with


def spoilt(train: Callable[..., Update], bad: Bad) -> Callable[..., Update]:
    def train_or_fail(method, now) -> Update:
        what = bad(now.client, now.round)
        if what == "raise":
            raise RuntimeError(f"{now.client} has no\npower left")
        update = train(method, now)
        if what == "nan":
            name = max(update.arrays)
            spoilt_array = {name: update.arrays[name] * torch.nan}
            update = replace(update, arrays=update.arrays | spoilt_array)
        return update

    return train_or_fail


no_power, not_finite = "RuntimeError: client-0001 has no power left", "values that are not finite"


@pytest.mark.parametrize(
    ("method", "what", "words"),
    [
        ("fedavg", "raise", no_power),
        ("fedreco", "raise", no_power),
        ("fedavg", "nan", not_finite),
        ("moon", "nan", not_finite),
    ],
)
def test_a_client_that_fails_is_left_out_and_named_and_the_run_goes_on(
    run, spoil, caplog, method, what, words
):
    spoil(lambda client, round_: what if client == "client-0001" and round_ == 2 else "")
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run({"method": method, "num-rounds": 3, "local-test-fraction": 0.2})
    history = history_of(folder)
    others = ["client-0000", "client-0002", "client-0003"]
    assert [len(line["participants"]) for line in history] == [4, 3, 4]
    assert history[1]["participants"] == others
    assert words in history[1]["left_out"]["client-0001"]
    [line] = [text for text in caplog.messages if "left out" in text]
    assert line.startswith("round 2: left out client client-0001: ")
    assert words in line
    assert summary_of(folder)["left_out"] == 1
    assert summary_of(folder)["status"] == "finished"
    assert all(array.isfinite().all() for array in final_model(folder).values())


@pytest.mark.parametrize("method", ["moon", "fedreco"])
def test_a_client_whose_training_diverged_once_goes_on_from_what_it_kept_before(
    run, monkeypatch, method
):
    """Else one bad round costs it all later ones, and with FedReCo its personal model."""
    cls = METHODS[method]
    train = cls.train

    def train_or_diverge(method, now) -> Update:
        update = train(method, now)
        if (now.client, now.round) != ("client-0001", 2):
            return update
        arrays = {name: array * torch.nan for name, array in update.arrays.items()}
        state = {
            group: {name: array * torch.nan for name, array in kept.items()}
            for group, kept in update.state.items()
        }
        return replace(update, arrays=arrays, state=state)

    monkeypatch.setattr(cls, "train", train_or_diverge)
    folder = run({"method": method, "num-rounds": 3, "local-test-fraction": 0.2})
    assert [len(line["participants"]) for line in history_of(folder)] == [4, 3, 4]


def test_the_round_is_averaged_over_those_that_did_not_fail(run, spoil):
    spoil(lambda client, round_: "nan" if client == "client-0001" else "")
    three_of_four = run({"num-rounds": 1})
    spoil(lambda client, round_: "raise" if client == "client-0001" else "")
    assert same_bits(final_model(run({"num-rounds": 1})), final_model(three_of_four))


@pytest.mark.parametrize(("method", "what"), [("moon", "raise"), ("fedreco", "nan")])
def test_when_all_fail_the_run_ends_saying_why_and_can_go_on_from_before(run, spoil, method, what):
    keys = {"method": method, "num-rounds": 4, "local-test-fraction": 0.2}
    whole = run(keys)
    is_broken = True
    spoil(lambda client, round_: what if round_ == 3 and is_broken else "")
    with pytest.raises(TooFewRepliesError) as caught:
        run(keys)
    text = str(caught.value)
    assert text.startswith("round 3: 0 accepted replies, min-replies = 1. client-0000")
    assert all(re.search(rf"client-000{i}[:,] ", text) for i in range(4))
    assert "\n" not in text
    broken = other_run(whole)
    assert summary_of(broken)["status"] == f"failed: {text}"
    assert [line["round"] for line in history_of(broken)] == [1, 2]
    [rejected] = audit_of(broken, "rejected")  # which has no line in the history
    assert (rejected["round"], len(rejected["clients"])) == (3, 4)
    newest, _ = read_arrays(checkpoint_of(broken, "round-00002"))
    kept = {f"model/{name}": array for name, array in final_model(broken).items()}
    assert same_bits({n: a for n, a in newest.items() if n.startswith("model/")}, kept)
    is_broken = False
    resume(broken)
    assert_same_run(broken, whole)


def test_a_client_that_stays_silent_is_named_in_the_log_and_the_history(run, monkeypatch, caplog):
    """Its reply comes before the round is written, here the last."""
    pull, aggregate, is_aggregated = InlineGrid.pull_messages, Average.aggregate_train, []

    def pull_but_one(grid: InlineGrid, message_ids) -> Iterator[Message]:
        lost = [
            i
            for i, message in grid.waiting.items()
            if message.metadata.message_type == MessageType.TRAIN
            and message.metadata.dst_node_id == 3
        ]
        return pull(grid, set(message_ids) - set([] if is_aggregated else lost))

    def noting(*what: Any) -> Any:
        is_aggregated.append(True)
        return aggregate(*what)

    monkeypatch.setattr(InlineGrid, "pull_messages", pull_but_one)
    monkeypatch.setattr(Average, "aggregate_train", noting)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run({"num-rounds": 1, "round-timeout": 2.0})
    [line] = history_of(folder)
    assert list(line["left_out"]) == ["client-0001"]
    assert "round-timeout = 2 seconds" in line["left_out"]["client-0001"]
    assert len(line["participants"]) == 3
    assert line["late"] == ["client client-0001's reply to round 1"]
    assert any("left out client client-0001" in text for text in caplog.messages)


class Losing(Deployed):
    """Client-0001's first reply of each kind is lost on its way."""

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.lost: set[str] = set()

    def answer(self, message: Message) -> Message:
        reply, about = super().answer(message), message.metadata
        if about.dst_node_id != 3 or about.message_type in self.lost:
            return reply
        self.lost.add(about.message_type)
        return Message(Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "lost"), reply_to=message)


def test_what_is_sent_again_counts_as_traffic_and_as_a_release(run, monkeypatch):
    monkeypatch.setattr(server_app.inline, "InlineGrid", Losing)
    keys = {"privacy.epsilon": 0.5, "privacy.delta": 1e-3, "privacy.metrics": "exact"}
    folder = run(half_of_them | keys | {"num-rounds": 1, "evaluate-clients": "all"})
    [line], notes = history_of(folder), audit_of(folder, "sent")
    for kind, key in (("train", "bytes_down"), ("evaluate", "evaluation_bytes_down")):
        sent = [note for note in notes if note["kind"] == kind]
        assert sent[1]["clients"] == ["client-0001"]
        assert line[key] == sum(note["bytes"] for note in sent)
    with closing(RunDirectory(folder)) as directory:
        assert directory.release_counts()["client-0001"] == 2


def test_a_diverged_server_step_ends_the_run_with_one_line(run, tmp_path):
    with pytest.raises(DivergedError) as caught:
        run(
            {
                "server-optimizer": "fedadam",
                "fedadam.lr": 1e38,
                "fedadam.beta1": 0.0,
                "num-rounds": 5,
                "data-fraction": 1.0,  # with less, the clients' training diverges before it
            }
        )
    text = str(caught.value)
    assert re.match(r"round \d: the server update gave values that are not finite", text)
    assert "Lower lr, or the server's learning rate" in text
    [folder] = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert summary_of(folder)["status"] == f"failed: {text}"
    assert all(array.isfinite().all() for array in final_model(folder).values())


def test_a_model_that_is_finite_but_whose_loss_is_not_is_warned_of(run, caplog):
    """Its run may finish: no client trains after the last round."""
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run({"server-optimizer": "fedavgm", "fedavgm.lr": 1e18, "num-rounds": 1})
    [line] = history_of(folder)
    assert line["global"]["loss"] is None
    text = "round 1: the global model's loss on the test set is nan: the model has diverged"
    assert [m for m in caplog.messages if m.startswith(text) and "server's learning rate" in m]


def test_a_diverged_state_of_the_server_ends_the_run_before_it_is_in_a_checkpoint(
    run, tmp_path, monkeypatch
):
    """The model is finite: FedAdam's step divides by such a state."""
    state = {"v": torch.tensor([1.0, math.inf])}
    monkeypatch.setattr("strategies.average.Average.own_state", lambda self: state)
    with pytest.raises(DivergedError, match="round 1: the server update gave values that are not"):
        run({"num-rounds": 1})
    assert not [*tmp_path.glob("*/checkpoints/*")]


def test_a_diverged_u_0_ends_the_run_with_one_line_and_the_personal_models_stay(run, tmp_path):
    """u_0 is finite but so far off that no client can answer with a finite gradient."""
    keys = {"method": "fedreco", "local-test-fraction": 0.2, "num-rounds": 5}
    with pytest.raises((DivergedError, TooFewRepliesError)) as caught:
        run(keys | {"fedreco.eta-0": 1e38})
    text = str(caught.value)
    assert re.match(r"round \d: ", text)
    assert "not finite" in text
    assert "\n" not in text
    [folder] = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert summary_of(folder)["status"] == f"failed: {text}"
    last = len(history_of(folder))
    assert last >= 1
    kept, _ = read_arrays(checkpoint_of(folder, f"round-{last:05d}"))
    assert all(array.isfinite().all() for array in kept.values())


def test_nothing_is_written_outside_output_dir_and_keel_home(run, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folder = run({"num-rounds": 1, "local-epochs": 0, "output-dir": str(tmp_path / "made" / "up")})
    assert folder.parent == tmp_path / "made" / "up"
    assert os.listdir(elsewhere) == []


def test_runs_go_to_keel_home_by_default(keel_home):
    folder = run_inline(SMALL | {"num-rounds": 1, "local-epochs": 0}, NUM_CLIENTS)
    assert folder.parent == keel_home / "runs"
    assert server_app.inline.simulated_nodes(2)[1] == {"partition-id": 1, "num-partitions": 2}


def test_a_run_that_cannot_be_begun_leaves_neither_its_lock_nor_its_log(run, tmp_path, monkeypatch):
    handlers = list(logging.getLogger("keel").handlers)

    def full(*_args: object, **_fields: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "manifest.json")

    monkeypatch.setattr(server_app.federation, "begin_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        run({"num-rounds": 1})
    assert logging.getLogger("keel").handlers == handlers
    (path,) = tmp_path.glob("*/.lock")
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
