"""Atomic writes beside each other, and the removal of what killed processes left of them."""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from protocol import files
from protocol.files import (
    append_line,
    part_of,
    private_files,
    remove_parts,
    write_atomically,
    write_output,
)


def test_the_file_is_synced_before_it_is_renamed_and_its_entry_after(tmp_path, monkeypatch):
    """A power cut after the return can then neither lose the file nor leave it empty."""
    path, fsync, synced = tmp_path / "a.json", os.fsync, []

    def note(descriptor):
        fsync(descriptor)
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(files.os, "fsync", note)
    write_atomically(path, b"new")
    (part, before), (directory, after) = synced
    assert (before, after, directory) == (False, True, str(tmp_path))
    assert part.endswith(".part")


@pytest.mark.parametrize("write", [write_atomically, write_output, append_line])
def test_a_full_disk_is_an_error_that_names_the_file_which_stays(write, tmp_path):
    path, limits = tmp_path / "a.csv", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"old\n")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match=r"a\.csv"):
            write(path, "x" * 9999 if write is append_line else b"x" * 9999)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_users_file_keeps_its_mode_and_a_device_is_written_to(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"1")
    path.chmod(0o640)
    write_output(path, b"2")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"2", 0o640)
    write_output(Path("/dev/null"), b"3")
    assert Path("/dev/null").is_char_device()


def test_only_the_parts_of_processes_that_have_ended_are_removed(tmp_path):
    own = part_of(tmp_path / "running")
    process = subprocess.Popen(["true"])
    process.wait()
    own.with_name(own.name.replace(str(os.getpid()), str(process.pid))).touch()
    other = own.with_name(own.name.replace(str(os.getpid()), str(os.getppid())))
    kept = [other, tmp_path / "kept.json", tmp_path / ".x.999999999.part"]
    for path in kept[:2]:
        path.touch()
    kept[2].mkdir()  # a client's folder, which may have any name
    remove_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_files_are_private_until_the_last_thread_that_asked_for_it_is_done(tmp_path):
    os.umask(0o022)
    with private_files():
        with private_files():
            pass
        (tmp_path / "private").touch()
    (tmp_path / "public").touch()
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "public")]
    assert modes == [0o600, 0o644]
