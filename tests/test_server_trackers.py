"""Trackers: the same figures as the history, one run over a resume, and a run that they never end.

MLflow and W&B are tested against their real local backends where they are installed.
"""

import json
import logging
import shutil
import struct
import sys
import threading
import time

import pytest
from run_fixtures import history_of, resume

import server_app.trackers
from protocol.config import resolve_config
from server_app.observers import RunInfo, scalars
from server_app.trackers import Tracked, check_trackers, figures, tracker_id

quick = {"local-epochs": 0, "num-rounds": 2}
LINE = {"round": 1, "losses": {}, "seconds": {}, "left_out": {}, "rejected": 0}
LINE |= {"bytes_down": 1, "bytes_up": 2}


class Failing:
    """Notes its calls; those named in `fails` raise."""

    def __init__(self, *fails, error=None):
        self.fails, self.error, self.calls = list(fails), error or OSError("offline"), []

    def note(self, name):
        self.calls.append(name)
        if name in self.fails:
            self.fails.remove(name)
            raise self.error

    def on_run_start(self, info):
        self.note("start")

    def on_round(self, line):
        self.note(line["round"])

    def on_run_end(self, summary):
        self.note("end")


def followed(tracker, tmp_path, num_rounds=3, line=LINE, with_clients=False):
    info = RunInfo(tmp_path, *("m", "o", "s"), 1, 1, (1, 2, 3), 2, "net", 5, 2, 2, num_rounds)
    tracked = Tracked("mlflow", tracker, with_clients)
    tracked.on_run_start(info)
    for number in range(1, num_rounds + 1):
        tracked.on_round(line | {"round": number})
    tracked.on_run_end({"status": "finished"})


def test_a_tracker_that_fails_is_warned_about_once_and_gets_the_rest(tmp_path, caplog):
    tracker = Failing(1, 3)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        followed(tracker, tmp_path)
    assert tracker.calls == ["start", 1, 2, 3, "end"]
    assert caplog.messages == ["tracker mlflow: OSError: offline; the run directory has everything"]


def test_a_tracker_that_cannot_start_is_started_again(tmp_path):
    tracker = Failing("start", error=SystemExit(1))
    followed(tracker, tmp_path)
    assert tracker.calls == ["start", "start", 1, 2, 3, "end"]


def test_a_run_does_not_wait_for_a_tracker_that_hangs(tmp_path, monkeypatch, caplog):
    hanging, release = Failing(), threading.Event()
    hanging.on_round = lambda line: release.wait()
    monkeypatch.setattr(server_app.trackers, "END_TIMEOUT_S", 0.05)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        followed(hanging, tmp_path)
    release.set()
    assert "has not finished 0.05 s after the run" in caplog.text


def test_the_id_of_a_tracker_run_survives_a_resume(tmp_path):
    assert tracker_id(tmp_path, "a", lambda: "1") == ("1", True)
    assert tracker_id(tmp_path, "b", lambda: "2") == ("2", True)
    assert tracker_id(tmp_path, "a", lambda: "3") == ("1", False)
    for damaged in ("{", "[]", "null"):
        (tmp_path / "trackers.json").write_text(damaged)
        assert tracker_id(tmp_path, "a", lambda: "3") == ("3", True)


def test_a_copy_of_a_run_gets_a_tracker_run_of_its_own_and_a_moved_run_continues(tmp_path):
    """The copy wrote into the original's."""
    run, copy, moved = (tmp_path / name for name in ("run", "copy", "moved"))
    run.mkdir()
    for name in "ab":
        tracker_id(run, name, lambda name=name: f"{name}1")
    shutil.copytree(run, copy)
    for name in "ab":
        assert tracker_id(copy, name, lambda name=name: f"{name}2") == (f"{name}2", True)
        assert tracker_id(copy, name, lambda: "3") == (f"{name}2", False)
        assert tracker_id(run, name, lambda: "3") == (f"{name}1", False)
    shutil.rmtree(copy)
    run.rename(moved)
    assert tracker_id(moved, "a", lambda: "3") == ("a1", False)
    shutil.copytree(moved, copy)
    assert tracker_id(moved, "a", lambda: "4") == ("a1", False)
    assert tracker_id(copy, "a", lambda: "a4") == ("a4", True)


def test_trackers_that_start_together_both_continue_after_a_resume(tmp_path):
    """Each has a thread: here the second starts while the first creates its run."""

    def create():
        tracker_id(tmp_path, "wandb", lambda: "2")
        return "1"

    tracker_id(tmp_path, "mlflow", create)
    assert tracker_id(tmp_path, "mlflow", lambda: "3") == ("1", False)
    assert tracker_id(tmp_path, "wandb", lambda: "3") == ("2", False)


