"""Atomic writes, content digests, and who may read what is written."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


def digest(content: bytes) -> str:
    """The first 16 hex digits of the content's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """New files (0600) and directories (0700) are for this user alone, in the whole process."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: after a kill or a power cut there is the old file or the new one.

    The file and its directory entry are on the disk when this returns. OSError, naming the file, if
    the disk is full; the old file stays.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_parts(directory: Path) -> None:
    """Remove what killed processes left of `write_atomically`, here and below."""
    for part in directory.rglob(".*.part"):
        pid = part.name.split(".")[-2]
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            part.unlink(missing_ok=True)
