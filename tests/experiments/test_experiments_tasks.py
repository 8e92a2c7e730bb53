"""What a run is executed with, and what a worker does with it; without Ray."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from client_app.machine import data_digest
from client_app.setup import open_source
from keel.experiments import tasks
from keel.experiments.plan import runs_needed
from keel.experiments.recipe import load_recipe
from keel.experiments.runs import Options
from keel.experiments.tasks import (
    FULL_S,
    LOST_S,
    RayTasks,
    Resources,
    claimed,
    connected,
    execute,
    printing_to,
    ray_folder,
    unfit,
)
from protocol.code import code_version
from protocol.config import resolve_config
from protocol.ray_nodes import Node

NODES = [Node("10.0.0.1", 8, 2), Node("10.0.0.2", 4, 0)]
sweep = Path(__file__).parent.parent.parent / "docs" / "sweep.yaml"


@pytest.mark.parametrize(
    ("resources", "gpus", "slots"),
    [
        (Resources(), 1, 2),  # a GPU each
        (Resources(gpus=0), 0, 12),
        (Resources(gpus=0.5), 0.5, 4),
        (Resources(workers=3), 0.5, 3),  # two on one of the GPUs
        (Resources(workers=8), 0.25, 8),
        (Resources(workers=1), 1, 1),
        (Resources(cpus=4, gpus=0), 0, 3),
        (Resources(cpus=4, gpus=0, workers=2), 0, 2),
    ],
)
def test_runs_at_once_are_those_whose_shares_fit(resources, gpus, slots):
    assert resources.gpus_on(NODES) == gpus
    assert resources.slots_on(NODES) == slots


def test_no_gpu_is_used_where_there_is_none_or_none_is_wanted(monkeypatch):
    assert Resources(workers=2).gpus_on(NODES[1:]) == 0
    monkeypatch.setenv("KEEL_CPU_WORKERS", "1")
    assert Resources().gpus_on(NODES) == 0
    assert Resources(gpus=1).gpus_on(NODES) == 1


def test_a_share_that_no_machine_has_is_refused_in_a_line():
    with pytest.raises(ValueError, match=r"10.0.0.1 has 8 CPUs and 2 GPUs; 10.0.0.2 has") as error:
        Resources(cpus=16).slots_on(NODES)
    assert "16 CPUs and 1 GPU that a run needs (--cpus-per-run" in str(error.value)


def test_a_machine_with_other_code_or_without_the_folder_is_unfit(tmp_path):
    assert unfit(tmp_path, code_version()) == ""
    assert unfit(tmp_path, "sources x").startswith(f"runs {code_version()}, this one sources x")
    assert unfit(tmp_path / "no", code_version()).startswith(f"does not see {tmp_path}: set ")


def test_a_machine_with_other_data_is_unfit(tmp_path):
    config = resolve_config({"source": "digits"})
    digest = data_digest(open_source(config))
    assert unfit(tmp_path, code_version(), [(config, digest)]) == ""
    reason = unfit(tmp_path, code_version(), [(config, "0" * 16)])
    assert reason.startswith(f"has other data for source = 'digits', with the digest {digest}, ")


def test_a_run_is_not_executed_on_a_machine_that_has_joined_with_other_data(run):
    asked = []
    remote = SimpleNamespace(remote=lambda *words: asked.append(words))
    config, other = resolve_config(run.keys), resolve_config({"source": "svhn"})
    with RayTasks(Resources(), run.folder) as runner:
        runner._remote, runner.data = remote, [(other, "0" * 16), (config, "0" * 16)]
        runner.submit(run)
        runner.pending.clear()
    reason = execute(*asked[0])
    assert reason.startswith(f"its machine has other data for source = {config.data.source!r}, ")
    assert not run.attempts()


@pytest.fixture
def run(tmp_path):
    recipe = load_recipe(str(sweep))
    found = next(runs_needed(recipe, recipe.cells, Options("paper", {}, [0], True), tmp_path, ()))
    found.folder.mkdir(parents=True)
    return found


def test_a_locked_run_is_left_alone(run):
    with claimed(run):
        assert execute(run, code_version()) is None
    assert not run.attempts()


def test_a_file_system_without_locks_is_an_error_and_not_another_runner(run, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(tasks.fcntl, "flock", flock)
    with pytest.raises(OSError, match="not implemented"):
        claimed(run)


@pytest.mark.parametrize(
    ("error", "reason", "logged"),
    [
        (ValueError("no\ndata"), "no data", "error: no\ndata\n"),
        (KeyError("x"), "KeyError: 'x'", "Traceback"),
    ],
)
def test_why_a_run_failed_is_returned_and_logged(error, reason, logged, run, monkeypatch, capfd):
    def run_inline(*_, **__):
        raise error

    monkeypatch.setattr("server_app.inline.run_inline", run_inline)
    monkeypatch.setattr("server_app.app.log_to_stdout", lambda: None)
    directory = Path.cwd()
    with capfd.disabled():
        assert execute(run, code_version()) == reason
    assert logged in (run.folder / "log.txt").read_text()
    assert run.failure() == "failed"  # although it has no run directory
    assert Path.cwd() == directory
    with contextlib.closing(claimed(run)) as lock:
        assert lock


def test_what_libraries_print_is_logged_too_and_no_longer_than_the_run(tmp_path, capfd):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    with printing_to(log):
        os.write(1, b"one\n")
        os.write(2, b"two\n")
    print("three", file=sys.stderr)
    assert log.read_text() == "before\none\ntwo\n"
    assert capfd.readouterr().err == "three\n"


def test_the_log_of_a_run_is_for_this_user_alone_as_its_run_directory_is(tmp_path):
    log = tmp_path / "log.txt"
    before = os.umask(0o022)
    try:
        with printing_to(log):
            (tmp_path / "other").touch()
    finally:
        os.umask(before)
    assert log.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o644


def test_after_a_run_on_a_full_disk_the_process_has_its_own_output_again(monkeypatch, capfd):
    """Else Ray's worker, which goes on to the next run, fails as it prints and counts as killed."""
    with open(1, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with printing_to(Path("/dev/full")):
            print("lost")
        os.write(1, b"here\n")
    assert "here\n" in capfd.readouterr().out


def test_a_cluster_that_ends_is_named_once_it_has_been_away_for_a_while(monkeypatch):
    """Ray ended the process after a minute, with lines of its own."""
    import ray

    now = [1000.0]
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setattr(
            ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address)
        )
        runner = RayTasks(Resources(address="auto", named="RAY_ADDRESS"), Path())
        assert runner.wait(0) == []
    now[0] += LOST_S
    assert runner.wait(0) == []  # it may be back soon
    now[0] += 1
    with pytest.raises(RuntimeError, match="auto"):
        runner.wait(0)


