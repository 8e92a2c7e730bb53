"""A SuperLink of our own for one simulation, ended with every process that came of it."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from keel.deployment.superlink import SuperLinkClient, check_programs, free_ports
from keel.runs import is_locked
from protocol.config import app_folder, keel_home
from protocol.files import naming
from server_app.run_reader import LOCK_FILE

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0  # for processes to end after SIGTERM: the ServerApp writes its summary
LOCK_TIMEOUT_S = 1.0  # `is_locked` may hold the lock briefly
MARK_FILE = "mark"  # the mark and, in a second line, the folder of Ray's sockets
RAY_PREFIX = "keel-ray-"
MARK = "KEEL_ENGINE"  # environment variable of every process that came of such a SuperLink


def engine_folder(name: str) -> Path:
    """Where `keel run --engine flower` has the logs, the lock and Flower's home of a run."""
    return keel_home() / "flower" / name


@contextmanager
def simulation_superlink(
    folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[SuperLinkClient]:
    """A SuperLink for simulations; yields its client, in whose environment `flwr run` is called.

    It has its own ports and FLWR_HOME (`folder`), and this process's environment with `variables`.
    Every process that comes of it carries a mark in its environment: these, and no others, are
    ended on the way out. What a killed process left of another one in `folder` is removed.
    ValueError if a process has one there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # its logs name what the run's log names
    with locked(folder / LOCK_FILE):  # first: of two that start at once, one touches nothing
        end_marked(folder)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK_FILE:
                path.unlink()
        with started_superlink(folder, variables or {}) as client:
            yield client


@contextmanager
def started_superlink(folder: Path, variables: Mapping[str, str]) -> Iterator[SuperLinkClient]:
    """The SuperLink of `simulation_superlink`, in an empty folder."""
    http, control = free_ports(2)
    client = SuperLinkClient(folder, f"127.0.0.1:{http}")
    check_programs(client.environment["PATH"])
    mark = f"{os.getpid()}-{time.time_ns()}"
    sockets = tempfile.mkdtemp(prefix=RAY_PREFIX, dir="/tmp")  # as sockets have short paths
    # Ray's agents set their titles, which would overwrite the environment that /proc shows
    client.environment |= {MARK: mark, "SPT_NOENV": "1"} | dict(variables)
    # there is only one run, and polling for others costs the SuperLink time
    client.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.5"
    if not client.environment.get("RAY_ADDRESS"):  # a cluster has directories of its own
        client.environment.setdefault("RAY_TMPDIR", sockets)
    log_path = folder / "superlink.log"
    with log_path.open("w") as log_file:
        with naming(folder / MARK_FILE):
            (folder / MARK_FILE).write_text(f"{mark}\n{sockets}")
        process = None  # where an interrupt comes between its start and Popen's return
        try:
            process = subprocess.Popen(
                [
                    # Keel's, with a database: Flower's would end the run after a suspended machine
                    # or a clock that is set forward, as nobody's heartbeat has come meanwhile
                    *(sys.executable, "-m", "keel.deployment.superlink_server"),
                    *("--database", str(folder / "superlink.db")),
                    *("--insecure", "--simulation", "--isolation", "subprocess"),
                    *("--host", "127.0.0.1", "--port", str(http)),
                    *("--control-api-address", f"127.0.0.1:{control}"),
                ],
                cwd=app_folder,
                env=client.environment,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            wait_until_healthy(process, http, log_path)
            yield client
        finally:
            end_processes(process, mark)
            shutil.rmtree(sockets, ignore_errors=True)


def wait_until_healthy(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    """Return once the SuperLink answers; RuntimeError with its log's last line if it does not."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"Flower's SuperLink did not start: {last_line(log_path)} (log: {log_path})")


def end_abandoned(folder: Path) -> bool:
    """End what is left of the simulation in `folder`, whose own process was killed.

    False if there is nothing to end, or if its process is alive.
    """
    return not is_locked(folder / LOCK_FILE) and end_marked(folder)


def end_marked(folder: Path) -> bool:
    """End the processes with the mark in `folder`; whether there were any.

    Then remove the folder of Ray's sockets.
    """
    path = folder / MARK_FILE
    mark, _, sockets = path.read_text().partition("\n") if path.exists() else ("", "", "")
    had_processes = bool(mark and marked_processes(mark))
    if had_processes:
        end_processes(None, mark)
    if Path(sockets).name.startswith(RAY_PREFIX):
        shutil.rmtree(sockets, ignore_errors=True)
    return had_processes


def end_processes(superlink: subprocess.Popen[bytes] | None, mark: str) -> None:
    """End the SuperLink and every process with our mark, by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            if superlink:
                os.killpg(superlink.pid, number)
        for pid in marked_processes(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline:
            if (superlink is None or superlink.poll() is not None) and not marked_processes(mark):
                return
            time.sleep(0.1)


def kill_own_processes() -> None:
    """Kill every process that came of a SuperLink of this process, at once."""
    for pid in marked_processes(f"{os.getpid()}-"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked_processes(mark: str) -> list[int]:
    """Ids of the living processes whose mark, in their environment, begins with `mark`."""
    entry, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            variables = (folder / "environ").read_bytes().split(b"\0")
            is_ours = any(variable.startswith(entry) for variable in variables)
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if is_ours and state not in "ZX":
                found.append(int(folder.name))
    return found


@contextmanager
def locked(path: Path, refusal: str = "") -> Iterator[None]:
    """Hold a lock on the file, which contains this process's id: `keel stop` finds it there.

    ValueError if another process holds it for longer than a look at it takes. refusal: its text.
    """
    with path.open("ab", buffering=0) as file:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(
                        refusal
                        or f"a run named {path.parent.name} is running: wait for it or stop it, or "
                        "start a new one under another name, with run-name=NAME"
                    ) from None
                time.sleep(0.05)
        with naming(path):  # such as a full disk
            file.truncate(0)
            file.write(str(os.getpid()).encode())
        yield


def last_line(path: Path) -> str:
    """The last line of a log with text in it, without the frame that Flower draws around errors."""
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    texts = (line.strip(" \t\r│╭╮╰╯─") for line in reversed(lines))
    return next(filter(None, texts), "its log is empty")
