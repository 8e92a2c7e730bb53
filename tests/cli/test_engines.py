"""What the engines are made of: the app, flwr's words, and the processes that are ours."""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args

from flower_adapter import superlink_unavailable
from keel.cli import engines
from keel.cli.engines import FlowerRun, Job, follow, is_from_keel, run_on_deployment, worker_rows
from keel.cli.progress import Terminal, round_line
from keel.deployment import simulation, superlink
from keel.deployment.credentials import make_credentials
from keel.deployment.simulation import (
    MARK,
    end_processes,
    kill_own_processes,
    locked,
    marked_processes,
    simulation_superlink,
)
from keel.deployment.superlink import SuperLinkClient, app_directory, app_packages, free_ports
from keel.runs import SavedRun, is_locked, lock_holder
from protocol.processes import num_cores
from server_app import history
from server_app.report import Reporter
from tests.tools.run_directories import line_of, make_run

root = Path(__file__).parent.parent.parent


def names_in(fab):
    """What a Flower app file (FAB) holds; its own list of contents aside."""
    with zipfile.ZipFile(io.BytesIO(fab)) as file:
        return {name for name in file.namelist() if not name.startswith(".info")}


@pytest.mark.end_to_end
def test_an_installed_keel_makes_the_same_app_as_its_checkout(tmp_path, monkeypatch):
    expected = names_in(build_fab_from_disk(root))
    for package in (*app_packages, "keel"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / package, tmp_path / package, ignore=skip)
    shutil.copy(root / "pyproject.toml", tmp_path / "protocol")
    monkeypatch.setattr("protocol.config.app_folder", tmp_path)
    monkeypatch.setattr(superlink, "app_folder", tmp_path)
    with app_directory() as app:
        assert app != tmp_path
        assert names_in(build_fab_from_disk(app)) == expected
    assert not app.exists()


def test_flwr_reads_back_what_a_job_says():
    overrides = {"method": "fedreco", "fedreco.k-u": "2 epochs", "flip": True, "lr": 0.1,
                 "num-rounds": 3, "source": "folder:/a b=c"}  # fmt: skip
    job = Job(overrides, 4, cpus_per_client=2, gpus_per_client=0.25)
    assert parse_config_args([superlink.run_config(job.overrides)]) == overrides
    found = tomllib.loads(job.federation_config().replace(" ", "\n"))
    assert job.num_workers == max(1, min(4, num_cores() // 2))
    assert found == {
        "num-supernodes": job.num_workers,
        "client-resources-num-cpus": 2,
        "client-resources-num-gpus": 0.25,
    }


def test_a_job_has_as_many_workers_as_cores_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("keel.cli.engines.num_cores", lambda: 3)
    assert Job({}, 10).num_workers == 3
    assert Job({}, 10, cpus_per_client=2).num_workers == 1


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("x\n12:00:00 error: no data\nTraceback\nRuntimeError: no data\n", "no data"),
        ("Error: SuperLink is unavailable\n", "SuperLink is unavailable"),
        ("something\nelse\n\n", "else"),
        (
            "RuntimeError: Ray did not start\nThe above\nRuntimeError: crashed\nFor more: <url>\n",
            "RuntimeError: Ray did not start",
        ),
        ("╭─ Error ───╮\n│ unavailable.    │\n╰───────────╯\n", "unavailable."),
        ("", "its log is empty"),
    ],
)
def test_the_reason_of_a_failure_is_one_line(tmp_path, log, reason):
    path = tmp_path / "flwr.log"
    path.write_text(log)
    assert FlowerRun(SuperLinkClient(tmp_path, "localhost:1"), root, path).reason() == reason


