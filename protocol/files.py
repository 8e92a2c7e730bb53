"""Atomic writes, content digests, chained lines, and who may read what is written.

Chained lines are JSON objects in an append-only file, each with a digest of itself and of the line
before. A line that was edited, removed, inserted or moved breaks the chain. A file that was cut
after a whole line looks intact: who must know stores the newest digest elsewhere.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# An operator creates it to give up lost client state; what a client refuses without it names it.
RESET_FILE = "reset-state"
# Files in the folder of a client's state; no folder there may have such a name.
STATE_FILE = r"(?:round-\d+-[0-9a-f]{16}|state-was-reset-\d+)(?:\..*)?|reset-state|run-id"
VERSION_NAME = re.compile(r"round-\d+-[0-9a-f]{16}\.safetensors")  # checkpoint, client state
# In the run directory: the server adds a round's line when it has ended the round.
HISTORY_FILE = "history.jsonl"
DAY_S = 86400.0
MAX_NAME_BYTES = 180  # of a file's name in the name of its part, which can have 255
Entry = dict[str, Any]


def full_path(path: Path) -> Path:
    """The absolute path, with `~` and `..` resolved: clients refuse a run directory with `..`."""
    path = path.expanduser().absolute()
    return path.resolve() if ".." in path.parts else path


def digest(*pieces: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the joined pieces, bytes or arrays of bytes."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()[:16]


class Umask:
    """The umask of the process while any thread is in `private_files`; the last one restores it."""

    def __init__(self) -> None:
        self.lock, self.num_inside, self.before = threading.Lock(), 0, 0

    def change(self, step: int) -> None:
        """One more thread is inside, or one less."""
        with self.lock:
            if self.num_inside == 0:
                self.before = os.umask(0o077)
            self.num_inside += step
            if self.num_inside == 0:
                os.umask(self.before)


process_umask = Umask()


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """New files (0600) and directories (0700) are for this user alone, in the whole process."""
    process_umask.change(1)
    try:
        yield
    finally:
        process_umask.change(-1)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this path to an OSError that names no file, such as one that a write raises."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomically(path: Path, *pieces: Any) -> None:
    """Write the pieces, bytes or arrays of bytes, to `path`, whole or not at all.

    After a kill or a power cut there is the old file or the new one. The file and its directory
    entry are on the disk when this returns. OSError, naming the file, if the disk is full; the old
    file stays.
    """
    part = part_of(path)
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # of a file system that is read-only too
            part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_version(folder: Path, round_: int, *pieces: Any) -> Path:
    """Write a checkpoint, or a client's state, after this round; its digest is in its name."""
    path = folder / f"round-{round_:05d}-{digest(*pieces)}.safetensors"
    write_atomically(path, *pieces)
    return path


def round_of(version: Path) -> int:
    """The round in the name of a checkpoint or of a client's state."""
    return int(version.name.split("-")[1])


def versions_in(folder: Path, last_round: int | None = None) -> list[Path]:
    """The checkpoints, or versions of a client's state, in a folder, oldest first.

    last_round: without those of later rounds.
    """
    found = [p for p in folder.glob("round-*") if VERSION_NAME.fullmatch(p.name)]
    if last_round is not None:
        found = [path for path in found if round_of(path) <= last_round]
    return sorted(found, key=lambda path: (round_of(path), path))


def write_output(path: Path, content: bytes) -> None:
    """`write_atomically` for a user's path, which may be a device; a file keeps its mode."""
    path = path.resolve()
    if path.exists() and not path.is_file():  # a pipe or a device
        with naming(path):
            path.write_bytes(content)
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    write_atomically(path, content)
    if mode is not None:
        path.chmod(mode)


def part_of(path: Path) -> Path:
    """A new name beside this file to write it under; `remove_parts` finds it after a kill."""
    # random: threads, and containers whose process ids are alike, may write the same file at once
    mark = f"{secrets.token_hex(8)}.{machine_mark()}.{os.getpid()}"
    name = os.fsdecode(os.fsencode(path.name)[:MAX_NAME_BYTES])
    return path.with_name(f".{name}.{mark}.part")


def append_line(path: Path, line: str) -> None:
    """Append a line, or several, whole or not at all, and sync; ends an incomplete line first.

    OSError, naming the file, if the disk is full.
    """
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        content = line.encode() + b"\n"
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError as error:
            file.truncate(size)
            raise OSError(error.errno, error.strerror, str(path)) from error


def remove_parts(directory: Path) -> None:
    """Remove what killed processes left of `write_atomically`, here and below.

    What other machines are writing to a shared disk, or other containers to a shared volume, is
    left alone for a day.
    """
    for part in directory.rglob(".*.part"):
        *_, machine, pid, _ = ("", *part.name.split("."))
        is_own = machine == machine_mark()
        has_ended = pid == str(os.getpid()) or not Path("/proc", pid).exists()
        with contextlib.suppress(FileNotFoundError):  # it has just been renamed
            is_old = time.time() - part.lstat().st_mtime > DAY_S
            # a client's folder may have such a name
            if (is_old or (is_own and has_ended)) and not part.is_dir():
                part.unlink()


@functools.cache
def machine_mark() -> str:
    """Eight hex digits of this machine's or container's name."""
    return digest(platform.node().encode())[:8]


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
