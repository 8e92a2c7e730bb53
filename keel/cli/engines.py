"""The three engines: in this process, Flower's simulation, and a deployment.

Each takes a `Job` and a `Terminal` that follows the run, returns once the run has finished, and
raises RuntimeError, one line, if it failed. A KeyboardInterrupt stops the run cleanly.
"""

import logging
import math
import os
import queue
import re
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from keel.cli.interrupts import uninterrupted
from keel.cli.progress import Terminal
from keel.deployment.reach import handshake
from keel.deployment.superlink import SuperLinkClient, app_directory, run_config
from protocol.options import OptionValue
from protocol.processes import check_not_forked, num_cores
from protocol.ray_nodes import Node, WorkerOptions

STOP_TIMEOUT_S = 60.0  # for a run to write its summary after `flwr stop`
STARTED = re.compile(r"started run (\d+)")
REPLIES = re.compile(r"\d\d:\d\d:\d\d (.+): (\d+) of (\d+) clients have answered")
ROUND = re.compile(r"\d\d:\d\d:\d\d round (\d+)/\d+: ")
DIRECTORY = re.compile(r"\d\d:\d\d:\d\d run directory (.+)")
STOPPED = re.compile(r"\d\d:\d\d:\d\d stopping: round \d+ is done")
one_run = threading.RLock()  # at a time: runs share torch's default generator and Keel's log


@dataclass(frozen=True)
class Job:
    """What to execute."""

    overrides: Mapping[str, OptionValue]
    num_clients: int
    cpus_per_client: float = 1
    gpus_per_client: float | None = None  # None: 1 where there are any
    federation: str = ""
    root_certificates: Path | None = None
    ray: str = ""  # address of a Ray cluster
    nodes: Sequence[Node] = ()  # of that cluster
    is_on_cpu: bool = False  # whether its device is the CPU: no worker gets a GPU

    @property
    def num_workers(self) -> int:
        """Nodes of a simulation, which play the clients: as many as its machines run at once."""
        if self.ray:
            gpus = self.gpus_per_client
            if gpus is None:
                gpus = float(not self.is_on_cpu and any(node.num_gpus for node in self.nodes))
            at_once = sum(node.num_workers(self.cpus_per_client, gpus) for node in self.nodes)
        else:
            at_once = int(num_cores() / self.cpus_per_client) if self.cpus_per_client else 1
        return max(1, min(self.num_clients, at_once))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables with which `flwr run` does the same."""
        return {"RAY_ADDRESS": self.ray} if self.ray else {}

    def federation_config(self) -> str:
        """The simulation's size as `flwr run --federation-config` takes it."""
        settings = {
            "num-supernodes": self.num_workers,
            "client-resources-num-cpus": f"{self.cpus_per_client:g}",
            "client-resources-num-gpus": self.gpus_per_client,
        }
        return " ".join(f"{key}={value}" for key, value in settings.items() if value)


def run_in_process(job: Job, terminal: Terminal) -> None:
    """Execute the run in this process, one client after the other."""
    terminal.phase("loading PyTorch")
    with uninterrupted():
        from server_app.inline import run_inline

    check_not_forked()
    terminal.phase("reading data")
    with one_run, torch_defaults(), program_log_level():
        run_inline(job.overrides, job.num_clients, observers=[terminal])