@pytest.mark.parametrize(
    "details", ["No heartbeat received from the task", "Task failed with unknown error."]
)
def test_a_run_whose_process_was_ended_is_not_explained_by_its_last_line(
    details, tmp_path, monkeypatch
):
    """The error was `12:00:02 round 2/5: accuracy 10.00 %`.

    The second is Flower's after a SIGTERM, as when the server's machine is restarted.
    """
    info = {"status": "finished:failed", "status-details": details}
    monkeypatch.setattr(SuperLinkClient, "run_info", lambda self, run_id: info)
    flower = FlowerRun(SuperLinkClient(tmp_path, "localhost:1"), root, tmp_path / "log")
    flower.read(io.StringIO("Successfully started run 12\n12:00:02 round 2/5: accuracy 10.00 %\n"))
    said = "the run's process was ended, or lost its SuperLink or, in a simulation, its Ray cluster"
    found = f"{said}; `keel status` on its machine may have the reason"
    assert flower.reason() == found
    flower.read(io.StringIO("OSError: Broken pipe\n"))  # a worker's, if its cluster was lost
    is_lost = "heartbeat" in details
    assert flower.reason() == (found if is_lost else "OSError: Broken pipe")
    flower.read(io.StringIO("12:00:03 error: no data\n"))
    assert flower.reason() == "no data"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("path", ["/dev/full", "/missing/flwr.log"])
def test_a_log_that_does_not_fit_on_the_disk_hides_neither_the_run_nor_its_end(path, tmp_path):
    """`keel run --engine flower` and `--engine deployment` waited for ever."""
    flower = FlowerRun(SuperLinkClient(tmp_path, "localhost:1"), root, Path(path))
    flower.read(io.StringIO("Successfully started run 12\n12:00:03 error: no data\n"))
    assert flower.run_id == "12"
    printed = [flower.printed.get(timeout=1) for _ in range(3)]
    assert printed[1:] == ["12:00:03 error: no data", None]
    assert flower.ended.is_set()


