"""Trackers: observers that copy a run to TensorBoard, MLflow or Weights & Biases.

The run directory stays the source of truth: a tracker that fails or is offline costs the run
nothing but a warning. Each works in a thread of its own, behind `Tracked`. A resumed run continues
in the same tracker run, whose id is in trackers.json.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from protocol.code import is_installed
from protocol.config import keel_home
from protocol.config_keys import RoundsConfig
from protocol.files import write_atomically
from protocol.options import ConfigError
from protocol.text import in_one_line
from server_app.history import Line, scalars
from server_app.observers import RunInfo, RunObserver
from server_app.run_reader import CONFIG_FILE, HISTORY_FILE, ROSTER_FILE, SUMMARY_FILE

log = logging.getLogger("keel.server")
TRACKERS_FILE = "trackers.json"
PROJECT = "keel"  # MLflow's experiment, W&B's project
END_TIMEOUT_S = 60.0  # for what a tracker still has to send when the run has ended
ARTIFACTS = (CONFIG_FILE, SUMMARY_FILE, HISTORY_FILE, ROSTER_FILE, "accuracy.png", "labels.png")
MLFLOW_BATCH = 100  # parameters, and characters of a value: MLflow's own limits
MLFLOW_VALUE = 500
ids_lock = threading.Lock()  # of trackers.json, which each tracker's thread changes


def trackers_of(rounds: RoundsConfig) -> list[RunObserver]:
    """The trackers that the config names."""
    makers: dict[str, Callable[[], RunObserver]] = {
        "tensorboard": TensorBoardEvents,
        "mlflow": MlflowRun,
        "wandb": WandbRun,
    }
    return [Tracked(n, makers[n]()) for n in rounds.trackers]


def check_trackers(rounds: RoundsConfig) -> None:
    """ValueError, one line, if the package of a tracker in the config is not installed."""
    for name in rounds.trackers:
        if not is_installed(name):
            package = {"mlflow": "mlflow-skinny alembic"}.get(name, name)
            raise ConfigError(
                "tracker",
                f"tracker = {rounds.tracker!r}: the package {name} is not installed: pip install "
                f"{package} (Keel's extra {name}), or set tracker=none",
            )


class Tracked(RunObserver):
    """Runs a tracker in a thread: the run neither waits for it nor ends because of it."""

    def __init__(self, name: str, tracker: RunObserver) -> None:
        self.name, self.tracker, self.has_warned = name, tracker, False
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def on_run_start(self, info: RunInfo) -> None:
        """Start the thread, and in it the tracker's run."""
        self.calls.put(lambda: self.tracker.on_run_start(info))
        self.thread.start()

    def on_round(self, line: Line) -> None:
        """Pass the round on."""
        self.calls.put(lambda: self.tracker.on_round(line))

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Pass the end on, and wait for the tracker for at most `END_TIMEOUT_S`."""
        self.calls.put(lambda: self.tracker.on_run_end(summary))
        self.calls.put(None)
        if self.thread.is_alive():
            self.thread.join(END_TIMEOUT_S)
        if self.thread.is_alive():
            self._warn(f"it has not finished {END_TIMEOUT_S:g} s after the run")

    def _work(self) -> None:
        while call := self.calls.get():
            try:
                call()
            except BaseException as error:  # SystemExit of a package, too: only this thread ends
                self._warn(f"{type(error).__name__}: {in_one_line(error)}")

    def _warn(self, problem: str) -> None:
        """Once a run."""
        if not self.has_warned:
            self.has_warned = True
            log.warning("tracker %s: %s; the run directory has everything", self.name, problem)


def tracker_id(directory: Path, name: str, new: Callable[[], str]) -> tuple[str, bool]:
    """(the id of the run in this tracker, whether it is new), stored in the run directory."""
    path = directory / TRACKERS_FILE
    with ids_lock:
        saved = json.loads(path.read_text()) if path.exists() else {}
        if name in saved:
            return saved[name], False
        saved[name] = new()
        write_atomically(path, json.dumps(saved).encode())
        return saved[name], True


def artifacts(directory: Path) -> list[Path]:
    """The files of a run that are copied at its end."""
    return [path for name in ARTIFACTS if (path := directory / name).exists()]


class TensorBoardEvents(RunObserver):
    """Writes every figure of a round as TensorBoard events in the run directory's tensorboard/."""

    def on_run_start(self, info: RunInfo) -> None:
        """Open the event file; events of rounds that a resume repeats are superseded."""
        from torch.utils.tensorboard import SummaryWriter

        purge_step = info.last_round + 1 if info.last_round else None
        self.writer: Any = SummaryWriter(str(info.directory / "tensorboard"), purge_step=purge_step)
        rows = "".join(f"| {key} | {value} |\n" for key, value in info.config.items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", info.last_round)

    def on_round(self, line: Line) -> None:
        """Write the round's scalars."""
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["round"])
        self.writer.flush()

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Close the event file."""
        self.writer.close()


class MlflowRun(RunObserver):
    """A run of MLflow: at $MLFLOW_TRACKING_URI, else in mlflow.db in Keel's home."""

    def on_run_start(self, info: RunInfo) -> None:
        """Create the run with the config as parameters, or reopen that of an interrupted run."""
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri, folder = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            uri = f"sqlite:///{keel_home() / 'mlflow.db'}"
            folder = (keel_home() / "mlruns").as_uri()
        self.client, self.directory = MlflowClient(tracking_uri=uri), info.directory

        def create() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            if found := self.client.get_experiment_by_name(name):
                experiment = found.experiment_id
            else:
                experiment = self.client.create_experiment(name, artifact_location=folder)
            return str(self.client.create_run(experiment, run_name=info.directory.name).info.run_id)

        self.run_id, is_new = tracker_id(info.directory, "mlflow", create)
        if not is_new:
            self.client.update_run(self.run_id, status="RUNNING")
        logged = self.client.get_run(self.run_id).data.params  # a value cannot change
        new = [(key, str(value)) for key, value in info.config.items() if key not in logged]
        params = [Param(key, value[:MLFLOW_VALUE]) for key, value in new]
        for i in range(0, len(params), MLFLOW_BATCH):
            self.client.log_batch(self.run_id, params=params[i : i + MLFLOW_BATCH])

    def on_round(self, line: Line) -> None:
        """Log the round's metrics."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, line["round"]) for name, value in scalars(line).items()]
        self.client.log_batch(self.run_id, metrics=metrics)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Log the files and end the run."""
        for path in artifacts(self.directory):
            self.client.log_artifact(self.run_id, str(path))
        states = {"finished": "FINISHED", "stopped": "KILLED"}
        self.client.set_terminated(self.run_id, states.get(summary["status"], "FAILED"))


