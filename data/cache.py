"""Directories that are built once, whole or not at all, and shared by processes and machines.

An entry is `cache_dir/<slug of the source>-<hash of its key>/`, and the key has the digest of the
content of the source's files: copies of the same files, with other times, have one entry.
"""

import hashlib
import io
import json
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from data.decoding import ImageFileError
from protocol.files import naming, private_files, write_atomically

Key = dict[str, Any]
# Folders that network drives, archives and systems add, with thumbnails or deleted files.
SYSTEM_FOLDERS = frozenset(
    ("@eadir", "@tmp", "@recycle", "@recently-snapshot", "@__thumb", "#recycle", "#snapshot",
     "__macosx", "$recycle.bin", "system volume information", "lost+found", "__pycache__")
)  # fmt: skip
SYSTEM_FILES = frozenset(("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini"))


def entry_path(cache_dir: Path, key: Key) -> Path:
    """Where the entry with this key is, or would be. `key["source"]` names the source."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    kind, _, path = key["source"].partition(":")
    slug = re.sub(r"[^a-z0-9]+", "-", f"{kind}-{Path(path).stem}".lower())[:100].strip("-")
    return cache_dir.expanduser() / f"{slug}-{digest}"


def read_about(entry: Path) -> dict[str, Any]:
    """The entry's about.json."""
    about: dict[str, Any] = json.loads((entry / "about.json").read_text())
    return about


def is_cached(source: str, cache_dir: Path) -> bool:
    """Whether there is an entry of this source, whatever its key."""
    return any(
        read_about(about.parent)["key"]["source"] == source
        for about in cache_dir.glob("*/about.json")
    )


def build_once(entry: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` create the directory `entry`; a failed `fill` leaves nothing behind.

    If several processes build the same entry at once, the first to finish wins and the others'
    work is discarded.
    """
    building = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    try:
        with private_files():
            building.mkdir(parents=True)
            fill(building)
        for file in building.iterdir():  # or a power cut could leave an entry with empty files
            with file.open("rb") as written:
                os.fsync(written.fileno())
        try:
            building.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def content_digest(cache_dir: Path, root: Path, paths: Iterable[Path]) -> str:
    """The SHA-256 of the names relative to `root` and of the bytes of the files below `paths`.

    The files are read once: the digest is noted in the cache beside their sizes and times.
    """
    seen, files = hashlib.sha256(os.fsencode(str(root))), []
    for path in paths:
        for file in files_under(path) if path.is_dir() else [str(path)]:
            found = os.stat(file)
            if not stat.S_ISREG(found.st_mode):  # a named pipe would block forever
                raise ImageFileError(
                    f"{file}: not a regular file", "an image is not a regular file"
                )
            files.append((file, file.removeprefix(str(root))))
            # st_ctime: changes with the content, also where st_mtime was set back
            times = f"{found.st_mtime_ns}\t{found.st_ctime_ns}"
            seen.update(os.fsencode(f"{files[-1][1]}\t{found.st_size}\t{times}\n"))
    noted = cache_dir.expanduser() / "contents" / seen.hexdigest()[:32]
    if noted.exists():
        return noted.read_text()
    digest = hashlib.sha256()
    for file, name in files:
        with open(file, "rb") as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
            digest.update(os.fsencode(f"{name}\0{content}\n"))
    with private_files(), suppress(OSError):  # the cache may be read-only
        noted.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(noted, digest.hexdigest().encode())
    return digest.hexdigest()


def files_under(folder: Path) -> list[str]:
    """All files at or below `folder`, sorted, except those that `is_system` is true of.

    Links are followed; ImageFileError for one to a folder that it is in.
    """

    def refuse(error: OSError) -> NoReturn:
        raise error  # os.walk would skip an unreadable folder silently

    files: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not is_system(name)]
        for path in (os.path.join(parent, name) for name in folders):
            if os.path.islink(path) and any(os.path.samefile(path, p) for p in Path(path).parents):
                reason = "a link to a folder that it is in: remove it"
                raise ImageFileError(f"{path}: {reason}", reason)
        files += [os.path.join(parent, name) for name in names if not is_system(name)]
    return sorted(files)


def is_system(name: str) -> bool:
    """Whether a file or folder is hidden (.DS_Store, ._image.jpg, .thumbnails) or a system's."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS | SYSTEM_FILES


def write_numbers(file: Path, numbers: np.ndarray) -> None:
    """An npy file of int64."""
    content = io.BytesIO()  # on a full disk, np.save raises an error without a reason
    np.save(content, numbers.astype(np.int64))
    with naming(file):
        file.write_bytes(content.getbuffer())


def reserve(file: Path) -> None:
    """Take the disk space of a file: without it, a write to its memory map kills the process."""
    if sys.platform == "darwin":  # has no such call
        return
    with file.open("r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
