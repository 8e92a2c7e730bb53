"""What a person sees of a run: a line a round, two pictures, a table, summary.json."""

import json
import logging
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from client_app.method import Method
from data.plots import plot_label_distribution
from data.sources import Source
from protocol.config import RoundsConfig, RunConfig
from protocol.files import write_atomically
from protocol.messages import RosterEntry
from server_app.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger("keel.server")

# key in history.jsonl, key within it, words
curves = (
    ("global", "accuracy", "global model, test set"),
    ("local_global", "mean", "global model, clients' test parts"),
    ("local_global", "worst_decile", "global model, worst tenth of clients"),
    ("personal", "mean", "personal models, clients' test parts"),
    ("personal", "worst_decile", "personal models, worst tenth of clients"),
)
with_clients = ("local_global", "personal")  # hold each client's accuracy in "clients"


def check_tensorboard(rounds: RoundsConfig) -> None:
    """ValueError, one line, where events are asked for and cannot be written."""
    if rounds.tensorboard and find_spec("tensorboard") is None:
        raise ValueError(
            "tensorboard = true: the package tensorboard is not installed: pip install "
            "tensorboard (Keel's extra of that name), or leave the key out"
        )


class Reporter:
    """Follows one run; `history` holds the rounds' lines, those of before a resume included.

    Without what they say of single clients: history.jsonl has that, memory would grow with it.
    """

    def __init__(
        self,
        folder: RunDirectory,
        config: RunConfig,
        method: Method,
        source: Source,
        roster: Sequence[RosterEntry],
    ) -> None:
        self.folder, self.config, self.method = folder, config, method
        self.history: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.rounds_before = 0
        self.is_finished = False
        self.events: SummaryWriter | None = None
        clients = sorted(roster, key=lambda entry: entry.client)
        plot_label_distribution(
            [entry.label_counts for entry in clients],
            source.class_names,
            folder.path / "labels.png",
        )

    def begin(self, history: list[dict[str, Any]], privacy: dict[str, Any] | None) -> None:
        """The rounds start now, after those in `history`."""
        self.history = [without_clients(line) for line in history]
        self.rounds_before = len(history)
        self.started = time.monotonic()
        log.info("run folder: %s", self.folder.path)
        self.write_summary("running", privacy)
        if self.config.rounds.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            last = history[-1]["round"] if history else 0
            self.events = SummaryWriter(
                str(self.folder.path / "tensorboard"), purge_step=last + 1 if last else None
            )

    def write_summary(self, status: str, privacy: dict[str, Any] | None) -> dict[str, Any]:
        """Write summary.json."""
        summary = self.summary(status, privacy)
        text = json.dumps(summary, indent=2)
        write_atomically(self.folder.path / "summary.json", text.encode())
        return summary

    def stopped(self, status: str, privacy: dict[str, Any] | None) -> None:
        """The process ends before the run does."""
        if not self.is_finished:
            self.write_summary(status, privacy)
            log.info("%s after round %d", status, len(self.history))

    def round_done(self, line: dict[str, Any]) -> None:
        """One line in the log: round, accuracy, time gone, time left."""
        self.history.append(without_clients(line))
        if self.events:
            for name, value in scalars(line).items():
                self.events.add_scalar(name, value, line["round"])
            self.events.flush()
        gone = time.monotonic() - self.started
        done, total = line["round"], self.config.rounds.num_rounds
        left = gone / (len(self.history) - self.rounds_before) * (total - done)
        loss = line["losses"].get("supervised")
        found = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
        for key, name, words in curves:
            if key in line and name != "worst_decile":
                model, _, where = words.partition(", ")
                found.append(f"{model} {100 * line[key][name]:.2f} % ({where})")
        if line["left_out"]:
            found.append(f"{len(line['left_out'])} left out")
        log.info(
            "round %d/%d: %s; %s gone, %s left",
            *(done, total, ", ".join(found), clock(gone), clock(left)),
        )

    def finish(self, status: str, privacy: dict[str, Any] | None) -> None:
        """Write accuracy.png and summary.json, print the table and the folder's path."""
        summary = self.write_summary(status, privacy)
        self.is_finished = True
        log.info("%s", status)
        if self.events:
            self.events.close()
        plot_accuracy(self.history, self.title(), self.folder.path / "accuracy.png")
        print_table(summary, self.title())

    def title(self) -> str:
        """The run in a few words."""
        rounds, data = self.config.rounds, self.config.data
        server = "" if rounds.server_optimizer == "fedavg" else f" + {rounds.server_optimizer}"
        return f"{rounds.method}{server}, {data.source}, {self.config.model.model}"

    def summary(self, status: str, privacy: dict[str, Any] | None) -> dict[str, Any]:
        """Final, best, and mean and median over the last evaluations, of every curve."""
        k = self.config.rounds.last_rounds
        results: dict[str, Any] = {}
        for key, name, words in curves:
            values = [line[key][name] for line in self.history if key in line]
            if values:
                results[f"{key}.{name}"] = {
                    "what": words,
                    "final": values[-1],
                    "best": max(values),
                    f"mean of last {min(k, len(values))}": statistics.fmean(values[-k:]),
                    f"median of last {min(k, len(values))}": statistics.median(values[-k:]),
                    "EMA 0.9": moving_average(values),
                }
        rounds = len(self.history)
        seconds = sum(sum(line["seconds"].values()) for line in self.history)
        return {
            "status": status,
            "folder": str(self.folder.path),
            "method": self.config.rounds.method,
            "rounds": rounds,
            "seconds": round(seconds, 2),
            "seconds_per_round": round(seconds / max(1, rounds), 4),
            "bytes_down": sum(line["bytes_down"] for line in self.history),
            "bytes_up": sum(line["bytes_up"] for line in self.history),
            "left_out": sum(len(line["left_out"]) for line in self.history),
            "refused": sum(line["refused"] for line in self.history),
            "results": results,
            "privacy": privacy,
        }


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """A round's figures by the names that TensorBoard shows them under."""
    found = {f"accuracy/{key}.{name}": line[key][name] for key, name, _ in curves if key in line}
    found |= {f"loss/{name}": value for name, value in line["losses"].items() if value is not None}
    found |= {f"seconds/{name}": value for name, value in line["seconds"].items()}
    found |= {name: line[name] for name in ("bytes_down", "bytes_up", "refused")}
    return found | {"left_out": len(line["left_out"])}