class WandbRun(RunObserver):
    """A run of Weights & Biases; offline in the run directory where there is no login."""

    def on_run_start(self, info: RunInfo) -> None:
        """Create the run, or continue that of an interrupted run."""
        import wandb

        run_id, is_new = tracker_id(info.directory, "wandb", lambda: os.urandom(6).hex())
        quiet = wandb.Settings(console="off", silent=True, show_warnings=False)
        wandb.setup(quiet)  # or `save` would print a line for each file
        has_login = wandb.login(prompt=False, verify=False)
        mode = os.environ.get("WANDB_MODE") or ("online" if has_login else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=info.directory.name,
            dir=str(info.directory),
            config=dict(info.config),
            resume=None if is_new or mode == "offline" else "allow",
            mode=mode,
            settings=quiet,
        )
        self.run.define_metric("*", step_metric="round")
        self.directory = info.directory

    def on_round(self, line: Line) -> None:
        """Log the round's metrics.

        The step is the round's number. Offline, a resumed run would count from 0 again, and W&B
        joins the parts of a run only if their steps differ.
        """
        self.run.log({"round": line["round"], **scalars(line)}, step=line["round"], commit=True)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Save the files and end the run."""
        for path in artifacts(self.directory):
            self.run.save(str(path), base_path=self.directory, policy="now")
        self.run.finish(0 if summary["status"] == "finished" else 1)
