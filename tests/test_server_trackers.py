"""Trackers: the same figures as the history, one run over a resume, and a run that they never end.

MLflow and W&B are tested against their real local backends where they are installed.
"""

import json
import logging
import threading

import pytest
from run_fixtures import resume

import server_app.trackers
from protocol.config import resolve_config
from server_app.history import scalars
from server_app.observers import RunInfo, RunObserver
from server_app.run_reader import RunReader
from server_app.trackers import Tracked, check_trackers, tracker_id

quick = {"local-epochs": 0, "num-rounds": 2}


class Troubled(RunObserver):
    """Notes the rounds that it is told of; cannot start, and hangs in round 2 until `release`."""

    def __init__(self):
        self.rounds, self.release = [], threading.Event()

    def on_run_start(self, info):
        raise OSError("offline")

    def on_round(self, line):
        if line["round"] == 2:
            self.release.wait()
        self.rounds.append(line["round"])


def test_a_tracker_that_fails_or_hangs_costs_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server_app.trackers, "END_TIMEOUT_S", 0.05)
    tracker = Troubled()
    tracked = Tracked("mlflow", tracker)
    with caplog.at_level(logging.WARNING, logger="keel.server"):
        tracked.on_run_start(RunInfo(tmp_path, *"mos", 1, 1, (1, 2, 3), 2, "net", 5, 2, 2, 3))
        for number in (1, 2, 3):
            tracked.on_round({"round": number})
        tracked.on_run_end({"status": "finished"})
    assert len(caplog.messages) == 1
    assert "offline" in caplog.text
    tracker.release.set()
    tracked.thread.join(60)
    assert tracker.rounds == [1, 2, 3]


def test_the_id_of_a_tracker_run_survives_a_resume(tmp_path):
    assert tracker_id(tmp_path, "a", lambda: "1") == ("1", True)
    assert tracker_id(tmp_path, "b", lambda: "2") == ("2", True)
    assert tracker_id(tmp_path, "a", lambda: "3") == ("1", False)


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(server_app.trackers, "is_installed", lambda name: False)
    with pytest.raises(ValueError, match="tracker"):
        check_trackers(resolve_config({"tracker": "wandb"}).rounds)
    check_trackers(resolve_config({}).rounds)


# --- the real ones -------------------------------------------------------------------------------


def test_tensorboards_events_are_the_historys_figures_over_a_resume(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = resume(run(quick | {"tracker": "tensorboard"}), num_rounds=4)
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    points = [(e.step, e.value) for e in events.Scalars("accuracy/global.accuracy")]
    expected = [(line["round"], line["global"]["accuracy"]) for line in RunReader(folder).history]
    assert points == [(n, pytest.approx(value)) for n, value in expected]
    assert {"seconds/training", "left_out", "bytes_up"} <= set(events.Tags()["scalars"])


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
    for name, value in scalars(RunReader(folder).history[-1]).items():
        assert found.data.metrics[name] == pytest.approx(value)
    steps = client.get_metric_history(found.info.run_id, "accuracy/global.accuracy")
    assert [m.step for m in steps] == [1, 2, 3]
    files = {item.path for item in client.list_artifacts(found.info.run_id)}
    assert {"config.json", "summary.json", "history.jsonl"} <= files


def test_wandb_continues_one_run_offline_over_a_resume(run, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra `wandb`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = resume(run(quick | {"tracker": "wandb"}), num_rounds=3)
    run_id = json.loads((folder / "trackers.json").read_text())["wandb"]
    parts = list((folder / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(parts) == 2
    saved = {path.name for path in (folder / "wandb").rglob("files/*")}
    assert {"config.json", "history.jsonl"} <= saved