ENDS = {
    "finished:completed": nullcontext(),
    "finished:failed": pytest.raises(RuntimeError, match=r"^the run failed: 0 accepted replies$"),
    "finished:stopped": pytest.raises(RuntimeError, match=r"^the run stopped: 0 accepted replies$"),
    "Ctrl-C": pytest.raises(KeyboardInterrupt),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_goes_on_while_its_superlink_restarts(monkeypatch, end):
    """The log breaks off, and for a while nobody answers: the run was called failed.

    Where it did fail later, the reason was that nobody had answered.
    """
    answers = iter([RuntimeError(f"{superlink_unavailable}."), "running", end])
    stopped = []

    def run_info(self, run_id):
        answer = next(answers, end)
        if isinstance(answer, RuntimeError):
            raise answer
        if answer == "Ctrl-C":
            raise KeyboardInterrupt
        return {"status": answer}

    def start(self, job, arguments):
        text = "Successfully started run 12\n12:00:01 round 1/5: accuracy 9.00 %\n"
        self.read(io.StringIO(f"{text}Error: {superlink_unavailable}.\n"))

    whole = "12:00:02 round 2/5: accuracy 10.00 %\n12:00:09 error: 0 accepted replies\n"
    monkeypatch.setattr(FlowerRun, "start", start)
    monkeypatch.setattr(SuperLinkClient, "run_info", run_info)
    monkeypatch.setattr(SuperLinkClient, "log", lambda self, run_id: whole)
    monkeypatch.setattr(SuperLinkClient, "stop", lambda self, run_id: stopped.append(run_id))
    monkeypatch.setattr(superlink, "poll_s", 0)
    printed = []
    terminal = SimpleNamespace(
        phase=lambda text: None, print=lambda line, markup: printed.append(line)
    )
    with ENDS[end]:
        run_on_deployment(Job({}, 2, federation="localhost:1"), terminal)
    assert "waiting for run 12, which may continue there" in printed[1]
    assert terminal.last_round == 1
    assert stopped == ([12] if end == "Ctrl-C" else [])


def test_a_run_that_is_stopped_on_the_server_has_not_failed(monkeypatch, caplog):
    caplog.set_level("INFO", logger="keel")
    reporter = SimpleNamespace(lock=nullcontext(), is_finished=False, write=print, history=[{}])
    Reporter.interrupted(reporter)

    def start(self, job, arguments):
        text = f"12:00:01 round 1/5: accuracy 9.00 %\n12:00:02 {caplog.messages[-1]}\n"
        self.read(io.StringIO(f"Successfully started run 12\n{text}"))

    monkeypatch.setattr(FlowerRun, "start", start)
    info = {"status": "finished:failed", "status-details": "Task failed with unknown error."}
    monkeypatch.setattr(SuperLinkClient, "run_info", lambda *_: info)
    terminal = SimpleNamespace(phase=lambda text: None, print=lambda line, markup: None)
    with pytest.raises(KeyboardInterrupt):
        run_on_deployment(Job({}, 2, federation="localhost:1"), terminal)
    assert terminal.last_round == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_whose_whole_log_does_not_fit_on_the_disk_has_still_finished():
    """It finished while the log was broken off: the error of writing the log was reported."""
    client = SimpleNamespace(
        wait=lambda run_id, seconds: "finished:completed", log=lambda run_id: "the whole log"
    )
    flower = SimpleNamespace(
        client=client, status=lambda: "running", run_id="12", log_path=Path("/dev/full")
    )
    terminal = SimpleNamespace(print=lambda line, markup: None)
    assert engines.outcome(flower, terminal) == "finished:completed"


def test_why_a_superlink_cannot_be_reached_is_said(tmp_path, monkeypatch):
    """Flower says that it is unavailable, be it the port, the CA or an expired certificate."""
    make_credentials(tmp_path, ["localhost"], [])
    federation = f"localhost:{free_ports(1)[0]}"

    def start(self, job, arguments):
        self.read(io.StringIO(f"{superlink_unavailable}.\n"))

    monkeypatch.setattr(FlowerRun, "start", start)
    terminal = SimpleNamespace(phase=lambda text: None)
    job = Job({}, 2, federation=federation, root_certificates=tmp_path / "ca/ca.pem")
    text = f"^the run did not start: the SuperLink {federation} cannot be reached: .*refused"
    with pytest.raises(RuntimeError, match=text):
        run_on_deployment(job, terminal)
    with pytest.raises(RuntimeError, match=f"^the run did not start: {superlink_unavailable}"):
        run_on_deployment(replace(job, root_certificates=None), terminal)


def test_lines_of_keel_are_told_from_flowers():
    assert is_from_keel("12:34:56 round 1/5: accuracy 10.00 %")
    assert not is_from_keel("INFO :      Starting Flower ServerApp")


def test_the_replies_of_a_round_are_read_from_flwrs_output(tmp_path):
    flower = FlowerRun(SuperLinkClient(tmp_path, "localhost:1"), root, tmp_path / "log")
    flower.read(
        io.StringIO(
            "Successfully started run 12\n"
            "12:00:01 round 2: 3 of 10 clients have answered\n"
            "12:00:02 round 2/5: accuracy 10.00 %\n"
        )
    )
    assert (flower.run_id, flower.replies) == ("12", ("round 2", 3, 10))


def test_only_marked_processes_are_ended():
    mark = f"test-{os.getpid()}"
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    code = (
        "import subprocess, time; "
        f"subprocess.Popen({sleep!r}, start_new_session=True); time.sleep(100)"
    )
    other = subprocess.Popen(sleep)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ | {MARK: mark}, start_new_session=True
        )
        while len(marked_processes(mark)) < 2:
            assert process.poll() is None
        end_processes(process, mark)
        assert marked_processes(mark) == []
        assert process.poll() is not None
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_second_ctrl_c_kills_what_came_of_this_process_and_nothing_else():
    """A real run ended so is a slow test."""
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    marks = (f"{os.getpid()}-1", f"{os.getpid() + 1}-1")
    ours, other = (subprocess.Popen(sleep, env=os.environ | {MARK: mark}) for mark in marks)
    try:
        while marked_processes(marks[0]) != [ours.pid]:  # it is just starting
            assert ours.poll() is None
        kill_own_processes()
        assert ours.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for each in (ours, other):
            each.kill()
            each.wait()