@contextmanager
def torch_defaults() -> Iterator[None]:
    """A context with torch's defaults (CPU, float32, gradients), whatever the caller has set.

    The caller's settings are restored. ValueError within torch.autocast, which keeps copies of
    weights between steps.
    """
    import torch

    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ValueError(
            "a run cannot start within torch.autocast: start it outside; precision=bf16 trains in "
            "bfloat16"
        )
    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    onednn = torch.backends.mkldnn  # in bfloat16 after torch.set_float32_matmul_precision("medium")
    places: list[Any] = [onednn.matmul, onednn.conv, onednn.rnn]  # type: ignore[attr-defined]  # defined at import
    before = [place.fp32_precision for place in places]
    is_cpu = torch.get_default_device().type == "cpu"  # torch.device would slow down every call
    torch.set_default_dtype(torch.float32)
    for place in places:
        place.fp32_precision = "ieee"
    try:
        with (
            nullcontext() if is_cpu else torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value
        torch.set_default_dtype(dtype)
        torch.set_num_threads(num_threads)


class ProgramLog(logging.Handler):
    """Passes records of the calling program's level on to its handlers: a run logs more."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the record on, if there are handlers."""
        if logging.root.hasHandlers():
            logging.root.handle(record)


@contextmanager
def program_log_level() -> Iterator[None]:
    """Within: the calling program's handlers get Keel's log at the level before the run."""
    logger = logging.getLogger("keel")
    passed_on, propagated = ProgramLog(logger.getEffectiveLevel()), logger.propagate
    if propagated:
        logger.addHandler(passed_on)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(passed_on)


def run_on_flower(job: Job, terminal: Terminal) -> None:
    """Execute the run in this process, with workers of Flower's simulation on Ray."""
    terminal.phase("loading PyTorch")
    with uninterrupted():
        from server_app.simulation import run_simulated

    check_not_forked()
    terminal.phase("reading data, starting Ray")
    gpus = 0.0 if job.is_on_cpu and job.gpus_per_client is None else job.gpus_per_client
    workers = WorkerOptions(job.cpus_per_client, gpus, job.ray)
    with one_run, torch_defaults(), program_log_level():
        run_simulated(job.overrides, job.num_clients, workers, observers=[terminal])


def with_num_clients(job: Job) -> Job:
    """The job with `num-clients` set, if there are more clients than nodes."""
    if "resume" in job.overrides or job.num_workers == job.num_clients:
        return job  # the run's config has it, or every client is a node
    return replace(job, overrides={**job.overrides, "num-clients": job.num_clients})


def run_on_deployment(job: Job, terminal: Terminal) -> None:
    """Submit the run to a running SuperLink and follow its log; Ctrl-C stops the run there."""
    with app_directory() as app, tempfile.TemporaryDirectory(prefix="keel-") as folder:
        home = Path(folder) if ":" in job.federation else None
        client = SuperLinkClient(home, job.federation, job.root_certificates)
        flower = FlowerRun(client, app, Path(folder, "flwr.log"))
        flower.start(job, [])
        terminal.phase(f"running on {job.federation}")
        try:
            for line in iter(flower.printed.get, None):
                if found := DIRECTORY.match(line):
                    terminal.resume_command = resume_command(found[1], job)
                if found := ROUND.match(line):
                    terminal.last_round = int(found[1])
                if REPLIES.match(line):
                    terminal.on_replies(*flower.replies)
                elif is_from_keel(line):
                    terminal.print(line, markup=False)
        except BaseException:
            terminal.phase("stopping")
            flower.stop()
            raise
        status = outcome(flower, terminal)
        if status != "finished:completed":
            ended = status.removeprefix("finished:") or "did not start"
            reason = flower.reason() if status else unreachable(job) or flower.reason()
            if STOPPED.fullmatch(reason):  # by `keel stop` on the server
                raise KeyboardInterrupt
            raise RuntimeError(f"the run {ended}: {reason}")


def unreachable(job: Job) -> str:
    """Why no TLS connection to the SuperLink can be made, such as a certificate; "" if one can.

    Flower says only that the SuperLink is unavailable.
    """
    if ":" not in job.federation or not job.root_certificates:
        return ""
    try:
        handshake(job.federation, job.root_certificates)
        return ""
    except (OSError, ValueError) as error:
        return f"the SuperLink {job.federation} cannot be reached: {error}"


def outcome(flower: "FlowerRun", terminal: Terminal) -> str:
    """The run's status once its log has ended, which it also does when the SuperLink restarts.

    In that case it waits for the run to end. "" if the run never started.
    """
    status = flower.status()
    if not status or status.startswith("finished"):
        return status
    terminal.print(
        f"the SuperLink no longer sends the log; waiting for run {flower.run_id}, which may "
        "continue there. Ctrl-C stops it; keel status on the server shows its rounds",
        markup=False,
    )
    try:
        status = flower.client.wait(int(flower.run_id), math.inf)
        # what came after the log had broken off, such as the reason; the disk may be full
        with suppress(RuntimeError, OSError):
            flower.log_path.write_text(flower.client.log(int(flower.run_id)))
        return status
    except KeyboardInterrupt:
        with suppress(RuntimeError):
            flower.client.stop(int(flower.run_id))
        raise


def resume_command(directory: str, job: Job) -> str:
    """The command that continues a run of a deployment; `directory` is on the server."""
    command = ["keel", "resume", directory, "--engine", "deployment"]
    command += ["--federation", job.federation]
    if job.root_certificates:
        command += ["--root-certificates", str(job.root_certificates)]
    return shlex.join(command)


def is_from_keel(line: str) -> bool:
    """Whether a line of the run's log is Keel's own: they begin with a time."""
    return re.match(r"\d\d:\d\d:\d\d ", line) is not None


class FlowerRun:
    """One `flwr run --stream` in a process of its own; what it prints goes to a log file."""

    def __init__(self, client: SuperLinkClient, app: Path, log_path: Path) -> None:
        self.client, self.app, self.log_path = client, app, log_path
        self.process: subprocess.Popen[str] | None = None
        self.run_id = ""
        self.replies = ("", 0, 0)  # as logged last: what was asked, replies, clients asked
        self.ended = threading.Event()
        self.printed: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end

    def start(self, job: Job, arguments: Sequence[str]) -> None:
        """Submit the run; `arguments` follow those of every engine."""
        command = ["flwr", "run", str(self.app), self.client.connection, "--stream"]
        self.process = subprocess.Popen(
            [*command, "--run-config", run_config(job.overrides), *arguments],
            cwd=self.app,
            env=self.client.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches this process only
        )
        assert self.process.stdout is not None
        threading.Thread(target=self.read, args=[self.process.stdout], daemon=True).start()

    def read(self, output: TextIO) -> None:
        """Copy what flwr prints to the log; learn the run's id and its progress from it.

        A full disk costs lines of the log, not the run.
        """
        try:
            log = self.log_path.open("wb", buffering=0)
        except OSError:
            log = Path(os.devnull).open("wb", buffering=0)  # noqa: SIM115  # closed below
        try:
            with log:
                for line in output:
                    with suppress(OSError):
                        log.write(line.encode())
                    if not self.run_id and (found := STARTED.search(line)):
                        self.run_id = found[1]
                    if found := REPLIES.match(line):
                        self.replies = (found[1], int(found[2]), int(found[3]))
                    self.printed.put(line.rstrip())
        finally:  # else its end would be waited for in vain
            self.printed.put(None)
            self.ended.set()

    def stop(self) -> None:
        """`flwr stop`, then wait until the run has written its summary and the log has ended."""
        if self.run_id and not self.ended.is_set():
            with suppress(RuntimeError):
                self.client.stop(int(self.run_id))
            self.ended.wait(STOP_TIMEOUT_S)
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def status(self, key: str = "status") -> str:
        """The run's status on the SuperLink, such as finished:completed, or its status-details."""
        if not self.run_id:
            return ""
        try:
            return str(self.client.run_info(int(self.run_id))[key])
        except (RuntimeError, ValueError, LookupError):
            return "unknown"

    def reason(self) -> str:
        """Why it failed, in one line.

        Keel's error if there is one, else that its process was stopped or killed, else the first
        exception, which the later ones wrap, else flwr's last line.
        """
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        last = last_line(self.log_path)
        errors = [line for line in lines if " error: " in line or line.startswith("Error:")]
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        details = "" if errors or STOPPED.fullmatch(last) else self.status("status-details")
        was_terminated = "unknown error" in details and not raised
        if was_terminated or "heartbeat" in details:  # a lost worker may have raised before
            return (
                "the run's process was ended, or lost its SuperLink or, in a simulation, its Ray "
                "cluster; `keel status` on its machine may have the reason"
            )
        by_precedence = [*errors[-1:], *raised, last]
        return re.sub(r"^(.* error: |Error: )", "", by_precedence[0])


def last_line(path: Path) -> str:
    """The last line of a log with text in it, without the frame that Flower draws around errors."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    texts = (line.strip(" \t\r│╭╮╰╯─") for line in reversed(lines))
    return next(filter(None, texts), "its log is empty")
