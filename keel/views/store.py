"""The runs below some directories, for pages: found, read and cached, never written.

A run directory may hold anything: what is damaged, too large, or no plain file inside the directory
is named in the run's `problem`. A page reaches a run by its id, which is a digest and no path.
"""

import json
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from keel.runs import (
    INTERRUPTED,
    RUNNING,
    STARTING,
    UNREADABLE,
    SavedRun,
    is_locked,
    short_source,
    uses,
)
from protocol.files import digest
from protocol.text import in_one_line
from server_app.history import HEADLINE, Line, curve
from server_app.run_reader import (
    AUDIT_FILE,
    CLIENTS_FILE,
    CONFIG_FILE,
    DAMAGE,
    HISTORY_FILE,
    LOCK_FILE,
    LOG_FILE,
    MANIFEST_FILE,
    ROSTER_FILE,
    SUMMARY_FILE,
    HistoryFollower,
    read_lines,
)

READ_FILES = (CONFIG_FILE, SUMMARY_FILE, HISTORY_FILE, MANIFEST_FILE)  # by `read_entry`
FILES = (*READ_FILES, CLIENTS_FILE, ROSTER_FILE, LOG_FILE, AUDIT_FILE, LOCK_FILE)
MAX_BYTES = {CONFIG_FILE: 1 << 20, SUMMARY_FILE: 4 << 20, ROSTER_FILE: 128 << 20}
MAX_BYTES[MANIFEST_FILE] = MAX_BYTES[ROSTER_FILE]
MAX_NUMBER = 1e100  # of larger ones, sums and squares may be infinite
MAX_STATE = 2000  # characters: a failed run's reason names what to do at its end
MAX_READERS = 128  # histories held at a time
# runs; KEEL_HOME; an experiments folder; several of those
PATTERNS = ("*", "runs/*", "runs/*/*", "*/runs/*/*")
NOT_A_SETTING = {
    "seed",
    "output-dir",
    "run-name",
    "data-dir",
    "resume",
    "tracker",
}
ANYTHING = (OSError, *DAMAGE)  # raised by the content of a file
text_of = in_one_line  # any value as one printable line
Stamp = tuple[tuple[int, ...], str]  # of a run's files, as `Store._stamp` returns it


@dataclass(frozen=True)
class Entry:
    """A run as pages show it. problem: why it cannot be read; then most fields are empty."""

    id: str
    name: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    status: str = ""
    problem: str = ""
    changed: float = 0.0

    @property
    def state(self) -> str:
        """finished, running, stopped, failed: ..., interrupted, or the problem."""
        if self.problem:
            return self.problem
        return RUNNING if is_locked(self.directory / LOCK_FILE) else self.status

    @cached_property
    def setting(self) -> str:
        """A digest of what the run uses, except seed and paths: equal for runs that only repeat."""
        keys = [k for k in sorted(self.config) if k not in NOT_A_SETTING and uses(self.config, k)]
        return digest(repr([(key, self.config[key]) for key in keys]).encode(errors="replace"))

    @cached_property
    def is_simulated(self) -> bool:
        """Whether the roster is of simulated clients; False while there is none."""
        roster = read_json(self.directory / ROSTER_FILE, MAX_BYTES[ROSTER_FILE])
        if isinstance(roster, list):
            return any(isinstance(r, Mapping) and number(r.get("num_partitions")) for r in roster)
        return isinstance(roster, Mapping)  # of very many clients it has the number only

    @cached_property
    def measured(self) -> tuple[int, float | None, float | None]:
        """(last round, last and best headline accuracy) by the history, which is read for it.

        The summary of a run that was killed may be some rounds older.
        """
        reader = History(self.directory / HISTORY_FILE)
        reader.look()
        points = next((p for pair in HEADLINE if (p := curve(reader.lines, *pair))), [])
        values = [value for _, value in points]
        return len(reader.lines), values[-1] if values else None, max(values, default=None)

    @cached_property
    def split(self) -> str:
        """The partition with its parameter, such as `dirichlet 0.5`, which sites do not use."""
        if SavedRun(self.directory).has_sites:
            return "by site"
        kind = str(self.config.get("partition", "?"))
        key = {"classes": "classes-per-client", "shards": "shards-per-client"}.get(kind, "alpha")
        value = "" if kind in ("iid", "?") else self.config.get(key, "")
        return f"{kind} {value}".strip()

    @property
    def source(self) -> str:
        """`short_source` of the config."""
        return short_source(self.config.get("source", "?"))

    @property
    def method(self) -> str:
        """The method, with the server optimizer if that is not plain averaging."""
        optimizer = self.config.get("server-optimizer", "fedavg")
        server = "" if optimizer == "fedavg" else f" + {optimizer}"
        return f"{self.config.get('method', '?')}{server}"


class History(HistoryFollower):
    """The history of a run that is shown. fault: why the rest of it cannot be read, or ""."""

    fault = ""

    def look(self) -> None:
        """Read what is new, up to what cannot be read."""
        self.fault = ""
        try:
            self.update()
        except UNREADABLE as error:
            self.fault = in_one_line(str(error).removeprefix(f"{self.path.parent}/"))

    def clients(self) -> Iterator[Line]:
        """What the rounds say of single clients, read one by one, up to what cannot be read."""
        with suppress(*UNREADABLE):
            for line in read_lines(self.path.with_name(CLIENTS_FILE)):
                if line["round"] <= len(self.lines):
                    yield line


