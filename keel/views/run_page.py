"""What the page of one run shows: its charts and tables, from its files as they are now."""

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from keel.saved_runs import RUNNING, method_text, split_text, uses
from keel.views.charts import (
    Curve,
    Figure,
    curves,
    heat_map,
    histogram,
    stacked,
)
from keel.views.store import TRAFFIC, ShownRun, part_of
from protocol.config_keys import names_in
from protocol.options import typed
from protocol.text import in_one_line
from server_app.history import CURVES, HEADLINE, Line, duration, privacy_text, score_curves
from server_app.history import WHOSE as SCORED
from server_app.participation import Participation
from server_app.run_reader import LOG_FILE, ROSTER_FILE

MAX_ROUNDS = 40  # columns of the clients' heat map
MAX_CLIENTS = 40  # its rows: the worst
MAX_EVENTS = 200  # rows of the table of clients left out
MAX_LOG_LINES, LOG_BYTES = 200, 64 << 10  # the last
MAX_CLASSES = 50  # of a confusion matrix
RECENT = 50  # rounds whose mean gives the time left
SENT = ["bytes_down", "evaluation_bytes_down"]
RECEIVED = ["bytes_up", "evaluation_bytes_up"]
TROUBLE = {
    "rejected": "rejected",
    "failed": "failed or no reply",
    "num_backed_off": "away or in backoff",
    "num_evaluation_left_out": "not evaluated",
}
EVENTS = {"left_out": "left out", "evaluation_left_out": "not evaluated"}
SPREAD = {"best client": 1, "9th decile": 0.9, "median": 0.5, "1st decile": 0.1, "worst client": 0}
WHOSE = {"local_global": "global model", "personal": "personal models"}


