"""history.jsonl: one line per round. Only this module writes it; needs no torch.

Keys of a line: round, participants (clients whose update was aggregated), left_out (client to
reason), rejected (number of replies that failed update validation), reset_needed (clients whose
state is lost or ahead of the server), backed_off (clients that are not sampled: away or in
backoff), late, losses, seconds (by phase; those of all rounds add up to the run's),
client_seconds, client_cpu_seconds, bytes_down, bytes_up; if measured: global, local_global,
personal, diagnostics, evaluation_left_out, evaluation_bytes_down, evaluation_bytes_up; if client
state was older than the client's last accepted update: old_state (client to that state's round).
"""

import gc
import json
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from protocol.files import HISTORY_FILE as HISTORY_FILE
from protocol.files import append_line, write_atomically
from protocol.text import num_of

log = logging.getLogger("keel.server")
Line = dict[str, Any]

RENAMED_FIELDS = {"refused": "rejected", "resting": "backed_off"}  # names before 0.2
KINDS: dict[str, type] = {
    "old_state": dict,
    "round": int,
    "participants": list,
    "left_out": dict,
    "losses": dict,
    "rejected": int,
    "reset_needed": list,
    "backed_off": list,
    "seconds": dict,
    "bytes_down": int,
    "bytes_up": int,
}
COLLECTION = threading.Lock()  # held while garbage collection is off
NUMBERS = (int, float)  # faster than their union, for 100,000 lines
REQUIRED = ("round", "losses", "seconds", "left_out")
# what reading damaged JSON raises
DAMAGE = (ValueError, AttributeError, LookupError, TypeError, ArithmeticError, RecursionError)
MAX_ROUND = 1 << 53  # floats represent all integers up to here
PER_CLIENT = ("local_global", "personal")  # their "clients" has each client's accuracy
LONG_BYTES = 1 << 16  # shorter JSON takes less time to parse than pydantic's import does
READ_BYTES = 4 << 20  # lines of many clients are long: several fit
MAX_NAMED = 100  # clients that a condensed line names in each of its fields
MAX_ALL_NAMED = 10_000  # that a reader's lines name in all; 2 MB
NAMED = ("left_out", "reset_needed", "backed_off", "late", "evaluation_left_out", "old_state")
COUNTS = [(key, f"num_{key}") for key in NAMED]
# what `condensed` cuts out of a line, in the order of the line
CUTS = ((b'"participants": [', b"]"), (b'"clients": {', b"}"), (b'"clients": {', b"}"))

# Accuracy curves: key in a line, key within it, description.
CURVES = (
    ("global", "accuracy", "global model, test set"),
    ("local_global", "mean", "global model, clients' test parts"),
    ("local_global", "worst_decile", "global model, worst tenth of clients"),
    ("personal", "mean", "personal models, clients' test parts"),
    ("personal", "worst_decile", "personal models, worst tenth of clients"),
)


def read_history(path: Path) -> list[Line]:
    """The complete lines of a history under current names; `path`: the file or its run directory.

    Without each client's accuracies, which for many clients and rounds do not fit in memory.
    A last line without its newline (a round being written) is ignored; without a file: [].
    ValueError naming the file and the line if a line is damaged.
    """
    lines, faults = whole_lines(path)
    if faults:
        raise ValueError(faults[0])
    return lines


def whole_lines(path: Path) -> tuple[list[Line], list[str]]:
    """(lines, faults): as `read_history`, with a sentence for each damaged line."""
    faults: list[str] = []
    return [without_accuracies(line) for line in each_line(path, faults)], faults


def each_line(path: Path, faults: list[str]) -> Iterator[Line]:
    """The lines of a history, one at a time and with each client's accuracies.

    Adds a sentence to `faults` for each damaged one.
    """
    path = path / HISTORY_FILE if path.is_dir() else path
    if not path.exists():
        return
    if not path.is_file():  # a pipe would be waited for
        faults.append(f"{path} is damaged: it is not a plain file")
        return
    with path.open("rb") as file:
        yield from lines_in(file, faults, f"{path}, ")


def lines_in(file: Iterable[bytes], faults: list[str], place: str = "") -> Iterator[Line]:
    """As `each_line`, of an open file. place: begins each sentence."""
    for number, text in enumerate(file, start=1):
        if not text.endswith(b"\n"):  # being written
            return
        try:
            line = parsed_line(text)
        except DAMAGE as error:
            faults.append(f"{place}line {number} is damaged: {error}")
        else:
            yield line


