"""audit.jsonl: who joined a run, was refused, was sent what, and released what.

The lines are chained (protocol/chained.py); each has the time (UTC), the event and its fields.
Lines that were cut off at the end are found by the rounds of the history that they are about and,
once the run has ended, by the manifest, which then has their number and the last digest.

    started    round (the first to come)          joined    client, node
    refused    node, reason                       sent      round, kind, clients, bytes
    released   round, clients, epsilon, delta     rejected  round, kind, clients (name to reason)
    ended      status

A release is noted before it is requested: the privacy budget spent is counted from these lines.
"""

import datetime
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.chained import Chain, read_chain
from server_app.run_reader import AUDIT_FILE, RunReader


class AuditLog:
    """Appends to a run directory's audit log. releases: requested so far, by client.

    ValueError naming the file if the lines that are there are not intact.
    """

    def __init__(self, directory: Path) -> None:
        self.chain = Chain(directory / AUDIT_FILE)
        self.releases = Counter[str]()
        for line in read_chain(self.chain.path) if self.chain.newest else ():
            self._count(line)

    def _count(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "released":
            self.releases.update(line["clients"])

    def note(self, event: str, **fields: Any) -> None:
        """Append a line; it is on the disk when this returns."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, **fields}
        self.chain.append(line)
        self._count(line)


def audit_end(directory: Path) -> dict[str, Any]:
    """The number of lines and the last digest, for the manifest."""
    lines = list(read_chain(directory / AUDIT_FILE))
    return {"lines": len(lines), "digest": lines[-1]["digest"]}


def check_audit(run: RunReader, is_resumed: bool = False) -> int:
    """ValueError naming the file if a run's audit log was changed; the number of its lines.

    is_resumed: a later call may have added lines since the manifest was written.
    """
    path = run.directory / AUDIT_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: restore it from a backup")
    lines = list(read_chain(path))
    sent = {line["round"] for line in lines if line["event"] == "sent"}
    if unsent := {line["round"] for line in run.history} - sent:
        raise ValueError(
            f"{path} was cut short: round {min(unsent)} of the history is not in it: restore it "
            "from a backup"
        )
    end = run.manifest.get("audit")
    ends = [{"lines": number, "digest": line["digest"]} for number, line in enumerate(lines, 1)]
    if end and end not in (ends if is_resumed else ends[-1:]):
        raise ValueError(
            f"{path} has {len(lines)} lines, the manifest {end['lines']} and another last digest: "
            "restore it from a backup"
        )
    return len(lines)
