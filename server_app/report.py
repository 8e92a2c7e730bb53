"""The record of a run: summary.json in progress, its observers, and its files at the end."""

import json
import logging
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from client_app.setup import pixels_of
from data.plots import plot_label_distribution, save_png
from data.sources import Source
from protocol.arrays import Arrays
from protocol.code import line_in_method
from protocol.files import write_atomically
from protocol.messages import RosterEntry
from protocol.privacy import privacy_statement
from protocol.ray_nodes import devices_by_node
from server_app.diagnostics.plots import plot_rounds
from server_app.history import CURVES, Line, curve, summarise
from server_app.observers import RoundLog, RunInfo, RunObserver
from server_app.outcome import outcome_of
from server_app.plots import accuracy_figure, scores_of
from server_app.run_directory import save_arrays
from server_app.run_reader import MODEL_FILE, SUMMARY_FILE, RunReader
from server_app.start import Run
from server_app.trackers import trackers_of
from strategies.validation import TooFewRepliesError

log = logging.getLogger("keel.server")
WRITE_EVERY_S = 2.0  # how often summary.json is written while rounds are shorter than this


class Reporter:
    """Writes summary.json, calls the observers, and completes the run directory.

    history: the lines of all rounds, including those before a resume.
    """

    def __init__(self, run: Run, history: list[Line], observers: Sequence[RunObserver]) -> None:
        self.run, self.history, self.info = run, history, info_of(run, history)
        self.observers = [RoundLog(), *trackers_of(run.config.rounds), *observers]
        self.is_finished = False
        # the signal that ends the process comes in another thread than the rounds, or within them
        self.lock = threading.RLock()
        before = RunReader(run.directory.path).summary if history else {}
        self.started = before.get("started") or iso_time(time.time())
        self.written_at = 0.0
        self.summary: dict[str, Any] | None = None  # the last

    def begin(self) -> None:
        """Note that the rounds start, in summary.json and to the observers."""
        self.write("running")
        for observer in self.observers:
            observer.on_run_start(self.info)

    def write(self, status: str) -> dict[str, Any]:
        """Write summary.json and return it."""
        has_ended, config = status != "running", self.run.config
        clients, missing, warnings = self.run.clients, "", list(self.info.warnings)
        if has_ended and self.history:
            noun = "client" if clients.are_simulated else "site"
            names = self.run.experiment.data.class_names
            saved = RunReader(self.info.directory)
            missing, found = outcome_of(saved, clients.shown, names, noun)
            warnings += found
        summary = {
            "status": status,
            "directory": str(self.info.directory),
            "clients": self.info.num_clients,
            "started": self.started,
            "ended": iso_time(time.time()) if has_ended else None,
            **summarise(self.history, config.flat, config.rounds.last_rounds),
            "privacy": privacy_spent(self.run),
            "missing": missing,
            "warnings": warnings,
        }
        path = self.info.directory / SUMMARY_FILE
        write_atomically(path, json.dumps(summary, indent=2).encode())
        self.written_at = time.monotonic()
        return summary

    def interrupted(self) -> None:
        """Note that the process ends before the run does."""
        with self.lock:
            if self.is_finished:
                return
            self.is_finished = True
            self.write("stopped")
        log.info("stopping: round %d is done", len(self.history))

    def replied(self, what: str, num_replies: int, num_asked: int) -> None:
        """Tell the observers how many clients have answered."""
        for observer in self.observers:
            observer.on_replies(what, num_replies, num_asked)

    def round_done(self, line: Line) -> None:
        """Note that a round is done and on disk."""
        self.history.append(line)
        with self.lock:
            if not self.is_finished and time.monotonic() - self.written_at > WRITE_EVERY_S:
                self.write("running")
        for observer in self.observers:
            observer.on_round(line)

    def end(self, final: Arrays, status: str) -> None:
        """Complete the run directory, then tell the observers. final: the last round's arrays."""
        try:
            self.complete_directory(final, status)
        except OSError as error:  # such as a full disk, which may be what ended the run
            if status == "finished":
                raise
            log.warning("the end of the run is incomplete: %s", error)
        finally:  # last: an observer may raise
            for observer in self.observers if self.summary else ():
                observer.on_run_end(self.summary or {})

    def complete_directory(self, final: Arrays, status: str) -> None:
        """Write model, summary, manifest and pictures; remove the state of a finished run."""
        run, path = self.run, self.run.directory.path
        method = run.experiment.method
        try:
            if method.has_global_model:  # arrays that are never sent keep their initial values
                final = run.experiment.initial_weights | final
            save_arrays(path / MODEL_FILE, final, model_metadata(run))
            plot_split(run.clients.shown, run.experiment.source, path / "labels.png")
        except BaseException as error:
            if status == "finished":
                status = status_after(error)
            raise
        finally:
            with self.lock:
                self.summary = self.write(status)
                self.is_finished = True
            plot_accuracy(self.history, self.info.title, path / "accuracy.png")
            run.audit.note("ended", status=status)
        removes_state = status == "finished" and not run.config.rounds.keep_state
        last_round = max(run.start.round, len(self.history))
        run.directory.finish(last_round, removes_state, method.is_personal)
        if run.monitor:
            plot_rounds(self.history, self.info.title, path / "diagnostics")