def test_a_cluster_that_executes_nothing_is_named_once(run, monkeypatch):
    """The bars stood at 0, and nothing said why."""
    now, folder = [1000.0], run.folder.parent
    monkeypatch.setattr(tasks.time, "monotonic", lambda: now[0])
    alone, runner = RayTasks(Resources(), folder), RayTasks(Resources(address="auto"), folder)
    for each in (alone, runner):
        each.pending = {object(): run}
        each._executed = now[0]
    assert not runner.is_kept_waiting()
    now[0] += FULL_S - 1
    with claimed(run) as lock:
        assert lock
        assert not runner.is_kept_waiting()  # a worker executes it
    now[0] += 2
    assert not runner.is_kept_waiting()  # as where the next run starts
    now[0] += FULL_S
    assert runner.is_kept_waiting()
    now[0] += FULL_S
    assert not runner.is_kept_waiting()
    assert not alone.is_kept_waiting()


def test_an_empty_cluster_address_is_refused(refusal, tmp_path):
    """As of an unset variable: the runs were executed on this machine alone."""
    error = refusal("experiments", "run", str(sweep), "--output", str(tmp_path), "--ray", "")
    assert error == "error: --ray is empty: expected HOST:PORT of a Ray cluster\n"


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("nan", "a finite number >= 0\n"),
        ("1.5", "a whole number or a fraction"),
        ("1e-05", "a whole number or a fraction"),  # was taken as 0
    ],
)
def test_an_invalid_share_of_a_gpu_is_refused(refusal, tmp_path, share, expected):
    error = refusal(
        "experiments", "run", str(sweep), "--output", str(tmp_path), "--gpus-per-run", share
    )
    assert error.startswith(f"error: --gpus-per-run {share}: expected {expected}")


def test_a_cluster_of_the_environment_is_used(refusal, tmp_path, monkeypatch):
    """The runs were executed on this machine alone, and nothing said so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        error = refusal("experiments", "run", str(sweep), "--output", str(tmp_path))
        assert error.startswith(f"error: RAY_ADDRESS {address}: nothing listens there")


def test_a_ray_that_does_not_start_leaves_no_process(monkeypatch):
    started = []

    def init(**options):
        code = "import time; time.sleep(60)"
        folder = options["_temp_dir"]
        process = subprocess.Popen([sys.executable, "-c", code, folder])
        started.append(process)
        while folder.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        raise TimeoutError("30 s")

    ray = SimpleNamespace(init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(tasks, "skip_unused_processes", lambda **_: None)  # imports Ray's parts
    with pytest.raises(RuntimeError, match="Ray did not start: 30 s"), connected(Resources()):
        pass
    assert [process.wait(10) for process in started] == [-signal.SIGKILL] * tasks.START_ATTEMPTS


def test_the_next_runner_removes_the_folder_of_one_that_was_killed(tmp_path):
    code = "from keel.experiments.tasks import *; import os\n"
    code += f"with ray_folder(Path({str(tmp_path)!r})) as own: os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    [killed] = tmp_path.iterdir()
    (killed / "session").mkdir()
    other = tmp_path / "keel-ray-of-flower"  # of `keel run`, whose processes may live
    other.mkdir()
    with ray_folder(tmp_path) as first, ray_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {other, Path(first), Path(second)}
    assert [*tmp_path.iterdir()] == [other]


def test_a_worker_has_imported_the_code_that_its_digest_is_of():
    """A file that is edited between two runs of a worker would otherwise count as the old one."""
    code = "import sys, keel.experiments.tasks, server_app.inline; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    root = Path(__file__).parent.parent.parent
    needed = [*root.glob("strategies/*.py"), *root.glob("client_app/methods/*.py")]
    names = {f"{path.parent.relative_to(root)}/{path.stem}".replace("/", ".") for path in needed}
    assert len(names) > 30
    names = {name.removesuffix(".__init__") for name in names}
    assert names - set(found.stdout.split()) == set()
