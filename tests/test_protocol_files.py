"""Atomic writes beside each other, and the removal of what killed processes left of them."""

import errno
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest

from protocol import files
from protocol.files import (
    append_line,
    naming,
    part_of,
    private_files,
    remove_parts,
    write_atomically,
    write_output,
)


def test_threads_that_write_the_same_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    path, fsync = tmp_path / "a.json", os.fsync
    is_writing, may_go_on = threading.Event(), threading.Event()

    def fsync_slowly(descriptor):
        if threading.current_thread() is slow:
            is_writing.set()
            assert may_go_on.wait(60)
        fsync(descriptor)

    failures = []

    def write():
        try:
            write_atomically(path, b"of the slow thread")
        except OSError as error:
            failures.append(error)

    monkeypatch.setattr(files.os, "fsync", fsync_slowly)
    slow = threading.Thread(target=write)
    slow.start()
    assert is_writing.wait(60)
    write_atomically(path, b"of the fast thread")
    assert path.read_bytes() == b"of the fast thread"
    may_go_on.set()
    slow.join()
    assert not failures
    assert path.read_bytes() == b"of the slow thread"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_synced_before_it_is_renamed_and_its_entry_after(tmp_path, monkeypatch):
    """A power cut after the return could otherwise lose the file, or leave it empty."""
    path, fsync, synced = tmp_path / "a.json", os.fsync, []

    def note(descriptor):
        fsync(descriptor)
        synced.append((os.path.isdir(descriptor), path.exists()))

    monkeypatch.setattr(files.os, "fsync", note)
    num_open = len(os.listdir("/proc/self/fd"))
    write_atomically(path, b"1")
    assert synced == [(False, False), (True, True)]
    assert len(os.listdir("/proc/self/fd")) == num_open  # or a long run would have none left


def test_only_the_parts_of_processes_that_have_ended_are_removed(tmp_path):
    """A process that was killed in the middle of a write, and one that is in it."""
    below = tmp_path / "clients"
    below.mkdir()
    program = "import os, sys, pathlib; from protocol.files import *; os.fsync = lambda _: {}; "
    program += "write_atomically(pathlib.Path(sys.argv[1]), b'1')"
    killed = ["python", "-c", program.format("os._exit(9)"), str(below / "killed")]
    assert subprocess.run(killed, check=False).returncode == 9
    waiting = "(print(flush=True), sys.stdin.read())"
    writing = ["python", "-c", program.format(waiting), str(below / "writing")]
    with subprocess.Popen(writing, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert len(list(below.iterdir())) == 2
        remove_parts(tmp_path)
        assert [path.name.split(".")[1] for path in below.iterdir()] == ["writing"]
        process.communicate()
    assert [path.name for path in below.iterdir()] == ["writing"]


def test_the_parts_of_another_machine_are_left_for_a_day(tmp_path):
    """A worker that started removed the client state that another node was writing."""
    program = (
        "import os, sys, pathlib; from protocol import files; os.fsync = lambda _: os._exit(9)"
    )
    program += "; files.machine_mark = lambda: 'abcdef01'"
    program += "; files.write_atomically(pathlib.Path(sys.argv[1]), b'1')"
    for name in ("old", "new"):
        command = ["python", "-c", program, str(tmp_path / name)]
        assert subprocess.run(command, check=False).returncode == 9
    [old] = tmp_path.glob(".old.*")
    os.utime(old, (0, 0))
    remove_parts(tmp_path)
    assert [path.name.split(".")[1] for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("num_links", [1, 2])
def test_a_users_file_that_is_written_again_keeps_its_mode_and_its_links(tmp_path, num_links):
    path, link, content = tmp_path / "a.csv", tmp_path / "b.csv", b"2"
    write_output(path, b"1")
    path.chmod(0o664)
    if num_links == 2:
        link.hardlink_to(path)
    write_output(path, content)
    assert path.stat().st_mode & 0o777 == 0o664
    assert (link if num_links == 2 else path).read_bytes() == content


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EACCES])
def test_a_users_file_that_cannot_be_replaced_is_written_in_place(tmp_path, monkeypatch, error):
    """As one that is mounted into a container, or in a folder that belongs to another user."""

    def replace(*paths):
        raise OSError(error, os.strerror(error))

    path = tmp_path / "a.csv"
    path.write_bytes(b"1")
    monkeypatch.setattr(files.os, "replace", replace)
    write_output(path, b"2")
    assert path.read_bytes() == b"2"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=os.strerror(error)):
        write_output(tmp_path / "new.csv", b"1")


def test_a_full_disk_leaves_a_users_file_as_it_was(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a.csv"
    write_output(path, b"1")
    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left on device"):
        write_output(path, b"2")
    assert path.read_bytes() == b"1"


def test_a_folder_is_no_part_whatever_its_name(tmp_path):
    """That of a client's state: code that came with a run chose the name, and no worker started."""
    folder = tmp_path / "a-run" / ".site.999999999.part"
    folder.mkdir(parents=True)
    remove_parts(tmp_path)
    assert folder.is_dir()


def test_files_are_private_until_the_last_thread_that_asked_for_it_is_done(tmp_path):
    """Of two runs in one process, the first to end opened the files of the other to all users."""
    before = os.umask(0o022)
    try:
        first, second = private_files(), private_files()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        (tmp_path / "private").touch()
        second.__exit__(None, None, None)
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"private": 0o600, "after": 0o644}


def test_an_error_leaves_the_umask_as_it_was():
    before = os.umask(0o022)
    try:
        with pytest.raises(OSError, match="full"), private_files():
            raise OSError("full")
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_read_only_file_system_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        write_atomically(tmp_path / "state", b"x")
    assert caught.value.filename == str(tmp_path / "state")


def test_an_error_without_a_file_gets_a_name_and_others_keep_theirs(tmp_path):
    with pytest.raises(OSError, match=r"^\[Errno 28\] no room: '/x'$"), naming(Path("/x")):
        raise OSError(errno.ENOSPC, "no room")
    with pytest.raises(FileNotFoundError, match=r"'/no'$"), naming(Path("/x")):
        Path("/no").read_bytes()
    with pytest.raises(OSError, match=r"^truncated$"), naming(Path("/x")):
        raise OSError("truncated")


def test_a_line_for_which_there_is_no_room_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "audit.jsonl"
    append_line(path, "first")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limit[1]))
    try:
        with pytest.raises(OSError, match=r"No space left on device.*audit\.jsonl"):
            append_line(path, "a longer line")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_text() == "first\n"
    append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"


@pytest.mark.parametrize("name", [250 * "n", 85 * "\u65e5"])
def test_a_file_may_have_any_name_that_the_file_system_takes(name, tmp_path):
    """The name under which it is written first was too long."""
    write_atomically(tmp_path / name, b"a", b"b")
    assert (tmp_path / name).read_bytes() == b"ab"
    assert part_of(tmp_path / name).name.startswith(f".{name[:50]}")
    part_of(tmp_path / name).write_bytes(b"")
    remove_parts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