def parsed_line(text: bytes, cache_strings: Literal["keys", "none"] = "none") -> Line:
    """A line under current names. Raises one of DAMAGE if it is damaged."""
    line: Line = load_json(text, cache_strings)
    if not RENAMED_FIELDS.keys().isdisjoint(line.keys()):
        line = {RENAMED_FIELDS.get(key, key): value for key, value in line.items()}
    check_kinds(line)
    return line


def check_kinds(line: Line) -> None:
    """TypeError naming the first key that is missing or whose value has the wrong type."""
    for key in REQUIRED:
        if key not in line:
            raise TypeError(f"it has no key {key!r}")
    for key, kind in KINDS.items():
        if key in line and not isinstance(line[key], kind):
            raise TypeError(f"{key} = {line[key]!r:.40}")
    if abs(line["round"]) > MAX_ROUND:
        raise TypeError(f"round = {line['round']!r:.40}")
    for key, name, _ in CURVES:
        if key not in line:
            continue
        if not isinstance(value := line[key][name], NUMBERS):
            raise TypeError(f"{key} has no {name}")
        if not 0 <= value <= 1:  # nor NaN
            raise TypeError(f"{key}.{name} = {value!r:.40}: expected a number from 0 to 1")
    for key in ("client_seconds", "client_cpu_seconds"):  # stated by clients, so of any size
        if not isinstance(value := line.get(key, 0.0), NUMBERS):
            raise TypeError(f"{key} = {value!r:.40}: expected a number")
    for value in line["seconds"].values():
        if not isinstance(value, NUMBERS) or not abs(value) <= MAX_ROUND:  # nor NaN
            raise TypeError(f"seconds = {value!r:.40}: expected a number")


@contextmanager
def without_collection() -> Iterator[None]:
    """Without garbage collection, which would look through all lines again and again.

    One thread at a time: otherwise the first to end would turn it on for the others, or the last
    would leave it off.
    """
    with COLLECTION:
        is_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if is_on:
                gc.enable()


class HistoryReader:
    """Follows a history that may be growing: reads only what is new, and stores little of it.

    lines: complete lines, condensed: `num_participants`, `num_left_out`, ... instead of long lists,
    no client's accuracy. A field names at most MAX_NAMED clients, and all lines together
    MAX_ALL_NAMED: the oldest lose their names. `full` reads one line as it is in the file.
    faults: a sentence for each damaged line. version: changes with the content.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.generation, self._inode = path, 0, -1
        self._restart()

    def _restart(self) -> None:
        self.lines: list[Line] = []
        self.faults: list[str] = []
        self._spans: list[tuple[int, int]] = []  # of each line: its first byte, and how many
        self._offset = self._number = 0
        self._num_named = self._num_nameless = 0  # names in lines; lines whose names were dropped
        # the line before the offset; it differs if the file was replaced or rewritten
        self._last = b""
        self.generation += 1

    @property
    def version(self) -> tuple[int, int, int]:
        """Differs after every `update` that changed something."""
        return self.generation, len(self.lines), len(self.faults)

    def update(self) -> bool:
        """Read what was appended, or all of a replaced file; whether anything changed."""
        before = self.version
        try:
            with without_collection(), self.path.open("rb", buffering=READ_BYTES) as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._offset - len(self._last))
                if self._inode not in (-1, inode) or file.read(len(self._last)) != self._last:
                    self._restart()
                self._inode = inode
                file.seek(self._offset)
                for text in file:
                    if not text.endswith(b"\n"):  # being written
                        break
                    self._append(text)
        except FileNotFoundError:
            if self._offset:
                self._restart()
        return self.version != before

    def _append(self, text: bytes) -> None:
        self._number += 1
        try:
            self.lines.append(condensed(text))
            self._spans.append((self._offset, len(text)))
            self._drop_names()
        except DAMAGE as error:
            if len(self.faults) < MAX_NAMED:
                self.faults.append(f"{self.path.name}, line {self._number} is damaged: {error}")
        self._offset += len(text)
        self._last = text

    def _drop_names(self) -> None:
        """After a line was appended: drop the oldest lines' names until the rest are few enough."""
        self._num_named += num_named(self.lines[-1])
        while self._num_named > MAX_ALL_NAMED:
            old = self.lines[self._num_nameless]
            self._num_named -= num_named(old)
            for key in NAMED:
                if old.get(key):
                    old[key] = {} if isinstance(old[key], dict) else []
            self._num_nameless += 1

    def full(self, index: int) -> Line:
        """The line behind `lines[index]`, with every client. ValueError if the file has changed."""
        start, size = self._spans[index]
        with self.path.open("rb") as file:
            file.seek(start)
            return parsed_line(file.read(size))