def without_clients(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the history less each client's accuracy and the names of who took part."""
    return {
        key: {n: v for n, v in value.items() if n != "clients"} if key in with_clients else value
        for key, value in line.items()
        if key != "participants"
    }


def moving_average(values: Sequence[float], decay: float = 0.9) -> float:
    """The exponential moving average at the last evaluation, from the first: FedRCL's figure."""
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    return average


def clock(seconds: float) -> str:
    """12 s, 3 min 4 s, 2 h 5 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600} h {s % 3600 // 60} min"


def plot_accuracy(history: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """The accuracy curves over rounds as a PNG; rounds without an evaluation have no point."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for key, name, words in curves:
        points = [(line["round"], 100 * line[key][name]) for line in history if key in line]
        if points:
            rounds, values = zip(*points, strict=True)
            axes.plot(rounds, values, label=words, marker="o" if len(points) < 40 else None, ms=3)
    axes.set(xlabel="round", ylabel="accuracy (%)", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(frameon=False)
    part = path.with_suffix(".part.png")
    figure.savefig(part, dpi=150)
    part.replace(path)


def print_table(summary: dict[str, Any], title: str) -> None:
    """The summary for a person, with the absolute path of the run's folder."""
    console = Console(width=100, highlight=False)
    table = Table(title=title, title_justify="left")
    table.add_column("accuracy (%)")
    rows = list(summary["results"].values())
    for name in list(rows[0])[1:] if rows else []:
        table.add_column(name, justify="right")
    for row in rows:
        what, *values = row.values()
        table.add_row(what, *(f"{100 * value:.2f}" for value in values))
    console.print(table)
    console.print(
        f"{summary['status']}: {summary['rounds']} rounds, {clock(summary['seconds'])}, "
        f"{summary['seconds_per_round']:.2f} s a round, "
        f"{summary['bytes_down'] / 1e6:.1f} MB sent, {summary['bytes_up'] / 1e6:.1f} MB received"
    )
    if summary["privacy"]:
        one, all_ = summary["privacy"]["per_release"], summary["privacy"]["composed"]
        console.print(
            f"privacy: epsilon {one['epsilon']}, delta {one['delta']} a release; composed over "
            f"{summary['privacy']['releases']} releases: epsilon {all_['epsilon']:.2f}, "
            f"delta {all_['delta']}"
        )
    console.print(f"folder: {summary['folder']}", soft_wrap=True)
