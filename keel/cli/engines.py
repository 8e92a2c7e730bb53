"""The three ways to execute a run: in this process, on Flower's simulation, on a deployment.

Each takes a `Job` and a `Terminal` that follows the run, returns once the run has finished, and
raises RuntimeError, one line, if it failed. After KeyboardInterrupt the run was stopped cleanly.
"""

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from keel.cli.progress import Terminal
from keel.runs import FINISHED, LOCK_FILE, SavedRun
from protocol.config import app_folder, keel_home, project_file
from protocol.options import OptionValue
from server_app.history import read_history

POLL_S = 0.3
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0  # for a run to write its summary after `flwr stop`
END_TIMEOUT_S = 10.0  # for processes to end after SIGTERM
MARK = "KEEL_ENGINE"  # environment variable of every process that an engine started
APP_PACKAGES = ("client_app", "data", "models", "protocol", "server_app", "strategies")
STARTED = re.compile(r"started run (\d+)")


@dataclass(frozen=True)
class Job:
    """What to execute. `directory`: the run directory, where it is known before the run starts."""

    overrides: Mapping[str, OptionValue]
    num_clients: int
    directory: Path | None = None
    cpus_per_client: float = 1
    gpus_per_client: float = 0
    federation: str = ""
    root_certificates: Path | None = None

    def run_config(self) -> str:
        """The overrides as `flwr run --run-config` takes them."""
        return " ".join(f"{key}={json.dumps(value)}" for key, value in self.overrides.items())

    def federation_config(self) -> str:
        """The simulation's size as `flwr run --federation-config` takes it."""
        words = {
            "num-supernodes": self.num_clients,
            "client-resources-num-cpus": f"{self.cpus_per_client:g}",
            "client-resources-num-gpus": self.gpus_per_client,
        }
        return " ".join(f"{key}={value}" for key, value in words.items() if value)


# --- inline --------------------------------------------------------------------------------------


def run_in_process(job: Job, terminal: Terminal) -> None:
    """Execute the run in this process, one client after the other."""
    terminal.phase("loading PyTorch")
    from server_app.inline import run_inline

    terminal.phase("reading data")
    run_inline(job.overrides, job.num_clients, observers=[terminal])


# --- Flower's simulation -------------------------------------------------------------------------


def run_on_flower(job: Job, terminal: Terminal) -> None:
    """Execute the run by `flwr run` on a SuperLink that is started for it and ended with it."""
    assert job.directory is not None
    folder = keel_home() / "flower" / job.directory.name
    with (
        app_directory() as app,
        removed_unless_failed(folder),
        local_superlink(folder, app, terminal) as environment,
    ):
        flower = FlowerRun(environment, app, folder / "flwr.log", "keel")
        words = ["--federation-config", job.federation_config()]
        last_round = SavedRun(job.directory).rounds
        flower.start(job, words)
        try:
            follow(job.directory, last_round, terminal, flower)
        except BaseException:
            terminal.phase("stopping")
            flower.stop()
            terminal.last_round = SavedRun(job.directory).rounds
            raise
        state = SavedRun(job.directory).state
        if state != FINISHED:
            reason = state if state.startswith("failed") else flower.reason()
            raise RuntimeError(f"{reason} (log: {folder / 'flwr.log'})")


@contextmanager
def removed_unless_failed(folder: Path) -> Iterator[None]:
    """Remove the directory on the way out; after an error its logs are kept."""
    try:
        yield
    except Exception:
        raise
    except BaseException:  # an interrupt
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def follow(directory: Path, last_round: int, terminal: Terminal, flower: "FlowerRun") -> None:
    """Report the rounds that appear in the run directory until the run ends."""
    has_begun, size, is_over = False, -1, False
    while not is_over:
        is_over = not flower.wait(POLL_S)  # read once more after the end
        if not has_begun and (directory / "summary.json").exists() and flower.run_id:
            has_begun = True
            terminal.begin(directory, last_round)
        history = directory / "history.jsonl"
        if has_begun and history.exists() and history.stat().st_size != size:
            size = history.stat().st_size
            for line in read_history(directory):
                if line["round"] > last_round:
                    last_round = line["round"]
                    terminal.on_round(line)
    summary = SavedRun(directory).summary
    if summary:
        terminal.on_run_end(summary)


