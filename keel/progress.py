"""Progress of a run in a terminal: the plan, a line per round, the time left, the results.

A terminal also shows a bar below the lines: how many clients have answered, and the time left.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from keel.saved_runs import SavedRun
from protocol.text import num_of, size_of_data
from server_app.history import CURVES, duration, score_curves, value_in

RECORD = "with cuda-graphs=true, small networks train several times as fast"
SHORT = {"global": "accuracy", "local_global": "on clients", "personal": "personal"}


class Terminal(logging.Handler):
    """A `RunObserver` that prints, and a handler that prints Keel's warnings above the bar."""

    def __init__(self, num_rounds: int, quiet: bool = False) -> None:
        super().__init__(logging.WARNING)
        self.console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self.num_rounds = num_rounds
        self.shown: dict[str, str] = {}  # rows of the plan, by label
        self.directory: Path | None = None
        self.last_round = self.num_done = 0
        self.created = self.begun = time.monotonic()
        self.summary: Mapping[str, Any] = {}
        self.warned: set[str] = set()  # shown since the last round
        self.resume_command = ""  # of a resumed run, or of one on a deployment
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task("starting", total=num_rounds, left="")

    def __enter__(self) -> "Terminal":
        """Show the bar and Keel's warnings."""
        logging.getLogger("keel").addHandler(self)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        self.bar.stop()
        logging.getLogger("keel").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning, but not a client's error that the server's line repeats."""
        is_error = record.name == "keel.client" and record.levelno >= logging.ERROR
        if is_error and not getattr(record, "is_withheld", False):
            return
        self.warned.add(record.getMessage())
        self.print(f"[yellow]{record.levelname.lower()}:[/] {escape(record.getMessage())}")

    def print(self, line: str, markup: bool = True) -> None:
        """Print a line above the bar."""
        self.console.print(line, markup=markup)

    def plan(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the plan: (label, text)."""
        for label, text in rows:
            self.row(label, text)

    def row(self, label: str, text: str) -> None:
        """Print a row of the plan."""
        self.print(f"[bold]{label:<10}[/]  {escape(text)}")

    def phase(self, text: str) -> None:
        """Name what the bar is waiting for."""
        self.bar.update(self.task, description=text)

    def begin(self, directory: Path, last_round: int) -> None:
        """Round `last_round` + 1 begins."""
        self.directory, self.last_round = directory, last_round
        self.begun = time.monotonic()
        self.bar.update(self.task, description="training", completed=last_round)
        self.row("directory", str(directory))

    def on_run_start(self, info: Any) -> None:
        """Print the sizes that the plan could not, then begin."""
        if " test image" not in self.shown.get("data", ""):
            numbers = info.num_train, info.num_test, info.image_shape, info.num_classes
            self.row("images", size_of_data(*numbers))
        self.row("parameters", f"{info.num_parameters:,}")
        if info.device != "cpu":
            are_eager = info.device.startswith("cuda") and not info.config["cuda-graphs"]
            self.row("device", f"{info.device}; {RECORD}" if are_eager else info.device)
        for text in info.workers:
            self.row("workers", text)
        self.begin(info.directory, info.last_round)

    def on_replies(self, what: str, num_replies: int, num_asked: int) -> None:
        """Show how many clients have answered."""
        self.phase(f"{what.removeprefix('the ')}: {num_replies} of {num_of('client', num_asked)}")

    def on_round(self, line: Mapping[str, Any]) -> None:
        """Print the round's line and the time left, from the mean of the rounds so far."""
        self.last_round, self.num_done = line["round"], self.num_done + 1
        self.warned.clear()
        elapsed_s = time.monotonic() - self.begun
        left = duration(elapsed_s / self.num_done * (self.num_rounds - self.last_round)) + " left"
        is_last = self.last_round >= self.num_rounds
        shown = "" if is_last else left
        self.bar.update(self.task, description="training", completed=self.last_round, left=shown)
        self.print(round_line(line, self.num_rounds, shown))

    def on_run_end(self, summary: Mapping[str, Any]) -> None:
        """Store the summary for `finished`."""
        self.summary = summary

    def finished(self) -> None:
        """Print the results and the commands that use the run."""
        for row in self.summary.get("results", {}).values():
            best, final = 100 * row["best"], 100 * row["final"]
            self.print(f"[bold]{row['what']}[/]: {final:.2f} %, best {best:.2f} %")
        for text in self.summary.get("warnings", []):
            if text not in self.warned:
                self.print(f"[yellow]warning[/]: {escape(text)}")
        if self.directory:
            name = escape(SavedRun(self.directory).reference)
            elapsed = duration(time.monotonic() - self.created)
            missing = self.summary.get("missing", "")
            of = f", of {escape(missing)}" if missing else ""
            self.print(
                f"[green]finished[/] in {elapsed}{of}; see keel status, compare, predict, export "
                f"{name}"
            )

    def stopped(self) -> None:
        """Print how to continue an interrupted run."""
        if self.directory:
            name = escape(SavedRun(self.directory).reference)
            done = f"[yellow]stopped[/] after round {self.last_round}"
            self.print(f"{done}; to continue: keel resume {name}")
        elif self.resume_command:
            self.print(f"[yellow]stopped[/]; to continue: {escape(self.resume_command)}")
        else:
            self.print("[yellow]stopped[/] before round 1: there is no run to resume")

    def failed(self) -> None:
        """Print how to continue a run that failed, if it has done a round."""
        name = SavedRun(self.directory).reference if self.directory else ""
        command = f"keel resume {name}" if name else self.resume_command
        if command and self.last_round:
            done = f"[red]failed[/] after round {self.last_round}"
            self.print(f"{done}; to continue once its cause is removed: {escape(command)}")


def round_line(line: Mapping[str, Any], num_rounds: int, left: str) -> str:
    """A round in aligned columns: accuracies, loss, seconds, clients left out, time left."""
    width = len(str(num_rounds))
    columns = [f"round {line['round']:>{width}}/{num_rounds}"]
    for key, name, _ in CURVES:
        if key in line and name != "worst_decile":
            columns.append(f"{SHORT[key]} {100 * line[key][name]:6.2f} %")
    for key, name, _ in score_curves([line]):
        whose = "" if key == "global" else f"{SHORT[key]} "
        columns.append(f"{whose}{name} {value_in(line, key, name):.4f}")
    if "supervised" in line["losses"]:  # not if it is withheld
        loss = line["losses"]["supervised"]
        columns.append("[red]loss not finite[/]" if loss is None else f"loss {loss:.4f}")
    columns.append(f"{sum(line['seconds'].values()):5.1f} s")
    if line["num_left_out"]:
        columns.append(f"[yellow]{line['num_left_out']} left out[/]")
    return "   ".join([*columns, left] if left else columns)
