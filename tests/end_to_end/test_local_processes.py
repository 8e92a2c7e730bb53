"""The restarts of a loopback deployment: what dies comes back, and nothing is left at the end."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_fixtures import wait_until
from tools.processes import descendants

import keel.deployment.loopback
from keel.cli.main import main
from keel.deployment.loopback import LocalProcess, Loopback, deploy_and_run, restarting
from keel.deployment.simulation import locked
from keel.runs import LOCK_FILE
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


def test_a_killed_process_is_restarted_and_its_neighbour_left_alone(start):
    first, second = start(sleeper, sleeper)
    pid, neighbour = first.process.pid, second.process.pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: first.starts == 2)
    assert first.process.pid != pid
    assert (second.starts, second.process.pid) == (1, neighbour)


def test_children_of_a_killed_process_do_not_outlive_its_pause(start):
    [only] = start(parent)
    wait_until(lambda: descendants(only.process.pid))
    [child] = descendants(only.process.pid)
    os.kill(only.process.pid, signal.SIGKILL)
    wait_until(lambda: only.starts == 2)
    wait_until(lambda: not exists(child))


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


def test_a_process_whose_parent_ended_before_it_could_ask_ends_too():
    ask = (
        "import os; from protocol.processes import end_with_parent\n"
        "end_with_parent(os.getppid()); print('lives', flush=True)\n"
        "end_with_parent(os.getpid()); print('lives', flush=True)"
    )
    command = [sys.executable, "-c", ask]
    said = subprocess.run(command, cwd=app_folder, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stdout) == (1, "lives\n")


def test_the_limit_of_a_run_says_how_to_continue_it(tmp_path, monkeypatch):
    """It said only that the run is running."""

    @contextmanager
    def running(root, node_configs):
        yield SimpleNamespace(superlink=SimpleNamespace(submit=lambda *_: 7, wait=wait))

    def wait(run_id, timeout_s):
        raise TimeoutError(f"run {run_id} is running after {timeout_s:g} s")

    monkeypatch.setattr(keel.deployment.loopback, "running", running)
    for root, hint in ((tmp_path, " and the same --folder"), (None, "; a stateful method needs ")):
        with pytest.raises(TimeoutError) as caught:
            deploy_and_run(app_folder, {}, 2, root, 9)
        assert str(caught.value).startswith("run 7 is running after 9 s, the limit of --timeout")
        assert f"with resume=DIRECTORY{hint}" in str(caught.value)


def test_a_folder_may_be_relative(tmp_path, monkeypatch):
    """No process found its credentials: theirs is the app's directory, in which one was made."""
    monkeypatch.chdir(tmp_path)
    local = Loopback(Path("state"), ["a"])
    paths = [local.root, local.credentials, local.superlink.environment["FLWR_HOME"]]
    assert all(Path(path).is_relative_to(tmp_path / "state") for path in paths)
    assert all(word.startswith("/") for word in local.supernode_command("a", {}) if ".key" in word)


def test_a_folder_takes_one_deployment_at_a_time(tmp_path):
    """A second one got the first's clients, which have the same keys, and lost them with it."""
    with (
        locked(tmp_path / LOCK_FILE),
        pytest.raises(ValueError, match=rf"--folder {tmp_path}: another deployment is running"),
    ):
        deploy_and_run(app_folder, {}, 2, tmp_path, 9)


def test_a_resumed_run_stays_where_it_is(monkeypatch):
    """It was refused: its output-dir cannot change."""
    keys = []

    def deployed(app, overrides, *_):
        keys.append(overrides)
        return True, "log"

    monkeypatch.setattr(keel.deployment.loopback, "deploy_and_run", deployed)
    assert main(["deploy", "loopback", "resume=/runs/a"]) == 0
    assert main(["deploy", "loopback", "num-rounds=1"]) == 0
    assert ["output-dir" in given for given in keys] == [False, True]


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "resume=DIRECTORY continues it; a stateful method needs --folder"),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
    ],
)
def test_the_command_cleans_up_after_any_signal(monkeypatch, capsys, number, code, said):
    """SIGTERM and a closed terminal left the temporary keys; Ctrl-C printed nothing."""
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
    assert said in capsys.readouterr().out
