"""The record of a run: summary.json in progress, its figures at the end, and its observers."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.plots import plot_label_distribution, save_png
from data.sources import Source
from protocol.config import RunConfig
from protocol.messages import RosterEntry
from server_app.history import CURVES, Line, curve
from server_app.observers import RoundLog, RunInfo, RunObserver
from server_app.plots import accuracy_figure
from server_app.run_reader import RunReader
from server_app.summary import iso_time, summarise, write_summary
from server_app.trackers import trackers_of

log = logging.getLogger("keel.server")
WRITE_EVERY_S = 2.0  # how often summary.json is written while rounds are shorter than this

Privacy = dict[str, Any] | None


class Reporter:
    """Writes summary.json and calls the observers.

    history: the lines of all rounds, including those before a resume.
    """

    def __init__(
        self,
        config: RunConfig,
        info: RunInfo,
        observers: Sequence[RunObserver],
        privacy_spent: Callable[[], Privacy],
    ) -> None:
        self.config, self.info, self.privacy_spent = config, info, privacy_spent
        self.observers = [RoundLog(), *trackers_of(config.rounds), *observers]
        self.history = list(info.history)
        self.is_finished = False
        # the signal that ends the process comes in another thread than the rounds, or within them
        self.lock = threading.RLock()
        before = RunReader(info.directory).summary if info.last_round else {}
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
        has_ended = status != "running"
        summary = {
            "status": status,
            "directory": str(self.info.directory),
            "clients": self.info.num_clients,
            "started": self.started,
            "ended": iso_time(time.time()) if has_ended else None,
            **summarise(self.history, self.config.flat, self.config.rounds.last_rounds),
            "privacy": self.privacy_spent(),
        }
        write_summary(self.info.directory, summary)
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

    def finish(self, status: str) -> None:
        """Write the last summary and accuracy.png; the run ends with `status`."""
        with self.lock:
            self.summary = self.write(status)
            self.is_finished = True
        plot_accuracy(self.history, self.info.title, self.info.directory / "accuracy.png")

    def tell_end(self) -> None:
        """Call the observers, which may raise, once everything else is done."""
        if self.summary:
            for observer in self.observers:
                observer.on_run_end(self.summary)


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
    save_png(accuracy_figure(curves, title, losses), path)
