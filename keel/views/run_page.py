"""What the page of one run shows: its figures and tables, from its files as they are now."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keel.runs import RUNNING, uses
from keel.views.charts import (
    MAX_NAME,
    Curve,
    Figure,
    curves,
    heat_map,
    histogram,
    short_labels,
    stacked,
)
from keel.views.store import (
    ANYTHING,
    MAX_BYTES,
    MAX_NUMBER,
    Entry,
    History,
    last_lines,
    number,
    read_json,
    text_of,
)
from protocol.options import typed
from server_app.history import CURVES, Line, duration
from server_app.run_reader import CLIENTS_FILE, LOG_FILE, ROSTER_FILE

MAX_ROUNDS = 40  # columns of the clients' heat map
MAX_CLIENTS = 40  # its rows: the worst
MIN_HEIGHT = 320  # pixels of a chart, as in page.css
MAX_EVENTS = 200  # rows of the table of clients left out
MAX_LOG_LINES = 200  # the last
MAX_TAIL = 4 << 20  # bytes of clients.jsonl in which the last events are looked for
RECENT = 50  # rounds whose mean gives the time left
MAX_COUNT = 1 << 53  # samples that a float counts exactly
MAX_SPLIT = 250  # columns of the label distribution: with more clients, several share one
BYTES_DOWN = ("bytes_down", "evaluation_bytes_down")
BYTES_UP = ("bytes_up", "evaluation_bytes_up")
SPREAD = {
    "best client": 1.0,
    "9th decile": 0.9,
    "median": 0.5,
    "1st decile": 0.1,
    "worst client": 0.0,
}
WHOSE = {"local_global": "global model", "personal": "personal models"}


def progress(entry: Entry, reader: History) -> dict[str, Any]:
    """Rounds done and to do, faults, seconds spent and left, and last accuracies in [0, 1]."""
    lines = reader.lines
    done = lines[-1]["round"] if lines else 0
    total = int(number(entry.config.get("num-rounds")) or done or 1)
    seconds = [seconds_of(line) for line in lines]
    left = None
    if entry.state == RUNNING and seconds:
        recent = seconds[-RECENT:]
        left = duration(max(0, total - done) * sum(recent) / len(recent))
    accuracies = []
    for key, name, description in CURVES:
        points = points_of(lines, key, name)
        if points:
            best = max(value for _, value in points)
            accuracies.append((description, points[-1][1], best, points[-1][0]))
    return {
        "done": done,
        "faults": [reader.fault] if reader.fault else [],
        "total": total,
        "spent": duration(sum(seconds)),
        "left": left,
        "accuracies": accuracies,
        "sent": sum(int(number(x.get(k)) or 0) for k in BYTES_DOWN for x in lines),
        "received": sum(int(number(x.get(k)) or 0) for k in BYTES_UP for x in lines),
    }


def seconds_of(line: Line) -> float:
    """The duration of a round."""
    return sum(number(value) or 0 for value in line["seconds"].values())


def points_of(lines: Sequence[Line], key: str, name: str) -> list[tuple[int, float]]:
    """(round, value) of the rounds where it was measured and is a `number`."""
    found = []
    for line in lines:
        part = line.get(key)
        value = number(part.get(name)) if isinstance(part, dict) else None
        if value is not None:
            found.append((line["round"], value))
    return found


def curve_of(lines: Sequence[Line], key: str, name: str, text: str, factor: float = 1) -> Curve:
    """`points_of` as a curve called `text`, each value times `factor`."""
    points = points_of(lines, key, name)
    return Curve(text, [r for r, _ in points], [factor * v for _, v in points])


def main_charts(reader: History) -> dict[str, Figure]:
    """The charts that need no line as a whole."""
    lines = reader.lines
    accuracy = [curve_of(lines, *each, factor=100) for each in CURVES]
    terms = dict.fromkeys(name for line in lines for name in line["losses"])
    losses = [curve_of(lines, "losses", name, name) for name in terms]
    losses.append(curve_of(lines, "global", "loss", "global model, test set"))
    rounds = [line["round"] for line in lines]
    figures = {
        "accuracy": curves(accuracy, "round", "accuracy (%)"),
        "loss": curves(losses, "round", "loss"),
        "trouble": trouble(lines),
        "traffic": stacked(
            rounds,
            {
                "to clients": [megabytes(line, "bytes_down") for line in lines],
                "from clients": [megabytes(line, "bytes_up") for line in lines],
                "to clients, evaluation": [megabytes(x, "evaluation_bytes_down") for x in lines],
                "from clients, evaluation": [megabytes(x, "evaluation_bytes_up") for x in lines],
            },
            "round",
            "MB",
        ),
        "seconds": stacked(
            rounds,
            {
                phase: [number(line["seconds"].get(phase)) or 0 for line in lines]
                for phase in dict.fromkeys(name for line in lines for name in line["seconds"])
            },
            "round",
            "seconds",
        ),
    }
    return {name: figure for name, figure in figures.items() if figure["data"]}


def megabytes(line: Line, key: str) -> float:
    """A line's field in MB."""
    return (number(line.get(key)) or 0) / 1e6


