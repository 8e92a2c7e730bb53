"""Atomic writes and content digests."""

import hashlib
import os
from pathlib import Path


def digest(content: bytes) -> str:
    """The first 16 hex digits of the content's SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: after a kill or a power cut there is the old file or the new one.

    The file and its directory entry are on the disk when this returns.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