def number(value: Any) -> float | None:
    """A float of at most MAX_NUMBER, or None for anything else: files may hold anything."""
    if type(value) is float and -MAX_NUMBER <= value <= MAX_NUMBER:
        return value  # the usual case first: there are millions
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) <= MAX_NUMBER else None
    return None


class Store:
    """The runs below `roots`. One lock guards it: a page is built by one thread at a time."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [root.absolute() for root in roots]
        self.lock = threading.RLock()
        self._entries: dict[str, tuple[Stamp, Entry]] = {}
        self._readers: dict[str, History] = {}

    def runs(self) -> dict[str, Entry]:
        """Id to run of everything below the roots, the last changed first."""
        with self.lock:
            found: dict[str, tuple[Stamp, Entry]] = {}
            for directory in self._directories():
                run_id = digest(os.fsencode(directory))
                found[run_id] = self._looked_up(run_id, directory)
            self._entries = found
            entries = sorted((e for _, e in found.values()), key=lambda e: (-e.changed, e.name))
            return {entry.id: entry for entry in entries}

    def _directories(self) -> list[Path]:
        found = []
        for root in self.roots:
            if (root / CONFIG_FILE).is_file():
                found.append(root)
            for pattern in PATTERNS:
                found += [path.parent for path in root.glob(f"{pattern}/{CONFIG_FILE}")]
            found += [path for path in root.glob("*/") if not os.access(path, os.X_OK)]
        # only what is below a root once links are resolved
        roots = tuple(os.path.join(os.path.realpath(root), "") for root in self.roots)
        return [
            path for path in dict.fromkeys(found) if f"{os.path.realpath(path)}/".startswith(roots)
        ]

    def _looked_up(self, run_id: str, directory: Path) -> tuple[Stamp, Entry]:
        """The run, from the cache unless a file, or whether it can be read, has changed."""
        stamp = self._stamp(directory)
        known = self._entries.get(run_id)
        if known and known[0] == stamp:
            return known
        return stamp, read_entry(run_id, directory, problem=stamp[1])

    @staticmethod
    def _stamp(directory: Path) -> Stamp:
        """(times and sizes of the run's files, what is wrong with one of them)."""
        stamp, problem = [], ""
        for name in FILES:
            path = os.path.join(directory, name)  # faster than a Path: there are thousands
            try:
                about = os.lstat(path)
            except FileNotFoundError:
                stamp.append(0)
                continue
            except OSError as error:
                return (0,), f"unreadable: {error.strerror}"
            if not stat.S_ISREG(about.st_mode):
                problem = f"unreadable: {name} is not a plain file"
            elif about.st_size > MAX_BYTES.get(name, about.st_size):
                problem = f"unreadable: {name} has {about.st_size:,} bytes"
            elif not os.access(path, os.R_OK):
                problem = f"unreadable: no permission to read {name}"
            if name in READ_FILES:
                stamp += [about.st_mtime_ns, about.st_size]
        return tuple(stamp), problem

    def find(self, run_id: str) -> Entry | None:
        """The run of this id; None if there is none (any more)."""
        with self.lock:
            known = self._entries.get(run_id)
            if known is None:
                return self.runs().get(run_id)
            with suppress(PermissionError):  # shown as such
                if not (known[1].directory / CONFIG_FILE).exists():
                    return None
            self._entries[run_id] = self._looked_up(run_id, known[1].directory)
            return self._entries[run_id][1]

    def history(self, entry: Entry) -> History:
        """The run's history, up to date."""
        with self.lock:
            reader = self._readers.pop(entry.id, None) or History(entry.directory / HISTORY_FILE)
            self._readers[entry.id] = reader
            while len(self._readers) > MAX_READERS:
                self._readers.pop(next(iter(self._readers)))
            if not entry.problem:
                reader.look()
            return reader


def read_entry(run_id: str, directory: Path, problem: str = "") -> Entry:
    """Read a run's config and summary."""
    run, name = SavedRun(directory), text_of(directory.name, 120)
    changed = 0.0
    try:
        with suppress(PermissionError):
            changed = run.last_change
        if problem:
            return Entry(run_id, name, directory, problem=problem, changed=changed)
        config, overrides = run.config, run.overrides
        summary, status = run.summary, run.state
    except ANYTHING as error:
        problem = text_of(str(error).removeprefix(f"{directory}/"), 200)
        return Entry(run_id, name, directory, problem=problem, changed=changed)
    if status == RUNNING:  # `state` checks whether it still is
        saved = str(summary.get("status", INTERRUPTED))
        status = INTERRUPTED if saved in (STARTING, RUNNING) else saved
    return Entry(
        run_id, name, directory, config, overrides, summary, text_of(status, MAX_STATE), "", changed
    )


def read_json(path: Path, max_bytes: int) -> Any:
    """The content of a JSON file; None if it is missing, damaged, a link or too large."""
    try:
        about = path.lstat()
        if stat.S_ISREG(about.st_mode) and about.st_size <= max_bytes:
            return json.loads(path.read_bytes())
    except ANYTHING:
        pass
    return None


def last_lines(path: Path, num_bytes: int) -> list[bytes]:
    """The lines in the last bytes of a file; [] if it is a link or cannot be read."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return []
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
            return file.read().splitlines()
    except OSError:
        return []
