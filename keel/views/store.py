"""The runs below some directories, for pages. A page reaches a run by its id, which is no path."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from keel.saved_runs import (
    SavedRun,
    is_locked,
    method_text,
    run_directories,
    setting_of,
    split_text,
)
from protocol.files import digest
from protocol.text import in_one_line
from server_app.history import curve
from server_app.run_reader import (
    CLIENTS_FILE,
    CONFIG_FILE,
    DAMAGE,
    HISTORY_FILE,
    LOCK_FILE,
    LOG_FILE,
    MANIFEST_FILE,
    ROSTER_FILE,
    SUMMARY_FILE,
)

FILES = (CONFIG_FILE, MANIFEST_FILE, SUMMARY_FILE, HISTORY_FILE)  # of a row
PAGE_FILES = (*FILES, CLIENTS_FILE, ROSTER_FILE, LOG_FILE)
ANYTHING = (OSError, *DAMAGE)  # raised by the content of a run directory
TRAFFIC = {
    "bytes_down": "to clients",
    "bytes_up": "from clients",
    "evaluation_bytes_down": "to clients, evaluation",
    "evaluation_bytes_up": "from clients, evaluation",
}
Stamp = tuple[object, ...]
Row = dict[str, Any]


class ShownRun(SavedRun):
    """A run as pages show it."""

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a round: the numbers of history.jsonl under names such as `losses/supervised`.

        MB and `spent`: megabytes sent and received, and seconds, since the beginning.
        """
        if not self.history:
            rounds = pd.Index([], name="round")
            return pd.DataFrame(index=rounds, columns=["MB", "spent"], dtype=float)
        frame = pd.json_normalize(self.history, sep="/").set_index("round")
        frame = frame.apply(pd.to_numeric, errors="coerce")
        frame["MB"] = frame.reindex(columns=list(TRAFFIC)).sum(axis="columns").cumsum() / 1e6
        frame["spent"] = part_of(frame, "seconds").sum(axis="columns").cumsum()
        return frame


def part_of(frame: pd.DataFrame, key: str) -> pd.DataFrame:
    """The columns below a key of the history's lines, by the name within."""
    found = frame.loc[:, frame.columns.str.startswith(f"{key}/")]
    return found.rename(columns=lambda name: name.removeprefix(f"{key}/"))


class Store:
    """The runs below `roots`. Each is read again once one of its files has changed."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.absolute() for root in roots]
        self._known: dict[Path, tuple[Stamp, Row]] = {}
        self._lock = threading.Lock()

    def rows(self) -> list[Row]:
        """A row for each run, the last changed first."""
        with self._lock:
            found: dict[Path, tuple[Stamp, Row]] = {}
            for root in self.roots:
                for directory in run_directories(root):
                    stamp = stamp_of(directory, FILES)
                    known_stamp, row = self._known.get(directory, ((), {}))
                    is_known = known_stamp == stamp
                    found[directory] = stamp, row if is_known else row_of(directory)
            self._known = found
            rows = [row for _, row in found.values()]
        return sorted(rows, key=lambda row: (-row["changed"], row["name"]))

    def find(self, run_id: str) -> ShownRun | None:
        """The run of this id; None if there is none (any more)."""
        for _ in range(2):
            for directory in list(self._known):
                if id_of(directory) == run_id and directory.exists():
                    return ShownRun(directory)
            self.rows()
        return None


def id_of(directory: Path) -> str:
    """A run's id, in addresses."""
    return digest(os.fsencode(directory))


def stamp_of(directory: Path, names: Sequence[str]) -> Stamp:
    """Changes with these files of a run, and when its process begins or ends."""
    stamp: list[object] = [is_locked(directory / LOCK_FILE)]
    for name in names:
        with suppress(OSError):
            about = os.stat(directory / name)
            stamp += [name, about.st_mtime_ns, about.st_size]
    return tuple(stamp)


def row_of(directory: Path) -> Row:
    """What the table of runs shows of one. A run that cannot be read has its fault as the state."""
    run = SavedRun(directory)
    row: Row = dict.fromkeys(("method", "data", "split", "model", "clients", "seed"), "?")
    row |= {"done": 0, "total": "?", "accuracy": None, "best": None, "setting": ""}
    row |= {"id": id_of(directory), "name": in_one_line(run.name, 120), "changed": run.last_change}
    try:
        row["state"] = in_one_line(run.state, 2000)  # its end says what to do
        if not run.fault:
            row |= fields_of(run)
    except ANYTHING as error:
        row["state"] = f"unreadable: {in_one_line(repr(error), 200)}"
    return row


def fields_of(run: SavedRun) -> Row:
    """The part of a row that comes from the run's files."""
    config, summary = run.config, run.summary
    accuracies = [value for _, value in curve(run.history, *run.headline)]
    texts = {
        "method": method_text(config),
        "data": run.source,
        "split": "by site" if run.has_sites else split_text(config),
        "model": config["model"],
        "clients": summary.get("clients") or config["num-clients"] or "?",
        "total": config["num-rounds"],
        "seed": config["seed"],
    }
    return {key: in_one_line(value, 60) for key, value in texts.items()} | {
        "done": run.last_round,
        "accuracy": accuracies[-1] if accuracies else None,
        "best": max(accuracies, default=None),
        "setting": digest(repr(sorted(setting_of(run).items())).encode(errors="replace")),
    }