def test_clients_are_sent_only_where_they_are_asked_for(tmp_path):
    line = LINE | {"personal": {"mean": 0.5, "worst_decile": 0.1, "clients": {"a": 0.1, "b": 0.9}}}
    tracker, seen = Failing(), []
    tracker.on_round = lambda line: seen.append(figures(line))
    followed(tracker, tmp_path, 1, line)
    followed(tracker, tmp_path, 1, line, with_clients=True)
    without, with_clients = seen
    assert with_clients.keys() - without.keys() == {"client/a/personal", "client/b/personal"}
    assert with_clients["client/b/personal"] == 0.9


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"tracker": "wandb, tensorboard"}, ["tensorboard", "wandb"]),
    ],
)
def test_trackers_are_named_with_commas(keys, expected):
    assert resolve_config(keys).rounds.trackers == expected


@pytest.mark.parametrize("value", ["", "aim", "none,wandb", "wandb,"])
def test_an_unknown_tracker_is_refused(value):
    with pytest.raises(
        ValueError, match=r"tracker = .*none, or some of tensorboard, mlflow, wandb"
    ):
        resolve_config({"tracker": value})


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(server_app.trackers, "is_installed", lambda name: False)
    with pytest.raises(ValueError, match=r"tracker = 'wandb': .* pip install wandb .*tracker=none"):
        check_trackers(resolve_config({"tracker": "wandb"}).rounds)
    check_trackers(resolve_config({}).rounds)


def test_a_folder_with_a_tracker_s_name_is_not_its_package(tmp_path, monkeypatch):
    """W&B makes wandb/ in the working directory, which `python -m keel` imports from."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="the package wandb is not installed"):
        check_trackers(resolve_config({"tracker": "wandb"}).rounds)


# --- the real ones -------------------------------------------------------------------------------


def test_mlflow_gets_config_metrics_and_files_in_one_run_over_a_resume(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'ml.db'}")
    folder = run(quick | {"tracker": "mlflow", "run-name": "tracked"})
    resume(folder, num_rounds=3)
    client = MlflowClient()
    (experiment,) = [e for e in client.search_experiments() if e.name == "keel"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["local-epochs"] == "0"
    for name, value in scalars(history_of(folder)[-1]).items():
        assert found.data.metrics[name] == pytest.approx(value)
    steps = client.get_metric_history(found.info.run_id, "accuracy/global.accuracy")
    assert [m.step for m in steps] == [1, 2, 3]
    files = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {"config.json", "summary.json", "history.jsonl"} <= files


def test_mlflow_gets_all_parameters_after_a_failure_between_two_calls(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'ml.db'}")
    log_batch, calls = MlflowClient.log_batch, []

    def fails_the_second_time(self, *args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 2:
            raise OSError("offline")
        return log_batch(self, *args, **kwargs)

    monkeypatch.setattr(MlflowClient, "log_batch", fails_the_second_time)
    monkeypatch.setattr(server_app.trackers, "MLFLOW_BATCH", 50)
    folder = run(quick | {"tracker": "mlflow"})
    run_id = json.loads((folder / "trackers.json").read_text())["mlflow"]
    params = MlflowClient().get_run(run_id).data.params
    assert params.keys() == resolve_config({}).flat.keys()


def test_wandb_gets_config_metrics_and_files_offline_in_one_run_over_a_resume(run, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra `wandb`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = run(quick | {"tracker": "wandb"})
    resume(folder, num_rounds=3)
    found = records_of(folder)
    assert {record.run.run_id for record in found if record.HasField("run")} == {
        json.loads((folder / "trackers.json").read_text())["wandb"]
    }
    rounds, steps = [], []
    for record in found:
        if record.HasField("history"):
            steps.append(record.history.step.num)
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rounds.append(values["round"])
            expected = scalars(history_of(folder)[values["round"] - 1])
            assert values["accuracy/global.accuracy"] == expected["accuracy/global.accuracy"]
    assert rounds == steps == [1, 2, 3]  # W&B joins parts whose steps differ
    saved = {path.name for path in (folder / "wandb").rglob("files/*")}
    assert {"config.json", "history.jsonl"} <= saved


def records_of(folder):
    """The records in W&B's offline files, which its own process completes after the run's end."""
    paths = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    found, end = [], time.time() + 30
    while sum(record.HasField("exit") for record in found) < len(paths) and time.time() < end:
        time.sleep(0.1)
        found = [record for path in paths for record in records_in(path)]
    return found


def records_in(path):
    """Protobuf in LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    found = []
    content, at, data = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # a header does not cross blocks
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # not written yet
            break
        data += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(wandb_internal_pb2.Record.FromString(data))
            data = b""
    return found


def test_an_mlflow_server_that_is_away_costs_a_warning(run, monkeypatch, caplog):
    pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        folder = run(quick | {"tracker": "mlflow"})
    assert len(history_of(folder)) == 2
    assert sum("tracker mlflow" in message for message in caplog.messages) == 1