@contextmanager
def local_superlink(folder: Path, app: Path, terminal: Terminal) -> Iterator[dict[str, str]]:
    """A SuperLink of our own for simulations; yields the environment that `flwr` reaches it in.

    It has its own ports and FLWR_HOME (`folder`) and this process's environment. Every process that
    comes of it carries a mark in its environment; these, and no others, are ended on the way out.
    """
    from keel.deployment.loopback import free_ports

    http, control = free_ports(2)
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[superlink]\ndefault = "keel"\n\n[superlink.keel]\naddress = "127.0.0.1:{http}"\n'
        "insecure = true\n"
    )
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = flower_environment() | {"FLWR_HOME": str(folder), MARK: mark}
    sockets = tempfile.mkdtemp(prefix="keel-ray-")  # short: it holds the paths of sockets
    environment.setdefault("RAY_TMPDIR", sockets)
    log_path = folder / "superlink.log"
    terminal.phase("starting Flower")
    with locked(folder / LOCK_FILE), log_path.open("w") as log_file:
        process = subprocess.Popen(
            [
                *("flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess"),
                *("--host", "127.0.0.1", "--port", str(http)),
                *("--control-api-address", f"127.0.0.1:{control}"),
                *("--database", str(folder / "state.db")),
            ],
            cwd=app,
            env=environment,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, http, log_path)
            yield environment
        finally:
            end_processes(process, mark)
            shutil.rmtree(sockets, ignore_errors=True)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    """Return once the SuperLink answers; RuntimeError with its last words if it does not."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"Flower's SuperLink did not start: {last_line(log_path)} (log: {log_path})")


def end_processes(superlink: subprocess.Popen[bytes], mark: str) -> None:
    """End the SuperLink and every process with our mark, by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(superlink.pid, number)
        for pid in marked_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            if superlink.poll() is not None and not marked_processes(mark):
                return
            time.sleep(0.1)


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes, but this one, with our mark in their environment."""
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            is_ours = entry in (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if is_ours and state not in "ZX":
                found.append(int(folder.name))
    return found


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock on the file, which names this process: `keel stop` finds it there."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        yield


# --- a deployment --------------------------------------------------------------------------------


def run_on_deployment(job: Job, terminal: Terminal) -> None:
    """Submit the run to a running SuperLink and follow its log; Ctrl-C stops the run there."""
    with app_directory() as app, tempfile.TemporaryDirectory(prefix="keel-") as folder:
        environment, connection = flower_environment(), job.federation
        if ":" in job.federation:
            connection = "keel"
            certificates = job.root_certificates
            security = (
                f"root-certificates = {json.dumps(str(certificates.absolute()))}"
                if certificates
                else "insecure = true"
            )
            Path(folder, "config.toml").write_text(
                f'[superlink]\ndefault = "keel"\n\n[superlink.keel]\n'
                f"address = {json.dumps(job.federation)}\n{security}\n"
            )
            environment |= {"FLWR_HOME": folder}
        flower = FlowerRun(environment, app, Path(folder, "flwr.log"), connection)
        flower.start(job, [])
        terminal.phase(f"running on {job.federation}")
        try:
            for line in flower.lines():
                if is_from_keel(line):
                    terminal.console.print(line, markup=False)
        except BaseException:
            terminal.phase("stopping")
            flower.stop()
            raise
        status = flower.status()
        if status != "finished:completed":
            raise RuntimeError(f"the run is {status or 'not started'}: {flower.reason()}")


def is_from_keel(line: str) -> bool:
    """Whether a line of the run's log is Keel's own: they begin with a time."""
    return re.match(r"\d\d:\d\d:\d\d ", line) is not None


# --- flwr ----------------------------------------------------------------------------------------


class FlowerRun:
    """One `flwr run --stream` in a process of its own; what it prints goes to a log file."""

    def __init__(
        self, environment: Mapping[str, str], app: Path, log_path: Path, connection: str
    ) -> None:
        self.environment, self.app = environment, app
        self.log_path, self.connection = log_path, connection
        self.process: subprocess.Popen[str] | None = None
        self.run_id = ""
        self.ended = threading.Event()
        self.printed: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: the end

    def start(self, job: Job, words: Sequence[str]) -> None:
        """Submit the run."""
        command = ["flwr", "run", str(self.app), self.connection, "--stream"]
        self.process = subprocess.Popen(
            [*command, "--run-config", job.run_config(), *words],
            cwd=self.app,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        assert self.process.stdout is not None
        threading.Thread(target=self.read, args=[self.process.stdout], daemon=True).start()

    def read(self, output: TextIO) -> None:
        """Copy what flwr prints to the log; learn the run's id from it."""
        with self.log_path.open("w") as log:
            for line in output:
                log.write(line)
                log.flush()
                if not self.run_id and (found := STARTED.search(line)):
                    self.run_id = found[1]
                self.printed.put(line.rstrip())
        self.printed.put(None)
        self.ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait; whether the run still goes on."""
        return not self.ended.wait(seconds)

    def lines(self) -> Iterator[str]:
        """The lines that flwr prints, as they come."""
        while (line := self.printed.get()) is not None:
            yield line

    def stop(self) -> None:
        """`flwr stop`, then wait until the run has written its summary and the log has ended."""
        if self.run_id and not self.ended.is_set():
            self.flwr("stop", self.run_id, self.connection)
            self.ended.wait(STOP_TIMEOUT_S)
        if self.process and self.process.poll() is None:
            self.process.terminate()

    def status(self) -> str:
        """What the SuperLink says of the run, such as finished:completed."""
        if not self.run_id:
            return ""
        words = ("list", self.connection, "--run-id", self.run_id, "--format", "json")
        printed = self.flwr(*words).stdout
        try:
            found: dict[str, Any] = json.loads(printed[printed.index("{") :])
            return str(found["runs"][0]["status"])
        except (ValueError, LookupError):
            return "unknown"

    def reason(self) -> str:
        """Why it failed, in one line: Keel's error if there is one, else flwr's last line."""
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        errors = [line for line in lines if " error: " in line or line.startswith("Error:")]
        return (
            re.sub(r"^(.* error: |Error: )", "", errors[-1]) if errors else last_line(self.log_path)
        )

    def flwr(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """`flwr` with these words."""
        return subprocess.run(
            ["flwr", *words],
            cwd=self.app,
            env=dict(self.environment),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )


def flower_environment() -> dict[str, str]:
    """This environment, with this Python's scripts first and nothing sent to Flower."""
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "COLUMNS": "400",  # long lines stay whole
    }


def last_line(path: Path) -> str:
    """The last line of a log."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")


@contextmanager
def app_directory() -> Iterator[Path]:
    """The Flower app: the checkout, or a temporary copy of the installed packages."""
    if (app_folder / "pyproject.toml").exists():
        yield app_folder
        return
    with tempfile.TemporaryDirectory(prefix="keel-app-") as folder:
        for package in APP_PACKAGES:
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(app_folder / package, Path(folder, package), ignore=skip)
        # Flower refuses patterns that match nothing, and what they exclude is not there
        project = re.sub(r"(?m)^fab-exclude = .*\n", "", project_file().read_text())
        Path(folder, "pyproject.toml").write_text(project)
        Path(folder, "LICENSE").write_text("Apache-2.0\n")
        yield Path(folder)