def trouble(lines: Sequence[Line]) -> Figure:
    """How many clients each round lacked, by kind."""

    def rejected(line: Line) -> int:
        return min(int(number(line.get("rejected")) or 0), int(line["num_left_out"]))

    refused = [rejected(line) for line in lines]
    failed = [line["num_left_out"] - n for line, n in zip(lines, refused, strict=True)]
    return stacked(
        [line["round"] for line in lines],
        {
            "rejected": refused,
            "failed or no reply": failed,
            "late replies": [line["num_late"] for line in lines],
            "away or in backoff": [line["num_backed_off"] for line in lines],
            "not evaluated": [line.get("num_evaluation_left_out", 0) for line in lines],
        },
        "round",
        "clients",
    )


def events(entry: Entry, lines: Sequence[Line]) -> tuple[list[tuple[int, str, str, str]], int]:
    """(the last events: round, client, what, reason; the number of all in these lines)."""
    found: list[tuple[int, str, str, str]] = []
    kinds = ("num_left_out", "num_late", "num_backed_off", "num_evaluation_left_out")
    total = sum(line.get(kind, 0) for line in lines for kind in kinds)
    tail = last_lines(entry.directory / CLIENTS_FILE, MAX_TAIL) if total else []
    for text in reversed(tail):
        try:
            line = json.loads(text)
            number_ = line["round"]
        except ANYTHING:  # cut at its beginning, or being written
            continue
        if len(found) >= MAX_EVENTS or number_ < lines[0]["round"]:
            break
        for key, what in (("left_out", "left out"), ("evaluation_left_out", "not evaluated")):
            for client, why in line.get(key, {}).items():
                found.append((number_, text_of(client, 80), what, text_of(why)))
        for late in line["late"]:
            found.append((number_, "", "late", text_of(late)))
        for client in line["backed_off"]:
            found.append((number_, text_of(client, 80), "not sampled", "away or in backoff"))
    return found[:MAX_EVENTS], total


def client_charts(reader: History) -> dict[str, Figure]:
    """Accuracy on each client's local test part: over rounds, and how it is spread."""
    figures: dict[str, Figure] = {}
    shown = {key: rounds_shown(reader.lines, key) for key in WHOSE}
    accuracies: dict[str, dict[int, Mapping[str, float]]] = {key: {} for key in WHOSE}
    for line in reader.clients():
        for key, chosen in shown.items():
            if line["round"] in chosen:
                accuracies[key][line["round"]] = accuracies_in(line, key)
    for key, by_round in accuracies.items():
        if not by_round:
            continue
        rounds = list(by_round)
        newest: dict[str, float] = {}
        for found in by_round.values():
            newest.update(found)
        worst = sorted(newest, key=lambda client: (newest[client], client))[:MAX_CLIENTS]
        are_all = len(newest) == len(worst)
        what = "client" if are_all else f"{len(worst)} worst of {len(newest):,} clients"
        figures[f"clients-{key}"] = heat_map(
            [
                [100 * each[client] if client in each else None for each in by_round.values()]
                for client in worst
            ],
            rounds,
            worst,
            "round",
            what,
            "accuracy (%)",
        )
        figures[f"clients-{key}"]["layout"]["height"] = max(MIN_HEIGHT, 140 + 16 * len(worst))
        ascending = [sorted(each.values()) for each in by_round.values()]
        spread = [
            Curve(name, rounds, [100 * quantile(values, share) for values in ascending])
            for name, share in SPREAD.items()
        ]
        figures[f"spread-{key}"] = curves(spread, "round", "accuracy (%)")
        title = f"accuracy (%) in round {rounds[-1]}, {WHOSE[key]}"
        values = [100 * value for value in by_round[rounds[-1]].values()]
        figures[f"histogram-{key}"] = histogram(values, title, "clients")
    return figures


