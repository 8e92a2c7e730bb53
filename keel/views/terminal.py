"""One run in a terminal, live: rounds, curves as sparklines, clients at work."""

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keel.runs import COLOURS, RUNNING
from keel.tables import terminal_console
from keel.views.run_page import events, points_of, progress
from keel.views.store import Entry, History, Store, last_lines, text_of
from protocol.text import num_of
from server_app.history import CURVES, Line
from server_app.run_reader import AUDIT_FILE, CONFIG_FILE

POLL_S = 0.5
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH, MIN_WIDTH = 50, 12  # characters of a sparkline
BESIDE = 52  # columns that the longest name of a curve, its last value and the gaps take
MAX_CLIENTS = 12  # named
MAX_EVENTS = 5
TAIL_BYTES = 1 << 20  # of the audit log: a round of 10,000 clients has 150 kB


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """A character for each value, or for the mean of several; the lowest is ▁, the highest █."""
    if not values:
        return ""
    parts = min(width, len(values))
    edges = [i * len(values) // parts for i in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def clients_at_work(directory: Path, done: int) -> tuple[int, list[str]]:
    """(the round under way, its cohort), from the audit log; (0, []) between rounds."""
    for text in reversed(last_lines(directory / AUDIT_FILE, TAIL_BYTES)):
        try:
            line = json.loads(text)
            if line["event"] == "sent" and line["kind"] == "train":
                number, clients = int(line["round"]), [text_of(c, 40) for c in line["clients"]]
                return (number, clients) if number > done else (0, [])
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return 0, []


def frame(entry: Entry, reader: History, width: int) -> Group:
    """The run as it is now, for a terminal of `width` columns."""
    lines, now = reader.lines, progress(entry, reader)
    state = entry.state
    if entry.problem:
        return Group(Text(f"{entry.name}  {state}", "red"))
    about = ", ".join(
        text_of(each, 60)
        for each in (entry.method, entry.source, entry.split, entry.config.get("model", "?"))
    )
    name = Text(f"{entry.name}  ", "bold")
    name.append(text_of(state), COLOURS.get(state, "red"))
    head = [name, Text(about)]
    left = f", {now['left']} left" if now["left"] else ""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        f"round {now['done']}/{now['total']}",
        ProgressBar(total=now["total"], completed=min(now["done"], now["total"]), width=30),
        f"{now['spent']}{left}",
    )
    curves = Table.grid(padding=(0, 2))
    num_blocks = max(MIN_WIDTH, min(WIDTH, width - BESIDE))
    for what, points in curves_of(lines):
        values = [value for _, value in points]
        digits = ".2f" if what.endswith("(%)") else ".4g"
        curves.add_row(what, sparkline(values, num_blocks), f"{values[-1]:{digits}}")
    body: list[Any] = [*head, bar, *([curves] if curves.row_count else [])]
    body += [Text(fault, style="red") for fault in now["faults"][:3]]
    number, clients = clients_at_work(entry.directory, now["done"]) if state == RUNNING else (0, [])
    if clients:
        more = f" and {len(clients) - MAX_CLIENTS} more" if len(clients) > MAX_CLIENTS else ""
        names = ", ".join(clients[:MAX_CLIENTS])
        body.append(Text(f"round {number}, {num_of('client', clients)} at work: {names}{more}"))
    found, total = events(entry, lines[-20:])
    for number, client, what, reason in found[:MAX_EVENTS]:
        whom = " ".join(filter(None, (client, what)))
        body.append(Text(f"round {number}: {whom}: {reason}", "yellow"))
    if total > MAX_EVENTS:
        body.append(Text(f"{total - MAX_EVENTS} more in the last 20 rounds", "yellow"))
    return Group(*body)


def curves_of(lines: Sequence[Line]) -> list[tuple[str, list[tuple[int, float]]]]:
    """(what, points) of each accuracy in percent and each loss term."""
    found = []
    for key, name, description in CURVES:
        points = [(r, 100 * v) for r, v in points_of(lines, key, name)]
        found.append((f"{description} (%)", points))
    for term in dict.fromkeys(name for line in lines[-1:] for name in line["losses"]):
        found.append((f"loss: {text_of(term, 40)}", points_of(lines, "losses", term)))
    return [(what, points) for what, points in found if points]


def watch_run(directory: Path, once: bool = False, console: Console | None = None) -> None:
    """Show the run until it ends; once where the output is no terminal."""
    console = console or terminal_console()
    store = Store([directory])
    # a directory in the run may be one too
    ids = [entry.id for entry in store.runs().values() if entry.directory == store.roots[0]]
    if not ids:
        raise ValueError(
            f"{CONFIG_FILE} in {directory} is not a plain file, so this is not a run directory"
        )

    def now() -> tuple[Entry | None, Group]:
        entry = store.find(ids[0])
        if entry is None:
            return None, Group(f"{text_of(directory)} is gone")
        return entry, frame(entry, store.history(entry), console.width)

    entry, shown = now()
    if once or not console.is_terminal:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        try:
            while entry and entry.state == RUNNING:
                time.sleep(POLL_S)
                entry, shown = now()
                live.update(shown, refresh=True)
            live.update(now()[1], refresh=True)  # it may have ended after it was looked at
        except KeyboardInterrupt:
            pass
