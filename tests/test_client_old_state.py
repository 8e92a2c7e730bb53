"""Old client state is deleted by its distance from the newest, and never soon after a start."""

import os
import shutil

import pytest

import client_app.old_state
from client_app.old_state import OldState
from protocol.files import DAY_S

NOW = 2_000_000_000.0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.wall, self.uptime = NOW, 0.0

    def time(self):
        return self.wall

    def monotonic(self):
        return self.uptime

    def advance(self, seconds):
        self.wall += seconds
        self.uptime += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client_app.old_state, "time", clock)
    return clock


@pytest.fixture
def write(tmp_path):
    def write(run, at):
        version = tmp_path / run / "site-a" / "round-00001-0.safetensors"
        version.parent.mkdir(parents=True, exist_ok=True)
        version.touch()
        for path in (version, version.parent, tmp_path / run):
            os.utime(path, (at, at))

    return write


def left_after(old_state, clock, hours):
    for _ in range(hours):
        old_state.delete()
        clock.advance(3600)
    return sorted(path.name for path in old_state.folder.iterdir())


def test_state_much_older_than_the_newest_is_deleted_after_a_day_of_uptime(tmp_path, write, clock):
    write("old", NOW - 40 * DAY_S)
    write("paused", NOW - 20 * DAY_S)
    write("new", NOW)
    old_state = OldState(tmp_path, 30)
    assert left_after(old_state, clock, 24) == ["new", "old", "paused"]
    assert left_after(old_state, clock, 2) == ["new", "paused"]
    shutil.rmtree(tmp_path / "paused")
    assert left_after(old_state, clock, 2) == ["new"]


def test_the_passing_of_time_alone_deletes_nothing(tmp_path, write, clock):
    """Two paused runs, months later: nobody has written anything newer."""
    write("one", NOW - 100 * DAY_S)
    write("two", NOW - 99 * DAY_S)
    assert left_after(OldState(tmp_path, 30), clock, 50) == ["one", "two"]


def test_a_file_beside_the_runs_makes_no_run_old(tmp_path, write, clock):
    """It counted as the newest run, so that the newest run itself was deleted."""
    write("only", NOW - 100 * DAY_S)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "notes.txt")
    os.utime(tmp_path / "notes.txt", (NOW, NOW))
    assert left_after(OldState(tmp_path, 30), clock, 50) == ["link", "notes.txt", "only"]


def test_neither_an_old_file_nor_a_dangling_link_keeps_old_state(tmp_path, write, clock):
    """Both ended each look with an error: no state was deleted any more."""
    for run in ("a", "b"):
        write(run, NOW - 40 * DAY_S)
    write("new", NOW)
    (tmp_path / "new" / "link").symlink_to("nowhere")
    (tmp_path / "notes.txt").touch()
    os.utime(tmp_path / "notes.txt", (NOW - 50 * DAY_S,) * 2)
    assert left_after(OldState(tmp_path, 30), clock, 26) == ["new", "notes.txt"]


def test_a_clock_that_jumps_deletes_nothing(tmp_path, write, clock):
    """Years ahead: every run but the one under way seems to be old."""
    write("paused", NOW)
    clock.wall += 1000 * DAY_S
    write("under way", clock.wall)
    old_state = OldState(tmp_path, 30)
    assert left_after(old_state, clock, 20) == ["paused", "under way"]
    clock.wall = NOW + DAY_S  # and set right again
    assert left_after(old_state, clock, 40) == ["paused", "under way"]


def test_a_clock_that_jumps_after_days_of_uptime_deletes_nothing(tmp_path, write, clock):
    """The paused run was seen unchanged for a day before the jump."""
    write("paused", NOW)
    write("under way", NOW)
    old_state = OldState(tmp_path, 30)
    assert left_after(old_state, clock, 48) == ["paused", "under way"]
    write("just ended", clock.wall)
    clock.wall += 1000 * DAY_S
    write("under way", clock.wall)
    assert left_after(old_state, clock, 48) == ["just ended", "paused", "under way"]
    clock.wall -= 1000 * DAY_S  # and set right again
    write("under way", clock.wall)
    assert left_after(old_state, clock, 48) == ["just ended", "paused", "under way"]
    clock.advance(40 * DAY_S)
    write("under way", clock.wall)
    assert left_after(old_state, clock, 2) == ["under way"]


def test_without_a_limit_or_a_folder_nothing_is_done(tmp_path, write, clock):
    write("old", NOW - 4000 * DAY_S)
    write("new", NOW)
    assert left_after(OldState(tmp_path, 0), clock, 30) == ["new", "old"]
    OldState(tmp_path / "none", 30).delete()
