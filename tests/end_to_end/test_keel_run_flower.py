"""`keel run --engine flower`: real `flwr run`, stopped by Ctrl-C; nothing of it is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from cluster_fixtures import assert_only_who_has_the_token_joins
from PIL import Image
from run_fixtures import SMALL, assert_same_run, keel_run, summary_of

from keel.cli.interrupts import ENDED, STOPPING
from keel.deployment.simulation import MARK, marked_processes
from keel.runs import SavedRun
from server_app.inline import run_inline
from server_app.summary import read_manifest

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]
root = Path(__file__).parent.parent.parent
keys = SMALL | {
    **{"method": "fedreco", "fedreco.eta-0": 0.5, "local-test-fraction": 0.2},
    "fraction-train": 0.67,  # two of three
}
words = [f"{key}={value}" for key, value in keys.items() if key != "num-rounds"]


long_run = [*words, "num-rounds=1000", "run-name=cut", "--clients", "3"]


def started(home, *arguments):
    """`keel run --engine flower` with a home of its own, killed at the end.

    Its $TMPDIR, as on some clusters, is longer than the path of a socket may be.
    """
    own = {"KEEL_HOME": str(home), "PYTHONPATH": str(root), MARK + "_TEST": str(home)}
    own["TMPDIR"] = str(home)
    return keel_run("--engine", "flower", *arguments, cwd=home, env=os.environ | own)


def started_by(home):
    """Commands of the living processes that inherited the environment of `started`."""
    entry, found = f"{MARK}_TEST={home}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def assert_all_end(home):
    """A process that was killed is there for a moment."""
    deadline = time.monotonic() + 10
    while started_by(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert started_by(home) == []


def test_a_flower_run_is_stopped_by_ctrl_c_and_resumed_to_the_same_bits(tmp_path, no_pictures):
    home = tmp_path / "home"
    home.mkdir()
    directory = home / "runs" / "cut"
    out = ""
    with started(home, *long_run) as process:
        for line in process.stdout:  # what is printed, which the run directory may be ahead of
            out += line
            if line.startswith("round    2/1000   personal"):
                break
        assert any("superlink_server" in command for command in started_by(home)), out
        processes = [Path(f"/proc/{pid}") for pid in marked_processes(f"{process.pid}-")]
        [raylet] = [each for each in processes if (each / "exe").readlink().name == "raylet"]
        assert_only_who_has_the_token_joins(raylet)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    out += rest
    assert process.returncode == 130, err
    assert err == ""
    assert "round    1/1000   personal" in out
    num = len(read_manifest(directory)["workers"])
    assert f"\nworkers     {num} on cpu\n" in out[: out.index("round    1/1000")]
    assert f": {num} on cpu\n" in (directory / "run.log").read_text()
    assert out.count(STOPPING) == 1
    assert "keel resume cut" in out
    assert summary_of(directory)["status"] == "stopped"
    assert_all_end(home)

    done = SavedRun(directory).rounds
    assert f"stopped after round {done}" in out
    run_inline({"resume": str(directory), "num-rounds": done + 1}, 3)
    whole = run_inline(keys | {"num-rounds": done + 1, "output-dir": str(tmp_path / "whole")}, 3)
    assert_same_run(directory, whole)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_flower_run_with_all_its_processes_at_once(tmp_path):
    with started(tmp_path, *long_run) as process:
        for line in process.stdout:
            if line.startswith("round    2/1000"):
                process.send_signal(signal.SIGINT)
            if line.startswith(STOPPING):
                time.sleep(0.5)  # `flwr stop` is under way
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert out.endswith(f"{ENDED}\n")
    assert_all_end(tmp_path)
    run = SavedRun(tmp_path / "runs" / "cut")
    done = run.rounds
    assert done >= 2
    run_inline({"resume": str(run.directory), "num-rounds": done + 1}, 3)
    assert SavedRun(run.directory).rounds == done + 1


@pytest.mark.slow
def test_a_flower_run_outlives_a_suspension_of_all_its_processes(tmp_path):
    """Flower's SuperLink ended it: no heartbeat had come for more than a minute."""
    with started(tmp_path, *words, "num-rounds=60", *long_run[-3:]) as process:
        for line in process.stdout:
            if line.startswith("round  2/60"):
                break
        pids = [process.pid, *marked_processes(f"{process.pid}-")]
        assert len(pids) > 4
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            if number == signal.SIGSTOP:
                time.sleep(100)
        _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    assert SavedRun(tmp_path / "runs" / "cut").rounds == 60


@pytest.mark.slow
def test_what_a_killed_keel_run_leaves_of_a_flower_run_is_stopped(home, printed):
    """Its SuperLink used to stay for good, and `keel stop` named `flwr stop`."""
    with started(home, *long_run) as process:
        for line in process.stdout:
            if line.startswith("round    2/1000"):
                break
    assert any("superlink_server" in command for command in started_by(home))
    assert "after round" in printed("stop", "cut")
    assert_all_end(home)
    run = SavedRun(home / "runs" / "cut")
    done = run.rounds
    run_inline({"resume": str(run.directory), "num-rounds": done + 1}, 3)
    assert SavedRun(run.directory).rounds == done + 1


@pytest.mark.slow
def test_a_flower_run_that_fails_is_one_line_and_code_1(tmp_path):
    """A folder with one class is refused by the run itself, which has read the data."""
    for split in ("train", "test"):
        folder = tmp_path / "data" / split / "only"
        folder.mkdir(parents=True)
        for number in range(60):
            Image.new("L", (28, 28)).save(folder / f"{number}.png")
    own = [f"source=folder:{tmp_path}/data", *(w for w in words if not w.startswith("source="))]
    with started(tmp_path, *own, "--clients", "2") as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    assert err.startswith(f"error: source = 'folder:{tmp_path}/data' has 1 class: expected")
    assert err.count("\n") == 1
    assert "Traceback" not in out
    assert started_by(tmp_path) == []