def quantile(ascending: Sequence[float], share: float) -> float:
    """The quantile of values in ascending order, linearly interpolated, as NumPy computes it."""
    place = share * (len(ascending) - 1)
    below = ascending[int(place)]
    return below + place % 1 * (ascending[math.ceil(place)] - below)


def rounds_shown(lines: Sequence[Line], key: str) -> set[int]:
    """The last round in which the clients' accuracies were measured, and others between."""
    measured = [line["round"] for line in lines if key in line]
    step = max(1, -(-len(measured) // MAX_ROUNDS))
    return set(measured[::-step])


def coming_charts(reader: History) -> list[str]:
    """Names of the charts that `client_charts` returns; a page leaves room for them until then."""
    keys = [key for key in WHOSE if any(key in line for line in reader.lines)]
    return [f"{kind}-{key}" for key in keys for kind in ("clients", "spread", "histogram")]


def accuracies_in(line: Line, key: str) -> Mapping[str, float]:
    """Client to accuracy in [0, 1], in a line of clients.jsonl."""
    found = line.get(key)
    if not isinstance(found, Mapping):
        return {}
    if set(map(type, found.values())) == {float} and sum(map(abs, found.values())) <= MAX_NUMBER:
        return found  # as Keel writes it; thousands are fast
    return {str(k): value for k, v in found.items() if (value := number(v)) is not None}


def label_chart(entry: Entry) -> dict[str, Figure]:
    """Samples of each class by client, from the roster; {} where label counts are withheld.

    As `data.plots.plot_label_distribution`: columns that several clients share show their mean, and
    clients are in the order of their most frequent class then.
    """
    roster = read_json(entry.directory / ROSTER_FILE, MAX_BYTES[ROSTER_FILE])
    rows = []
    for row in roster if isinstance(roster, list) else ():
        counts = row.get("label_counts") if isinstance(row, Mapping) else None
        if isinstance(counts, list) and counts:
            if set(map(type, counts)) != {int} or max(map(abs, counts)) > MAX_COUNT:
                counts = [number(c) or 0.0 for c in counts]
            rows.append((row.get("client"), counts))
    if not rows or len({len(counts) for _, counts in rows}) != 1:
        return {}
    size = -(-len(rows) // MAX_SPLIT)
    if size == 1:
        rows = sorted((text_of(client, MAX_NAME), counts) for client, counts in rows)
    else:
        rows.sort(key=lambda row: (row[1].index(max(row[1])), sum(row[1])))
    starts = range(0, len(rows), size)
    names = [client for client, _ in rows] if size == 1 else list(map(str, starts))
    means = []
    for start in starts:
        group = [counts for _, counts in rows[start : start + size]]
        means.append([sum(values) / len(group) for values in zip(*group, strict=True)])
    classes = [str(k) for k in range(len(means[0]))]
    what = "client"
    if size > 1:
        what = f"clients by most frequent class, mean of {size}"
    figure = heat_map(list(zip(*means, strict=True)), names, classes, what, "class", "samples")
    xaxis = {"type": "category", "nticks": 12, "labelalias": short_labels(names)}
    figure["layout"]["xaxis"] |= xaxis
    totals = stacked(names, {"samples": [sum(c) for c in means]}, what, "samples")
    totals["layout"]["xaxis"] |= xaxis
    totals["layout"] |= {"hovermode": "closest", "showlegend": False}
    return {"labels": figure, "totals": totals}


def pictures(entry: Entry) -> list[str]:
    """Names of the run's PNGs, relative to its directory: plain files only, links never.

    One with a character that cannot be shown, as in an address, is left out.
    """
    found = []
    for folder in ("", "diagnostics", "diagnostics-models"):
        directory = entry.directory / folder
        try:
            if folder and (directory.is_symlink() or not directory.is_dir()):
                continue
            found_here = [p for p in directory.glob("*.png") if p.is_file() and not p.is_symlink()]
            names = sorted(path.name for path in found_here if path.name.isprintable())
        except OSError:
            continue
        found += [f"{folder}/{name}" if folder else name for name in names]
    return found


def log_tail(entry: Entry) -> list[str]:
    """The last lines of the run's log."""
    lines = last_lines(entry.directory / LOG_FILE, 64 << 10)[-MAX_LOG_LINES:]
    return [text_of(line.decode(errors="replace"), 400) for line in lines]


def config_rows(entry: Entry) -> list[tuple[str, str, bool]]:
    """(key, value, whether the user set it), those that were set first."""
    rows = [
        (text_of(key, 80), text_of(typed(value)), key in entry.overrides)
        for key, value in entry.config.items()
        if key in entry.overrides or uses(entry.config, key)
    ]
    return sorted(rows, key=lambda row: (not row[2], row[0]))


def privacy_rows(entry: Entry) -> list[tuple[str, str]]:
    """The privacy budget spent, as summary.json states it."""
    privacy = entry.summary.get("privacy")
    rows: list[tuple[str, str]] = []
    if isinstance(privacy, Mapping):
        for key, value in privacy.items():
            parts = value if isinstance(value, Mapping) else {"": value}
            texts = [": ".join(filter(None, map(as_words, each))) for each in parts.items()]
            rows.append((as_words(key), "; ".join(texts)))
    return rows


def as_words(value: Any) -> str:
    """A key or a value of a summary for people: four digits, lists with commas."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(text_of, value)) or "none"
    return text_of(str(value).replace("_", " "))


class Sites:
    """What the rounds say of each site.

    last_round: the last in which it took part. reset: the last in which a reset was needed.
    trouble: of the last, (round, what, reason). away: the newest round's.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self.last_round: Counter[str] = Counter()
        self.reset: Counter[str] = Counter()
        self.trouble: dict[str, tuple[int, str, str]] = {}
        self.away: set[str] = set()
        for line in lines:
            self._add(line)

    def _add(self, line: Line) -> None:
        number_ = line["round"]
        for client in line["participants"]:
            self.last_round[client] = number_
        for key, what in (("evaluation_left_out", "not evaluated"), ("left_out", "left out")):
            for client, why in line.get(key, {}).items():
                self.trouble[client] = (number_, what, text_of(why))
        for client in line["reset_needed"]:
            self.reset[client] = number_
        self.away = set(line["backed_off"])


def site_rows(
    entry: Entry,
    reader: History,
    online: Mapping[int, str] | None,
) -> list[dict[str, str]]:
    """A row for each site of a deployment's run. online: node id to status.

    Without `online`, a site's connection is as the newest round found it.
    """
    roster = read_json(entry.directory / ROSTER_FILE, MAX_BYTES[ROSTER_FILE])
    rows = [row for row in roster if isinstance(row, Mapping)] if isinstance(roster, list) else []
    sites = Sites(reader.clients())
    found = []
    for row in rows:
        client = str(row.get("client"))
        last = sites.last_round[client]
        number_, what, why = sites.trouble.get(client, (0, "", ""))
        connected = "yes" if last else "?"
        if number_ > last:
            connected = f"{what} in round {number_}"
        if client in sites.away:
            connected = "away or in backoff"
        if online is not None:
            node = row.get("node")  # of 64 bits: more than a float has
            connected = online.get(node if isinstance(node, int) else 0, "not registered")
        needs_reset = "yes" if sites.reset[client] > last else "no"
        found.append(
            {
                "site": text_of(client, 80),
                "connected": connected,
                "last round": str(last or "–"),
                "pending reset": needs_reset,
                "keel": text_of(row.get("keel"), 40),
                "flwr, torch": text_of(row.get("versions"), 80),
                "model": text_of(row.get("model"), 60),
                "device": text_of(row.get("device") or "not reported", 80),
                "samples": f"{sum_of(row.get('label_counts')) or sum_of([row.get('num_train')]):,}",
                "last problem": f"round {number_}: {why}" if why else "",
            }
        )
    return found


def sum_of(counts: Any) -> int:
    """The sum of a list of numbers; 0 for anything else."""
    return int(sum(number(c) or 0 for c in counts)) if isinstance(counts, list) else 0


def ago(seconds: float) -> str:
    """How long ago a POSIX time was."""
    return duration(time.time() - seconds) if seconds else "–"
