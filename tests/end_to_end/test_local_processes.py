"""The restarts of a loopback deployment: what dies comes back, and nothing is left at the end."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest
from run_fixtures import wait_until
from tools.processes import descendants

import keel.deployment.loopback
from keel.cli.main import main
from keel.deployment.loopback import LocalProcess, deploy_and_run, restarting
from keel.saved_runs import LOCK_FILE
from protocol.config import app_folder

sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
parent = [  # a process with a child of its own, as executors have
    sys.executable,
    "-c",
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])",
]


@pytest.fixture
def start(monkeypatch, tmp_path):
    monkeypatch.setattr(keel.deployment.loopback, "pause_s", 0.1)
    processes = {}
    with restarting(processes):

        def start_all(*commands):
            for i, command in enumerate(commands):
                processes[str(i)] = LocalProcess(command, os.environ, tmp_path / f"{i}.log")
            return list(processes.values())

        yield start_all
        pids = [process.process.pid for process in processes.values()]
        pids += [pid for each in pids for pid in descendants(each)]
    wait_until(lambda: not any(exists(pid) for pid in pids))


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_process_is_restarted_without_its_children_and_its_neighbour_left_alone(start):
    first, second = start(parent, sleeper)
    pid, neighbour = first.process.pid, second.process.pid
    wait_until(lambda: descendants(pid))
    [child] = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: first.starts == 2 and not exists(child))
    assert first.process.pid != pid
    assert (second.starts, second.process.pid) == (1, neighbour)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_a_killed_deployment_leaves_no_process_that_it_started(tmp_path):
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from keel.deployment.loopback import LocalProcess\n"
        f"LocalProcess({sleeper!r}, os.environ, Path({str(tmp_path / 'log')!r}))\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=app_folder)
    try:
        wait_until(lambda: len(descendants(process.pid)) == 1)
        [child] = descendants(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not exists(child))
    finally:
        process.kill()
        process.wait()


def test_a_folder_takes_one_deployment_at_a_time(tmp_path):
    with (tmp_path / LOCK_FILE).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=rf"--output {tmp_path}"):
            deploy_and_run(app_folder, {}, 2, tmp_path, 9)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_command_cleans_up_after_a_signal(monkeypatch, number, code):
    removed = []

    def deployed(*_):
        try:
            os.kill(os.getpid(), number)
        finally:
            removed.append(True)

    monkeypatch.setattr(keel.deployment.loopback, "deploy_and_run", deployed)
    before = signal.signal(number, signal.SIG_DFL)  # a shell may have it ignored
    try:
        found = main(["deploy", "loopback", "num-rounds=1"])
    except SystemExit as error:
        found = error.code
    finally:
        signal.signal(number, before)
    assert (found, removed) == (code, [True])