def plot_split(roster: Sequence[RosterEntry], source: Source, path: Path) -> None:
    """Samples per client and class as a PNG, clients in the order of their names.

    Writes nothing if a client withholds its label counts.
    """
    clients = sorted(roster, key=lambda entry: entry.client)
    if all(entry.label_counts for entry in clients):
        plot_label_distribution([entry.label_counts for entry in clients], source.class_names, path)


def plot_accuracy(history: Sequence[Line], title: str, path: Path) -> None:
    """Accuracies and loss terms over rounds as a PNG; unevaluated rounds have no point."""
    curves = [(description, curve(history, key, name)) for key, name, description in CURVES]
    losses = []
    for term in dict.fromkeys(name for line in history for name in line["losses"]):
        points = [(line["round"], line["losses"].get(term)) for line in history]
        losses.append((f"{term}, training", [(n, loss) for n, loss in points if loss is not None]))
    save_png(accuracy_figure(curves, title, losses, scores_of(history)), path)


def iso_time(seconds: float) -> str:
    """A time of `time.time` in local time, with its offset: 2026-01-31T12:00:00+01:00."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


class DivergedError(RuntimeError):
    """The global arrays are no longer finite."""


def status_after(error: BaseException) -> str:
    """The status of a run that this error ends."""
    if isinstance(error, TooFewRepliesError | DivergedError):
        return f"failed: {error}"
    if isinstance(error, Exception):
        place = line_in_method(error)
        return " ".join(f"failed: {type(error).__name__}: {error}{place}".split())
    return "stopped"


def info_of(run: Run, history: Sequence[Line]) -> RunInfo:
    """What the observers are told at the start."""
    config, experiment = run.config, run.experiment
    source = experiment.source
    return RunInfo(
        directory=run.directory.path,
        method=config.rounds.method,
        server_optimizer=config.rounds.server_optimizer,
        source=config.data.source,
        num_train=run.clients.num_train,
        num_test=len(source.test.labels),
        image_shape=source.image_shape,
        num_classes=source.num_classes,
        model=config.model.model,
        num_parameters=sum(parameter.numel() for parameter in experiment.model.parameters()),
        num_clients=run.clients.num,
        clients_per_round=len(experiment.strategy.cohort.sample(1)),
        num_rounds=config.rounds.num_rounds,
        history=tuple(history),
        config=RunReader(run.directory.path).config,  # in which num-clients is set
        workers=tuple(
            f"{host}: {devices}"
            for host, devices in devices_by_node(
                (machine.host, machine.device) for machine in run.pool.machines
            ).items()
        ),
        device=str(next(experiment.model.parameters()).device),
        warnings=(*source.notes, *run.notes),
    )


def model_metadata(run: Run) -> dict[str, str]:
    """Metadata of model.safetensors: enough to build and use the model without the data."""
    source, config, clients = run.experiment.source, run.config, run.clients
    pixels = pixels_of(config, source)
    if len(clients.shown) < clients.num:
        others = {"client-models": ",".join(config.client_models)}
    else:
        pairs = sorted((e.client, e.model) for e in clients.shown if e.model != config.model.model)
        others = {f"model of {client}": model for client, model in pairs}
    return others | {
        "shape": ",".join(map(str, source.image_shape)),
        "classes": "\n".join(source.class_names),
        "mean": ",".join(map(str, pixels.mean)),
        "std": ",".join(map(str, pixels.std)),
        "window": ",".join(map(str, source.window)),
    }


def privacy_spent(run: Run) -> dict[str, Any] | None:
    """The privacy statement for the client with the most releases; None without privacy."""
    privacy = run.config.privacy
    if not privacy.epsilon:
        return None
    num_entries = sum(array.numel() for array in run.start.arrays.values())
    releases = max(run.audit.releases.values(), default=0)
    reads_state = run.monitor is not None and run.experiment.method.is_stateful
    return privacy_statement(privacy, num_entries, releases, reads_state)
