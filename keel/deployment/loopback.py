"""A whole deployment on this machine without containers, for one run or for tests.

SuperLink, ServerApp executor, and for each client a SuperNode, an executor and a resident worker:
real processes, TLS on loopback, registered keys. A process that dies is restarted, as compose
would. Not part of the image.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from client_app.worker_client import worker_status, worker_variable
from keel.deployment.credentials import make_credentials
from keel.deployment.register import register
from keel.deployment.superlink import SuperLinkClient, environment, free_ports, run_config
from protocol.config import app_folder
from protocol.files import private_files
from protocol.options import OptionValue
from protocol.processes import end_with_parent
from server_app.run_reader import LOCK_FILE

PROGRAM = (sys.executable, "-m", "keel.deployment")
start_timeout_s = 100.0
pause_s = 1.0  # before a process is restarted
stop_timeout_s = 10.0
poll_s = 0.1
ENDED = (
    "stopped, with all processes; if `keel list` shows the run, resume=DIRECTORY continues it, "
    "with the same --output if the method is stateful"
)


class LocalProcess:
    """A command and the process that runs it; `watch` restarts it when it ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """log: the file to which the process's output is appended."""
        self.command, self.env, self.log = list(command), env, log
        self.starts, self.restart_at = 0, 0.0
        self.start()

    def start(self) -> None:
        """Start the command in a process group of its own."""
        with private_files(), self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.env,
                cwd=app_folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
        self.starts, self.restart_at = self.starts + 1, 0.0

    def watch(self) -> None:
        """Restart the process if it has ended and its pause is over."""
        if self.process.poll() is None:
            return
        if not self.restart_at:
            self.restart_at = time.monotonic() + pause_s
        elif time.monotonic() >= self.restart_at:
            self._kill_group()  # its children had the pause to end by themselves
            self.start()

    def stop(self) -> None:
        """End the process and its children: SIGTERM, then SIGKILL."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(stop_timeout_s)
        self._kill_group()
        self.process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # none is left
            os.killpg(self.process.pid, signal.SIGKILL)


@contextlib.contextmanager
def restarting(processes: dict[str, LocalProcess]) -> Iterator[None]:
    """Restart processes that end, until the block is left; then stop them all, the first one last.

    Processes may be added meanwhile.
    """
    done = threading.Event()

    def watch_all() -> None:
        while not done.wait(poll_s):
            for process in list(processes.values()):
                process.watch()

    thread = threading.Thread(target=watch_all)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        ordered = list(reversed(processes.values()))
        for process in ordered[:-1]:  # the first: the SuperLink, on which the others depend
            process.process.terminate()
        for process in ordered:
            process.stop()


class Loopback:
    """The processes of a deployment under `root`, by name; see `running`."""

    host = "127.0.0.1"  # at which SuperNodes reach the SuperLink

    def __init__(self, root: Path, clients: Sequence[str]) -> None:
        """clients: their names."""
        root = root.absolute()  # its processes have the app's as their working directory
        self.root, self.clients = root, list(clients)
        self.credentials = root / "credentials"
        make_credentials(self.credentials, [self.host], self.clients)
        self.fleet_port, self.http_port, *ports = free_ports(2 + len(clients))
        self.runtime_ports = dict(zip(self.clients, ports, strict=True))
        self.superlink = SuperLinkClient(
            root / "flwr", f"127.0.0.1:{self.http_port}", self.credentials / "server" / "ca.pem"
        )
        self.processes: dict[str, LocalProcess] = {}

    def command(self, owner: str, words: Sequence[str]) -> list[str]:
        """The words of a command as `server` or a client runs it."""
        return list(words)

    def environment(self, owner: str) -> dict[str, str]:
        """Environment of the processes of `server` or of a client: homes of its own."""
        home, registry = self.root / owner, self.credentials / "server" / "clients.json"
        own = {"KEEL_CLIENT_REGISTRY": str(registry)} if owner == "server" else {}
        return environment(home / "flwr") | {"KEEL_HOME": str(home / "keel")} | own

    def start(self, name: str, owner: str, words: Sequence[str], **env: str) -> None:
        """Start a command of `server` or of a client under this name."""
        env = self.environment(owner) | env
        self.processes[name] = LocalProcess(self.command(owner, words), env, self.log_file(name))

    def log_file(self, name: str) -> Path:
        """The output of a process."""
        return self.root / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of a process."""
        return self.processes[name].process.pid

    def start_server(self) -> None:
        """Start SuperLink and ServerApp executor; `register` waits for them."""
        home, own = self.root / "server", self.credentials / "server"
        home.mkdir(parents=True, exist_ok=True)
        superlink = [
            *(*PROGRAM, "superlink", "--isolation", "process"),
            *("--host", "127.0.0.1", "--port", str(self.http_port)),
            *("--fleet-api-address", f"{self.host}:{self.fleet_port}"),
            *("--ssl-ca-certfile", str(own / "ca.pem"), "--ssl-certfile", str(own / "server.pem")),
            *("--ssl-keyfile", str(own / "server.key"), "--enable-supernode-auth"),
            *("--database", str(home / "superlink.db")),
            *("--superexec-auth-secret-file", str(own / "executor.secret")),
        ]
        self.start("superlink", "server", superlink)
        executor = self.executor(
            "server", self.http_port, "--root-certificates", str(own / "ca.pem")
        )
        # runs are rare, and each look costs the SuperLink time
        slowly = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"}
        self.start("serverapp-executor", "server", executor, **slowly)

    def register(self) -> None:
        """Register the clients' keys and record their names, as the administrator does."""
        requests = [str(self.credentials / name / f"{name}.pub") for name in self.clients]
        address = f"127.0.0.1:{self.http_port}"
        register(self.credentials / "server", address, start_timeout_s, requests)

    def start_client(self, name: str, node_config: Mapping[str, OptionValue]) -> None:
        """Start SuperNode, executor and resident worker of one client."""
        own, port = self.credentials / name, self.runtime_ports[name]
        (self.root / name).mkdir(parents=True, exist_ok=True)
        worker = {worker_variable: str(self.worker_socket(name))}
        supernode = [
            *(*PROGRAM, "supernode", "--isolation", "process"),
            *("--superlink", f"{self.host}:{self.fleet_port}"),
            *("--root-certificates", str(own / "ca.pem")),
            *("--auth-supernode-private-key", str(own / "client.key")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--superexec-auth-secret-file", str(own / "executor.secret")),
            *("--node-config", run_config({"name": name, **node_config})),
        ]
        command = [sys.executable, "-m", "client_app.worker_server"]
        self.start(f"worker-{name}", name, command, **worker)
        self.start(f"supernode-{name}", name, supernode)
        self.start(f"executor-{name}", name, self.executor(name, port, "--insecure"), **worker)

    def executor(self, owner: str, port: int, *security: str) -> list[str]:
        """The command of an executor, which its secret authenticates at this port."""
        return [
            *(*PROGRAM, "executor", *security),
            *("--runtime-api-address", f"127.0.0.1:{port}"),
            *("--superexec-auth-secret-file", str(self.credentials / owner / "executor.secret")),
        ]

    def worker_socket(self, name: str) -> Path:
        """The socket of a client's worker."""
        return self.root / name / "worker.sock"


@contextlib.contextmanager
def running(
    root: Path,
    node_configs: Mapping[str, Mapping[str, OptionValue]],
    kind: type[Loopback] = Loopback,
) -> Iterator[Loopback]:
    """A deployment under `root` with these clients (name to node config), ended on the way out."""
    local = kind(root, list(node_configs))
    with restarting(local.processes):
        local.start_server()
        local.register()
        for name, node_config in node_configs.items():
            local.start_client(name, node_config)
        for name in node_configs:
            worker_status(str(local.worker_socket(name)), start_timeout_s)
        yield local


def partitions(count: int) -> dict[str, dict[str, OptionValue]]:
    """Clients that are partitions of the run's source, named as in simulation."""
    return {f"client-{i:04d}": {"partition-id": i, "num-partitions": count} for i in range(count)}


def deploy_and_run(
    app: Path,
    overrides: Mapping[str, OptionValue],
    num_clients: int,
    root: Path | None,
    timeout_s: float,
) -> tuple[bool, str]:
    """Deploy on this machine and run once; whether the run finished, and its log.

    app: directory of the Flower app. root: of logs and state; None: a temporary directory.
    TimeoutError if the run does not end in time. ValueError if another deployment is running in
    `root`: their clients have the same keys.
    """
    with contextlib.ExitStack() as stack:
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-")))
        root.mkdir(parents=True, exist_ok=True)
        try:
            lock = stack.enter_context((root / LOCK_FILE).open("a"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {root}: another deployment is running there") from None
        local = stack.enter_context(running(root, partitions(num_clients)))
        run_id = local.superlink.submit(overrides, app)
        try:
            status = local.superlink.wait(run_id, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}, the limit of --timeout: {ENDED}") from error
        return status == "finished:completed", local.superlink.log(run_id)
