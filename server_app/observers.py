"""Observers of a run in progress: log lines, the table at the end; trackers.py has the others.

An observer is any object with the methods of `RunObserver`. The run calls them in the order given,
after the round or the summary is on disk; an exception in one ends the run.
"""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from protocol.text import num_of, size_of_data
from server_app.history import (
    CURVES,
    Line,
    duration,
    privacy_text,
    score_curves,
    value_in,
)

log = logging.getLogger("keel.server")
NOTE_EVERY_S = 10.0


@dataclass(frozen=True)
class RunInfo:
    """What is about to run. `history`: lines of the rounds done before a resume.

    config: every key with its value. device: of the server; with the inline engine, of the clients.
    workers: a text about those of each machine, such as `host: 2 on cuda:0`. warnings: what the
    summary repeats at the end.
    """

    directory: Path
    method: str
    server_optimizer: str
    source: str
    num_train: int
    num_test: int
    image_shape: tuple[int, int, int]
    num_classes: int
    model: str
    num_parameters: int
    num_clients: int
    clients_per_round: int
    num_rounds: int
    history: tuple[Line, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    workers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The run in one line of a figure."""
        server = "" if self.server_optimizer == "fedavg" else f" + {self.server_optimizer}"
        return f"{self.method}{server}, {self.source}, {self.model}"

    @property
    def last_round(self) -> int:
        """The round after which this run continues; 0 for a new run."""
        return len(self.history)

    def lines(self) -> list[str]:
        """The run in a few lines of text."""
        size = size_of_data(self.num_train, self.num_test, self.image_shape, self.num_classes)
        clients = num_of("client", self.num_clients)
        if self.clients_per_round != self.num_clients:
            clients += f", {self.clients_per_round} a round"
        rounds = num_of("round", self.num_rounds)
        if self.last_round:
            rounds += f", {self.last_round} of them done"
        return [
            f"method {self.method}, server optimizer {self.server_optimizer}; {clients}; {rounds}",
            f"data {self.source}: {size}",
            f"model {self.model}: {self.num_parameters:,} parameters",
            *(f"workers on {text}" for text in self.workers),
            f"run directory {self.directory}",
        ]


class RunObserver(Protocol):
    """Follows one run. A subclass has only the methods that it needs."""

    def on_run_start(self, info: RunInfo) -> None:
        """All checks have passed and round 1 (or the first after a resume) begins."""
        return

    def on_replies(self, what: str, num_replies: int, num_asked: int) -> None:
        """This many of the clients asked have answered; `what`: "round 3", or its evaluation."""
        return

    def on_round(self, line: Line) -> None:
        """A round is done; `line` is its line in history.jsonl."""
        return

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """The run ended, for whatever reason; `summary` is the content of summary.json."""
        return


class RoundLog(RunObserver):
    """Logs one plain line per round: accuracy, loss, seconds and the time left.

    In a long round also a line every `NOTE_EVERY_S` on the clients that have answered.
    """

    def on_run_start(self, info: RunInfo) -> None:
        """Log what will run."""
        self.info, self.started, self.num_done = info, time.monotonic(), 0
        self.noted_at = self.started
        for line in info.lines():
            log.info("%s", line)

    def on_round(self, line: Line) -> None:
        """Log the round."""
        self.num_done += 1
        # by the mean of the rounds so far
        round_s = (time.monotonic() - self.started) / self.num_done
        seconds_left = round_s * (self.info.num_rounds - line["round"])
        log.info("%s", round_text(line, self.info, seconds_left))

    def on_replies(self, what: str, num_replies: int, num_asked: int) -> None:
        """Log how many clients have answered, if that was not logged for a while."""
        now = time.monotonic()
        if num_replies == 0:
            self.noted_at = now
        elif num_replies < num_asked and now - self.noted_at >= NOTE_EVERY_S:
            self.noted_at = now
            log.info("%s: %d of %d clients have answered", what, num_replies, num_asked)

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Log the warnings that the summary adds to those of the start, and the status."""
        for text in summary["warnings"]:
            if text not in self.info.warnings:
                log.warning("%s", text)
        log.info("%s", ended_text(summary))


def ended_text(summary: Mapping[str, Any]) -> str:
    """The status and whom the last round's model lacks: `finished, of 2 of 3 sites, without c`."""
    missing = summary.get("missing")
    return f"{summary['status']}, of {missing}" if missing else str(summary["status"])


def round_text(line: Line, info: RunInfo, seconds_left: float) -> str:
    """A round in one line: accuracies, loss, seconds, number of clients left out, time left."""
    parts = []
    for key, name, description in CURVES:
        if key in line and name != "worst_decile":
            model, _, where = description.partition(", ")
            parts.append(f"accuracy {100 * line[key][name]:.2f} % ({model}, {where})")
    for key, name, description in score_curves([line]):
        parts.append(f"{name} {value_in(line, key, name):.4f} ({description.partition(', ')[2]})")
    if "supervised" in line["losses"]:
        loss = line["losses"]["supervised"]
        parts.append("loss not finite" if loss is None else f"loss {loss:.4f}")
    if line["num_left_out"]:
        parts.append(f"{line['num_left_out']} left out")
    parts.append(f"{sum(line['seconds'].values()):.1f} s")
    if line["round"] < info.num_rounds:
        parts.append(f"{duration(seconds_left)} left")
    return f"round {line['round']}/{info.num_rounds}: {', '.join(parts)}"


class SummaryTable(RunObserver):
    """Prints the results as a table when the run has ended."""

    title = ""

    def on_run_start(self, info: RunInfo) -> None:
        """Remember the title."""
        self.title = info.title

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Print accuracies, time, traffic, privacy, the run directory."""
        console = Console(width=100, highlight=False)
        title = escape(self.title)
        console.print(results_table(title, "accuracy (%)", summary["results"].values(), True))
        if scores := summary.get("scores"):
            console.print(results_table("", "score", scores.values()))
        console.print(
            f"{escape(ended_text(summary))}: {num_of('round', summary['rounds'])}, "
            f"{duration(summary['seconds'])}, "
            f"{summary['seconds_per_round']:.2f} s a round, "
            f"{summary['bytes_down'] / 1e6:.1f} MB sent and "
            f"{summary['bytes_up'] / 1e6:.1f} MB received for training"
        )
        if privacy := summary["privacy"]:
            console.print(f"privacy: {privacy_text(privacy)}")
        for text in summary["warnings"]:
            console.print(f"warning: {escape(text)}", soft_wrap=True)
        console.print(f"run directory: {escape(summary['directory'])}", soft_wrap=True)


def results_table(
    title: str, head: str, rows: Iterable[Mapping[str, Any]], in_percent: bool = False
) -> Table:
    """The results of a summary under the heading `head`."""
    table = Table(title=title or None, title_justify="left")
    table.add_column(head)
    for place, row in enumerate(rows):
        what, *values = row.values()
        for name in list(row)[1:] if place == 0 else []:
            table.add_column(name, justify="right")
        shown = (f"{100 * v:.2f}" if in_percent else f"{v:.4f}" for v in values)
        table.add_row(escape(what), *shown)
    return table