def num_named(line: Line) -> int:
    """How many names are in the fields NAMED of a condensed line."""
    return sum(len(line.get(key) or ()) for key in NAMED)


def condensed(text: bytes) -> Line:
    """A line with numbers instead of long lists of clients.

    Accuracies and participants, most of a line, are cut out before the JSON is parsed. A cut that
    ends inside a name leaves an odd number of quotes, which is not JSON: then the whole line is
    parsed.
    """
    try:
        short, num = cut_short(text)
        line = parsed_line(short, cache_strings="keys")
    except DAMAGE:
        line = parsed_line(text)
        num = len(line.get("participants", ()))
    line["num_participants"] = num
    for key, count in COUNTS:
        found = line.get(key) or []
        line[count] = len(found)
        if len(found) > MAX_NAMED:
            first = list(found)[:MAX_NAMED]
            line[key] = {n: found[n] for n in first} if isinstance(found, dict) else first
    return without_clients(line)


def cut_short(text: bytes) -> tuple[bytes, int]:
    """(a line without participants' names and clients' accuracies, the number of participants).

    What is not where `append_history` writes it stays.
    """
    pieces, done, num = [], 0, 0
    for opening, closing in CUTS:
        start = text.find(opening, done)
        end = text.find(closing, start)
        if start < 0 or end < 0:
            continue
        start += len(opening)
        if closing == b"]":
            num = text.count(b'", "', start, end) + (end > start)
        pieces.append(text[done:start])
        done = end
    return b"".join([*pieces, text[done:]]), num


def load_json(text: bytes, cache_strings: Literal["keys", "none"] = "none") -> Any:
    """As `json.loads`, several times as fast for a long text of thousands of names and numbers.

    cache_strings="keys": objects of several calls have the same keys in memory.
    """
    if len(text) < LONG_BYTES and cache_strings == "none":
        return json.loads(text)
    from pydantic_core import from_json

    try:
        return from_json(text, cache_strings=cache_strings)
    except ValueError:  # it is stricter with surrogates and depth
        return json.loads(text)


def append_history(path: Path, line: Mapping[str, Any]) -> None:
    """Append one round's line; it is on the disk when this returns."""
    append_line(path, json.dumps(finite_or_null(line), allow_nan=False))


def truncate_history(path: Path, last_round: int) -> list[Line]:
    """Drop the lines of rounds after `last_round`, which a resume repeats.

    Returns the others `without_clients`, whose accuracies are most of a history.

    A damaged history does not stop a resume: it is saved as `history.jsonl.damaged`, and its intact
    lines are used. A warning says what is missing.
    """
    faults: list[str] = []
    lines, texts = [], []
    for line in each_line(path, faults):
        if line["round"] <= last_round:
            lines.append(without_clients(line))
            texts.append(json.dumps(line).encode() + b"\n")
    if faults:
        aside = path.with_name(f"{path.name}.damaged")
        write_atomically(aside, path.read_bytes())
        log.warning("%s; the intact lines are used, the file is saved as %s", faults[0], aside)
    missing = last_round - len({line["round"] for line in lines})
    if missing > 0:
        log.warning(
            "%s: the lines of %d of %s are lost", path, missing, num_of("round", last_round)
        )
    write_atomically(path, *texts)
    return lines


def finite_or_null(value: Any) -> Any:
    """`value` with None in place of every NaN and infinity in it, which JSON cannot express."""
    if isinstance(value, Mapping):
        return {key: finite_or_null(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def without_clients(line: Mapping[str, Any]) -> Line:
    """A line without the fields that grow with the number of clients."""
    return {k: v for k, v in without_accuracies(line).items() if k != "participants"}


def without_accuracies(line: Mapping[str, Any]) -> Line:
    """A line without each client's accuracies."""
    short = dict(line)
    for key in PER_CLIENT:
        if isinstance(value := line.get(key), dict):
            short[key] = {name: each for name, each in value.items() if name != "clients"}
    return short


def curve(history: Sequence[Mapping[str, Any]], key: str, name: str) -> list[tuple[int, float]]:
    """(round, accuracy) of every evaluated round of one of CURVES."""
    return [(line["round"], line[key][name]) for line in history if key in line]


def duration(seconds: float) -> str:
    """12 s, 3 min 4 s, 2 h 5 min, 4 d 3 h."""
    s = max(0, round(seconds))
    for size, unit, part, name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if s >= size:
            return f"{s // size} {unit} {s % size // part} {name}"
    return f"{s} s"
