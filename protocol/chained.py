"""Append-only JSON lines, each with a digest of itself and of the line before.

A line that was edited, removed, inserted or moved breaks the chain. A file that was cut after a
whole line looks intact: who must know stores the newest digest elsewhere.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.files import append_line, digest

Entry = dict[str, Any]


def read_chain(path: Path) -> Iterator[Entry]:
    """The entries with their digests; a last line without its newline was never written whole.

    ValueError naming the file and the first line that is damaged, edited or out of place.
    """
    previous = ""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                entry = json.loads(text)
                fields = {name: value for name, value in entry.items() if name != "digest"}
                is_intact = entry["digest"] == digest_of(fields, previous)
            except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
                is_intact = False
            # a name that is there twice is not written back
            if not is_intact or json.dumps(entry).encode() != text.removesuffix(b"\n"):
                raise ValueError(
                    f"{path}, line {number} was changed, or a line before it was removed or added: "
                    "restore the file from a backup"
                )
            previous = entry["digest"]
            yield entry


def digest_of(fields: Mapping[str, Any], previous: str) -> str:
    """The digest of an entry that follows a line with the digest `previous`."""
    return digest((previous + json.dumps(fields, sort_keys=True)).encode())


class Chain:
    """Appends to a file of chained lines. newest: the digest of its last line; "" without one.

    ValueError as `read_chain` if what is there is not intact. A line that a kill or a full disk
    left incomplete is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.newest = path, ""
        self._look()

    def _look(self) -> None:
        """Find the newest digest on disk, and drop an incomplete last line."""
        self.newest = ""
        if not self.path.exists():
            return
        for entry in read_chain(self.path):
            self.newest = entry["digest"]
        content = self.path.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append an entry; it is on the disk when this returns.

        OSError, naming the file, which stays as it is, if the disk is full.
        """
        fields = json.loads(json.dumps(entry))  # as it will be read
        newest = digest_of(fields, self.newest)
        try:
            append_line(self.path, json.dumps(fields | {"digest": newest}))
        except BaseException:  # after Ctrl-C the line may be on disk or not
            self._look()
            raise
        self.newest = newest