def test_the_lock_names_the_process_that_can_stop_the_run(tmp_path):
    path = tmp_path / ".lock"
    with locked(path):
        assert is_locked(path)
        assert lock_holder(path) == os.getpid()
    assert not is_locked(path)


def test_a_lock_that_does_not_fit_on_the_disk_is_named(tmp_path):
    """Of a run whose disk was full only the reason was said."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match=r"too large: '.*/\.lock'"), locked(tmp_path / ".lock"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_of_two_superlinks_that_start_at_once_in_a_folder_one_is_refused(tmp_path, monkeypatch):
    """Two resumes of a run: the second waited for the first, or removed what it needed."""

    @contextmanager
    def started(folder, variables):
        found.append(sorted(path.name for path in folder.iterdir()))
        (folder / "config.toml").write_text("of the first")
        yield None

    found, folder = [], tmp_path / "run"
    (folder / "old").mkdir(parents=True)
    (folder / "flwr.log").write_text("of an attempt that failed")
    monkeypatch.setattr(simulation, "started_superlink", started)
    with simulation_superlink(folder):
        with (
            pytest.raises(ValueError, match=r"^a run named run is running: wait"),
            simulation_superlink(folder),
        ):
            pass
        assert (folder / "config.toml").exists()
        assert folder.stat().st_mode & 0o777 == 0o700  # other users could read the run's log
        assert lock_holder(folder / ".lock") == os.getpid()
    assert found == [[".lock"]]
    with simulation_superlink(folder):
        assert len(found) == 2


def test_a_superlink_whose_start_is_interrupted_is_ended(tmp_path, monkeypatch):
    """It stayed for good: Ctrl-C came before Popen had returned, right after the plan was shown."""
    started = []

    def interrupted(command, env, **options):
        started.append(popen(["sleep", "100"], env=env))
        raise KeyboardInterrupt

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), simulation_superlink(tmp_path / "run"):
        pass
    assert [process.wait(10) for process in started] == [-signal.SIGTERM]
    assert not Path((tmp_path / "run" / "mark").read_text().splitlines()[1]).exists()


def test_following_a_run_reads_each_line_once_and_reports_the_rounds_after_the_last(
    tmp_path, monkeypatch
):
    """Three looks at a history that grows; the last round of an attempt before is known."""
    run = make_run(tmp_path / "run", {"method": "fedavg"}, 5, num_written=0)
    lines = [json.dumps(line_of(n, Random(n), clients=["a", "b"])) + "\n" for n in range(1, 6)]
    lines[4] = json.dumps(json.loads(lines[4]) | {"left_out": {"a": "late", "b": "late"}}) + "\n"
    reported, parsed, looks = [], [], iter([lines[:2], lines[2:3], lines[3:]])
    terminal = SimpleNamespace(
        begin=lambda directory, last_round: None,
        on_round=lambda line: reported.append((line["round"], round_line(line, 5, ""))),
        on_run_end=lambda summary: None,
    )

    def wait(seconds):
        new = next(looks)
        os.utime(run / "summary.json")  # the attempt that is followed has written it
        with (run / "history.jsonl").open("a") as file:
            file.writelines(new)
        return new[-1] is lines[-1]

    condensed = history.condensed
    monkeypatch.setattr(history, "condensed", lambda text: parsed.append(text) or condensed(text))
    flower = SimpleNamespace(ended=SimpleNamespace(wait=wait), run_id="1", replies=("", 0, 0))
    follow(Job({}, 2, run), 1, terminal, flower)
    assert [number for number, _ in reported] == [2, 3, 4, 5]
    assert "2 left out" in reported[-1][1]
    assert parsed == [line.encode() for line in lines]


def test_a_resumed_run_begins_when_its_new_attempt_does(tmp_path):
    """It began with the summary of the attempt before: the start counted as time of its rounds."""
    run = make_run(tmp_path / "run", {"method": "fedavg"}, 5, num_written=2)
    begun, seen = [], []
    terminal = SimpleNamespace(
        begin=lambda directory, last_round: begun.append(last_round),
        on_run_end=lambda summary: None,
    )

    def wait(seconds):
        seen.append(list(begun))
        if len(seen) == 2:
            os.utime(run / "summary.json")
        return len(seen) == 3

    flower = SimpleNamespace(ended=SimpleNamespace(wait=wait), run_id="1", replies=("", 0, 0))
    follow(Job({}, 2, run), 2, terminal, flower)
    assert (seen, begun) == ([[], [], [2]], [2])


@pytest.mark.parametrize("before", ["finished", "failed: of the attempt before"])
def test_a_resume_that_the_server_refuses_fails_with_its_reason(home, monkeypatch, before):
    """`keel resume --engine flower` took the state of the attempt before: finished, exit code 0."""
    run = make_run(home / "run", {"method": "fedavg"}, 2, status=before)
    assert SavedRun(run).state == before
    refused = SimpleNamespace(
        start=lambda job, arguments: None, reason=lambda: "the data has changed", replies=("", 0, 0)
    )
    refused.ended, refused.run_id = SimpleNamespace(wait=lambda seconds: True), "1"
    monkeypatch.setattr(engines, "simulation_superlink", lambda *_: nullcontext())
    monkeypatch.setattr(engines, "FlowerRun", lambda *_: refused)
    with Terminal(4) as terminal, pytest.raises(RuntimeError, match=r"^the data has changed \("):
        engines.run_on_flower(Job({"resume": str(run)}, 2, run), terminal)


def worker(node, device):
    return {"node": node, "device": device, "machine": "M"}


OWN_GPU = ("GPUs", "each worker has its own; --gpus-per-client sets another share")


@pytest.mark.parametrize(
    ("workers", "takes_gpus", "rows"),
    [
        ([worker("a", "cpu")] * 2, True, [("workers", "2 on cpu")]),
        ([worker("a", "cuda:0")] * 4, False, [("workers", "4 on cuda:0")]),
        (
            [worker("a", "cuda:0"), worker("a", "cuda:1"), worker("b", "cuda:0")],
            True,
            [("workers", "a: 1 on cuda:0, 1 on cuda:1"), ("workers", "b: 1 on cuda:0"), OWN_GPU],
        ),
    ],
)
def test_the_devices_of_workers_are_a_row_for_each_machine(workers, takes_gpus, rows):
    assert worker_rows({"workers": workers}, takes_gpus) == rows


def test_a_flower_runs_workers_and_warnings_are_shown_before_its_rounds(tmp_path, capsys):
    """Those of this attempt: the manifest and the log of the one before are there first."""
    run = make_run(tmp_path / "run", {"method": "fedavg"}, 2, num_written=1)
    manifest, log = run / "manifest.json", run / "run.log"
    manifest.write_text(json.dumps({"workers": [worker("a", "cpu")]}))
    os.utime(manifest, (1, 1))
    head = "2026-01-01 10:00:00,000 run"
    log.write_text(f"{head} WARNING old\n")
    line = json.dumps(line_of(2, Random(2), clients=["a"])) + "\n"

    def append(path, text):
        with path.open("a") as file:
            file.write(text)

    looks = iter(
        [
            lambda: append(log, f"{head} INFO x run WARNING no\n{head} WARNING differ: [b]"),
            lambda: os.utime(run / "summary.json"),
            lambda: manifest.write_text(json.dumps({"workers": [worker("a", "cuda:0")]})),
            lambda: append(log, " 100 %\nTraceback\n"),
            lambda: append(run / "history.jsonl", line) or True,
        ]
    )
    ended = SimpleNamespace(wait=lambda seconds: next(looks)() is True)
    flower = SimpleNamespace(ended=ended, run_id="1", replies=("", 0, 0))
    with Terminal(2) as terminal:
        follow(Job({}, 2, run), 1, terminal, flower)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:4] == [
        f"directory   {run}",
        "workers     1 on cuda:0",
        "GPUs        each worker has its own; --gpus-per-client sets another share",
        "warning: differ: [b] 100 %",
    ]
    assert len(shown) == 5
    assert shown[4].startswith("round 2/2")
