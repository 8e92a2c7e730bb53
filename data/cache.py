"""Directories that are built once, whole or not at all, and shared by all processes of a machine.

An entry is `cache_dir/<slug of the source>-<hash of its key>/`. Its about.json holds the key, so
that entries made from earlier versions of the same files can be found and removed.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

Key = dict[str, Any]


def entry_path(cache_dir: Path, key: Key) -> Path:
    """Where the entry with this key is, or would be. `key["source"]` names the source."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir.expanduser() / f"{_slug(key['source'])}-{digest}"


def read_about(entry: Path) -> dict[str, Any]:
    """The entry's about.json."""
    about: dict[str, Any] = json.loads((entry / "about.json").read_text())
    return about


def is_cached(source: str, cache_dir: Path) -> bool:
    """Whether there is an entry of this source, whatever its key."""
    for about in cache_dir.glob("*/about.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):  # being removed, or another Keel's
            if read_about(about.parent)["key"]["source"] == source:
                return True
    return False


def write_about(entry: Path, about: dict[str, Any]) -> None:
    """Write the entry's about.json; `about["key"]` is the entry's key."""
    (entry / "about.json").write_text(json.dumps(about, indent=1))


def build_once(entry: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` create the directory `entry`; a failed `fill` leaves nothing behind.

    If several processes build the same entry at once, the first to finish wins and the others'
    work is discarded.
    """
    building = entry.with_name(f".{entry.name}-{uuid.uuid4().hex}")
    building.mkdir(parents=True)
    try:
        fill(building)
        try:
            building.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def remove_superseded(entry: Path, key: Key) -> None:
    """Remove entries of the same source with another version or fingerprint than `key`'s."""
    for about in entry.parent.glob(f"{_slug(key['source'])}-*/about.json"):
        with suppress(FileNotFoundError):  # another process is removing it
            other = read_about(about.parent)["key"]
            is_current = all(other[part] == key[part] for part in ("version", "fingerprint"))
            if other["source"] == key["source"] and not is_current:
                # Rename first, so that no process opens a half-removed entry.
                doomed = about.parent.rename(entry.with_name(f".{uuid.uuid4().hex}"))
                shutil.rmtree(doomed, ignore_errors=True)


def fingerprint(root: Path, paths: Iterable[Path]) -> str:
    """A hash over names relative to `root`, sizes and times of the files at or below `paths`."""
    digest = hashlib.sha256()
    for path in paths:
        for file in [str(path)] if path.is_file() else files_under(path):
            found = os.stat(file)
            relative = file.removeprefix(str(root))
            digest.update(f"{relative}\t{found.st_size}\t{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def files_under(folder: Path) -> list[str]:
    """All files at or below `folder`, sorted, except hidden ones (.DS_Store, ._image.jpg)."""

    def refuse(error: OSError) -> NoReturn:
        raise error  # os.walk would skip an unreadable folder silently

    files: list[str] = []
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _slug(source: str) -> str:
    """A short name of the source for a directory; for folder:PATH it ends in PATH's last part."""
    kind, _, path = source.partition(":")
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{Path(path).stem}".lower()).strip("-")
