"""Append-only JSON lines, each with a digest of itself and of the line before."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.files import append_line, digest

Entry = dict[str, Any]
TAIL_BYTES = 1 << 16  # read first for the newest line; 17 kB for a round of 1,000 clients


def append_chained(path: Path, *entries: Mapping[str, Any]) -> None:
    """Append the entries with their digests, all or none; they are on the disk when this returns.

    An incomplete line at the end (a power cut) is ended first and stays as it is. OSError, naming
    the file, which stays as it is, if the disk is full.
    """
    previous, lines = newest_digest(path), []
    for entry in entries:
        previous = digest_of(entry, previous)
        lines.append(json.dumps({**entry, "digest": previous}))
    append_line(path, "\n".join(lines))


def read_chained(path: Path, allows_old: bool = True) -> tuple[list[Entry], int]:
    """(intact entries without their digests, number of lines that are damaged or out of place).

    allows_old: lines without a digest count as intact before the first with one; Keel 0.1 wrote
    such files. A file that was cut short after a whole line looks intact.
    """
    entries: list[Entry] = []
    num_damaged, previous, is_old = 0, "", allows_old
    for text in path.read_bytes().splitlines() if path.exists() else []:
        entry = parsed(text)
        found = entry.pop("digest", None)
        if (entry and found is None and is_old) or (entry and found == digest_of(entry, previous)):
            entries.append(entry)
        else:
            num_damaged += 1
        if found is not None:
            previous, is_old = str(found), False
    return entries, num_damaged


def digest_of(entry: Mapping[str, Any], previous: str) -> str:
    """The digest of an entry that follows a line with the digest `previous`."""
    return digest((previous + json.dumps(dict(entry), sort_keys=True)).encode())


def newest_digest(path: Path) -> str:
    """The digest in the last line that has one; "" if none has, or there is no file.

    Reads as much of the file's end as it needs.
    """
    size, num_bytes = path.stat().st_size if path.exists() else 0, TAIL_BYTES
    while size:
        with path.open("rb") as file:
            file.seek(max(0, size - num_bytes))
            lines = file.read().splitlines()
        if num_bytes < size:  # the first may be cut
            lines = lines[1:]
        for text in reversed(lines):
            if (found := parsed(text).get("digest")) is not None:
                return str(found)
        if num_bytes >= size:
            break
        num_bytes *= 4
    return ""


def without_repetition(pairs: list[tuple[str, Any]]) -> Entry:
    """For `json.loads`: an object; ValueError if a name is there twice, as in an edited line."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def parsed(text: bytes) -> Entry:
    """The object in a line; {} if it holds none."""
    try:
        value = json.loads(text, object_pairs_hook=without_repetition)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
