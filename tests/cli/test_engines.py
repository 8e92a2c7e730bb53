"""What the engines are made of: the app, flwr's words, and the processes that are ours."""

import io
import shutil
import tomllib
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args

from flower_adapter import superlink_unavailable
from keel.cli import engines
from keel.cli.engines import FlowerRun, Job, is_from_keel, run_on_deployment
from keel.deployment import superlink
from keel.deployment.credentials import make_credentials
from keel.deployment.superlink import SuperLinkClient, app_directory, app_packages, free_ports
from protocol.processes import num_cores
from server_app.report import Reporter

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


def worker(node, device):
    return {"node": node, "device": device, "machine": "M"}


OWN_GPU = ("GPUs", "each worker has its own; --gpus-per-client sets another share")