def columns_of(frame: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """These columns, renamed; 0 where there are none."""
    return frame.reindex(columns=list(names), fill_value=0).rename(columns=names)


def headline(frame: pd.DataFrame) -> pd.Series:
    """The accuracy that stands for a run, in percent, by round."""
    columns = [f"{key}/{name}" for key, name in HEADLINE if f"{key}/{name}" in frame]
    return 100 * frame[columns[0]].dropna() if columns else pd.Series(dtype=float)


def accuracies(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Description to accuracies in percent by round, of each of CURVES that was measured."""
    found = {text: f"{key}/{name}" for key, name, text in CURVES}
    return {text: 100 * frame[name].dropna() for text, name in found.items() if name in frame}


def curve_of(name: str, points: pd.Series) -> Curve:
    """A series by round as a curve, without what is missing."""
    points = points.dropna()
    return Curve(name, list(points.index), list(points))


def status(run: ShownRun) -> dict[str, Any]:
    """The facts at the top of the page."""
    config, frame = run.config, run.frame
    done, total = run.last_round, config["num-rounds"]
    seconds = part_of(frame, "seconds").sum(axis="columns")
    left = None
    if run.state == RUNNING and done:
        left = duration(max(0, total - done) * seconds.tail(RECENT).mean())
    rows = [
        (text, f"{points.iloc[-1]:.2f}", f"{points.max():.2f}", points.index[-1])
        for text, points in accuracies(frame).items()
        if len(points)
    ]
    privacy = run.summary.get("privacy")
    split = "by site" if run.has_sites else split_text(config)
    return {
        "facts": [
            method_text(config),
            run.source,
            split,
            config["model"],
            f"seed {config['seed']}",
        ],
        "num_clients": run.summary.get("clients"),
        "done": done,
        "total": total,
        "spent": duration(seconds.sum()),
        "left": left,
        "sent": megabytes(frame, SENT),
        "received": megabytes(frame, RECEIVED),
        "accuracies": rows,
        "privacy": privacy_text(privacy) if privacy else "",
        "warnings": [in_one_line(text, 400) for text in run.summary.get("warnings", ())],
    }


def megabytes(frame: pd.DataFrame, columns: list[str]) -> str:
    """The sum of these columns of bytes."""
    return f"{frame.reindex(columns=columns).sum().sum() / 1e6:,.1f} MB"


def main_charts(run: ShownRun) -> dict[str, Figure]:
    """The charts of history.jsonl."""
    frame = run.frame
    losses = [curve_of(name, points) for name, points in part_of(frame, "losses").items()]
    if "global/loss" in frame:
        losses.append(curve_of("global model, test set", frame["global/loss"]))
    lost = frame.reindex(columns=["num_left_out", "rejected"], fill_value=0)
    frame = frame.assign(failed=lost["num_left_out"] - lost["rejected"])
    figures = {
        "accuracy": curves(
            [curve_of(*each) for each in accuracies(frame).items()], "round", "accuracy (%)"
        ),
        "loss": curves(losses, "round", "loss"),
        **score_charts(run),
        **confusion_charts(run),
        "trouble": stacked(columns_of(frame, TROUBLE), "clients"),
        "traffic": stacked(columns_of(frame, TRAFFIC) / 1e6, "MB"),
        "seconds": stacked(part_of(frame, "seconds"), "seconds"),
    }
    return {name: figure for name, figure in figures.items() if figure["data"]}


def confusion_charts(run: ShownRun) -> dict[str, Figure]:
    """The confusion matrix of the best round, unless there are too many classes to see."""
    found = run.confusion("best")
    if found is None or len(found[1]) > MAX_CLASSES:
        return {}
    _, classes, matrix = found
    table = pd.DataFrame(matrix, index=classes, columns=classes)
    return {"confusion": heat_map(table, "predicted class", "label", "images")}


def score_names(run: ShownRun) -> list[str]:
    """The names of the scores of `metrics`."""
    return [name.rpartition(":")[2] for name in names_in(str(run.config.get("metrics", "")))]


def score_charts(run: ShownRun) -> dict[str, Figure]:
    """A chart for each score of `metrics`, with a curve for each kind of model."""
    found: dict[str, list[Curve]] = {}
    for key, name, _ in score_curves(run.history):
        column = run.frame[f"{key}/scores/{name}"]
        found.setdefault(name, []).append(curve_of(SCORED[key], column))
    return {f"score {name}": curves(lines, "round", name) for name, lines in found.items()}


@dataclass
class OfClients:
    """What clients.jsonl says.

    accuracies: key of WHOSE to a column for each of up to MAX_ROUNDS rounds, a row for each client.
    events: the last (round, client, what, reason). last_round, reset: client to the last round in
    which it took part, or needed a reset. problem: client to its last (round, what, reason).
    away: clients that were not sampled in the newest round, for they were away or in backoff.
    """

    accuracies: dict[str, pd.DataFrame] = field(default_factory=dict)
    events: deque[tuple[int, str, str, str]] = field(
        default_factory=lambda: deque(maxlen=MAX_EVENTS)
    )
    last_round: dict[str, int] = field(default_factory=dict)
    reset: dict[str, int] = field(default_factory=dict)
    problem: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)
    participation: Participation = field(default_factory=Participation)

    def add(self, line: Line) -> None:
        """One round."""
        server_round = line["round"]
        self.participation.add(line)
        self.last_round |= dict.fromkeys(line["participants"], server_round)
        self.reset |= dict.fromkeys(line["reset_needed"], server_round)
        self.away = line["backed_off"]
        for key, what in EVENTS.items():
            for client, reason in line.get(key, {}).items():
                self.problem[client] = server_round, what, reason
                self.events.append((server_round, client, what, reason))
        for client in self.away:
            self.events.append((server_round, client, "not sampled", "away or in backoff"))


def of_clients(run: ShownRun) -> OfClients:
    """Read clients.jsonl once."""
    found, shown = OfClients(), {}
    for key in WHOSE:
        measured = [line["round"] for line in run.history if key in line]
        step = -(-len(measured) // MAX_ROUNDS) or 1
        shown[key] = set(measured[::-step])  # with the last
    columns: dict[str, dict[int, Mapping[str, float]]] = {key: {} for key in WHOSE}
    for line in run.clients():
        found.add(line)
        for key, rounds in shown.items():
            if line["round"] in rounds and line.get(key):
                columns[key][line["round"]] = line[key]
    found.accuracies = {key: 100 * pd.DataFrame(by) for key, by in columns.items() if by}
    return found


def client_charts(found: OfClients) -> dict[str, Figure]:
    """Accuracy on each client's local test part: over rounds, and how it is spread."""
    figures: dict[str, Figure] = {}
    for key, table in found.accuracies.items():
        newest = table.ffill(axis="columns").iloc[:, -1]
        worst = newest.sort_values(kind="stable").index[:MAX_CLIENTS]
        what = "client"
        if len(worst) < len(table):
            what = f"{len(worst)} worst of {len(table):,} clients"
        spread = [curve_of(name, table.quantile(share)) for name, share in SPREAD.items()]
        title = f"accuracy (%) in round {table.columns[-1]}, {WHOSE[key]}"
        height = max(320, 140 + 16 * len(worst))
        figures |= {
            f"spread-{key}": curves(spread, "round", "accuracy (%)"),
            f"histogram-{key}": histogram(table.iloc[:, -1].dropna(), title, "clients"),
            f"clients-{key}": heat_map(
                table.loc[worst], "round", what, "accuracy (%)", height=height
            ),
        }
    return figures


def roster_of(run: ShownRun) -> list[dict[str, Any]]:
    """A row for each client; [] where there are too many to be listed."""
    path = run.directory / ROSTER_FILE
    found = json.loads(path.read_bytes()) if path.exists() else []
    return found if isinstance(found, list) else []


def label_chart(run: ShownRun) -> dict[str, Figure]:
    """Samples of each class by client; {} where label counts are withheld."""
    counts = {row["client"]: row.get("label_counts") for row in roster_of(run)}
    if not counts or not all(counts.values()):
        return {}
    return {"labels": heat_map(pd.DataFrame(counts), "client", "class", "samples")}


def site_rows(
    run: ShownRun, found: OfClients, online: Mapping[int, str] | None
) -> list[dict[str, str]]:
    """A row for each site of a deployment's run. online: node id to status.

    Without `online`, a site's connection is as the newest round found it.
    """
    rows = []
    rows_of_clients = {row["client"]: row for row in found.participation.rows()}
    for entry in roster_of(run) if run.has_sites else []:
        client = entry["client"]
        last = found.last_round.get(client, 0)
        number, what, reason = found.problem.get(client, (0, "", ""))
        measured = rows_of_clients.get(client, {})
        connected = "yes" if last else "?"
        if number > last:
            connected = f"{what} in round {number}"
        if client in found.away:
            connected = "away or in backoff"
        if online is not None:
            connected = online.get(entry["node"], "not registered")
        samples = sum(entry.get("label_counts") or [entry.get("num_train") or 0])
        rows.append(
            {
                "site": client,
                "connected": connected,
                "last round": str(last or "–"),
                "pending reset": "yes" if found.reset.get(client, 0) > last else "no",
                "keel": entry.get("keel"),
                "flwr, torch": entry.get("versions"),
                "model": entry.get("model"),
                "device": entry.get("device") or "not reported",
                "samples": f"{samples:,}",
                **{
                    key: "–" if measured.get(key) is None else f"{measured[key]:.3g}"
                    for key in ("seconds", "loss", "norm", "cosine")
                },
                "notes": "; ".join(measured.get("notes", ())),
                "last problem": f"round {number}: {reason}" if reason else "",
            }
        )
    return [{name: in_one_line(cell, 200) for name, cell in row.items()} for row in rows]


def pictures(run: ShownRun) -> list[str]:
    """Names of the run's PNGs, relative to its directory."""
    folders = [run.directory / name for name in (".", "diagnostics", "diagnostics-models")]
    found = [path for folder in folders for path in sorted(folder.glob("*.png"))]
    return [str(path.relative_to(run.directory)) for path in found if path.name.isprintable()]


def log_tail(run: ShownRun) -> list[str]:
    """The last lines of the run's log."""
    path = run.directory / LOG_FILE
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [in_one_line(line, 400) for line in lines[-MAX_LOG_LINES:]]


def config_rows(run: ShownRun) -> list[tuple[str, str, bool]]:
    """(key, value, whether the user set it), those that were set first."""
    rows = [
        (key, in_one_line(typed(value)), key in run.overrides)
        for key, value in run.config.items()
        if key not in run.unused and uses(run.config, key)
    ]
    return sorted(rows, key=lambda row: (not row[2], row[0]))


def ago(seconds: float) -> str:
    """How long ago a POSIX time was."""
    return duration(time.time() - seconds) if seconds else "–"
