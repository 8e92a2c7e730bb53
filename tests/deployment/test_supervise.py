"""The supervisor: what dies comes back, what it started is gone when it is."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import keel.deployment.supervise
from keel.deployment.processes import descendants
from keel.deployment.supervise import Kept, split_commands, supervise
from protocol.config import app_folder

limit_s = 60
sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
parent = [  # a process with a child of its own, as executors have
    sys.executable,
    "-c",
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])",
]


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(keel.deployment.supervise, "shortest_pause_s", 0.1)
    monkeypatch.setattr(keel.deployment.supervise, "longest_pause_s", 0.4)
    stop, started, threads = threading.Event(), [], []

    def keep(*commands):
        started.extend(Kept(command) for command in commands)
        threads.append(threading.Thread(target=supervise, args=(started, stop)))
        threads[-1].start()
        return started

    yield keep
    stop.set()
    for thread in threads:
        thread.join(limit_s)
    assert all(each.process.poll() is not None for each in started)


def wait_until(holds):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_killed_is_started_again_and_its_neighbour_left_alone(kept):
    first, second = kept(sleeper, sleeper)
    pid, neighbour = first.process.pid, second.process.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: first.starts == 2)
    assert first.process.pid != pid
    assert (second.starts, second.process.pid) == (1, neighbour)


def test_children_of_a_killed_process_do_not_outlive_its_pause(kept):
    [only] = kept(parent)
    wait_until(lambda: descendants(only.process.pid))
    [child] = descendants(only.process.pid)
    os.kill(only.process.pid, signal.SIGKILL)
    wait_until(lambda: only.starts == 2)
    wait_until(lambda: not exists(child))


def test_the_pause_doubles_up_to_its_longest(kept):
    [only] = kept([sys.executable, "-c", "raise SystemExit(3)"])
    wait_until(lambda: only.starts >= 4)
    assert only.pause_s == 0.4


def test_sigterm_ends_the_supervisor_and_all_that_it_started():
    command = [sys.executable, "-m", "keel.deployment.supervise", "--", *parent, "--", *sleeper]
    process = subprocess.Popen(command, cwd=app_folder)
    try:
        wait_until(lambda: len(descendants(process.pid)) == 3)
        below = list(descendants(process.pid))
        process.terminate()
        assert process.wait(limit_s) == 0
        wait_until(lambda: not any(exists(pid) for pid in below))
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_killed_supervisor_leaves_no_process_that_it_started():
    command = [sys.executable, "-m", "keel.deployment.supervise", "--", *sleeper]
    process = subprocess.Popen(command, cwd=app_folder)
    try:
        wait_until(lambda: len(descendants(process.pid)) == 1)
        [child] = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not exists(child))
    finally:
        process.kill()
        process.wait()


def test_commands_follow_their_dashes():
    assert split_commands(["--", "a", "-x", "--", "b"]) == [["a", "-x"], ["b"]]
    for words in ([], ["a"], ["--"], ["--", "a", "--"]):
        with pytest.raises(ValueError, match="--"):
            split_commands(words)
