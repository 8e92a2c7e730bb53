"""audit.jsonl: who joined a run, was refused, was sent what, and released what; append-only.

A line is a JSON object with the time (UTC), the event and its fields, the digest of the line before
(`previous`; empty for the first) and its own (`digest`, SHA-256 of the line without this field). So
a line that was edited, removed, inserted or moved is found. Lines cut off at the end are found by
the rounds of the history that they are about, and once the run has ended: the manifest then has
their number and the last digest. A fault that a resume finds is recorded as a line too.

    started    round (the first to come)          joined    client, node
    refused    node, reason                       sent      round, kind, clients, bytes
    released   round, clients, epsilon, delta     rejected  round, kind, clients (name to reason)
    ended      status                             fault     reason (what a resume found)
"""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.chained import without_repetition
from protocol.files import append_line
from protocol.text import in_one_line
from server_app.history import DAMAGE, whole_lines

AUDIT_FILE = "audit.jsonl"


def line_digest(line: dict[str, Any]) -> str:
    """The digest of this line's other fields."""
    fields = {key: value for key, value in line.items() if key != "digest"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


class AuditLog:
    """Appends to a run directory's audit log, continuing the chain that is there."""

    def __init__(self, directory: Path) -> None:
        """Drops an incomplete last line, which a kill or a full disk leaves."""
        self.path = directory / AUDIT_FILE
        self.previous = self._last_digest()

    def _last_digest(self) -> str:
        """The digest of the last line on disk, after an incomplete one is dropped."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        try:
            return str(json.loads(whole.splitlines()[-1])["digest"]) if whole else ""
        except DAMAGE:
            return "unreadable"  # which `audit_problem` finds

    def note(self, event: str, **fields: Any) -> None:
        """Append a line and sync it to disk."""
        self.note_all(event, [fields])

    def note_all(self, event: str, several: Iterable[dict[str, Any]]) -> None:
        """Append a line for each of these fields, all or none, and sync once."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        previous, lines = self.previous, []
        for fields in several:
            line = {"time": now, "event": event, **fields, "previous": previous}
            line["digest"] = previous = line_digest(json.loads(json.dumps(line)))
            lines.append(json.dumps(line))
        try:
            if lines:
                append_line(self.path, "\n".join(lines))
            self.previous = previous
        except BaseException:  # after Ctrl-C the lines may be on disk or not
            self.previous = self._last_digest()
            raise


def released_clients(directory: Path) -> Counter[str]:
    """How often the log has a release requested of each client; damaged lines count for nobody."""
    path, found = directory / AUDIT_FILE, Counter[str]()
    for text in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(*DAMAGE):
            line = json.loads(text)
            if line["event"] == "released":
                found.update(map(str, line["clients"]))
    return found


def audit_end(directory: Path) -> dict[str, Any]:
    """The number of lines and the last digest, for the manifest."""
    lines = (directory / AUDIT_FILE).read_bytes().splitlines()
    return {"lines": len(lines), "digest": json.loads(lines[-1])["digest"]}


def audit_problem(
    directory: Path, end: dict[str, Any] | None = None, is_resumed: bool = False
) -> str:
    """What is wrong with a run's audit log, naming the line; empty if the chain is intact.

    end: what `audit_end` returned when the run ended. is_resumed: there may be lines after it.
    """
    path = directory / AUDIT_FILE
    if not path.is_file():
        return f"{AUDIT_FILE} is missing"
    previous, number, fault = "", 0, ""
    ends: list[tuple[int, str]] = []  # which `end` may be
    sent: set[object] = set()  # rounds
    starts: list[int] = []  # rounds; the log of a run of Keel 0.1 starts where it was resumed
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line = json.loads(text, object_pairs_hook=without_repetition)
            written, before = line["digest"], line["previous"]
            if line.get("event") == "started":
                starts.append(int(line["round"]))
        except DAMAGE:
            return f"{AUDIT_FILE}: line {number} is damaged"
        if written != line_digest(line):
            return f"{AUDIT_FILE}: line {number} was edited"
        if before != previous:
            return f"{AUDIT_FILE}: what was before line {number} was removed, added or moved"
        previous = written
        if line.get("event") == "fault":
            fault = fault or in_one_line(line.get("reason"))
        if line.get("event") == "sent":
            sent.add(line.get("round"))
        ends.append((number, written))
    recorded = {line["round"] for line in whole_lines(directory)[0]}
    if missing := sorted(n for n in recorded - sent if not starts or n >= starts[0]):
        return f"{AUDIT_FILE}: round {missing[0]} of the history is not in it: its end was cut off"
    ends = ends if is_resumed else ends[-1:]
    if end and (end.get("lines"), end.get("digest")) not in ends:
        return f"{AUDIT_FILE}: {number} lines, expected {end.get('lines')}: its end was changed"
    return fault
