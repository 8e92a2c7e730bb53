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
from keel.deployment.superlink import SuperLinkClient, captured, environment, free_ports, run_config
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
    """Restart processes that end, until the block is left; then stop them all, the last first.

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
        for process in reversed(processes.values()):
            process.stop()


class Loopback:
    """The processes of a deployment under `root`, by name; see `running`."""

    def __init__(
        self,
        root: Path,
        clients: Sequence[str],
        host: str = "127.0.0.1",
        prefixes: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """clients: their names. host: the address at which SuperNodes reach the SuperLink.

        prefixes: words before each command of `server` or of a client, by name, such as those that
        enter a network namespace.
        """
        root = root.absolute()  # its processes have the app's as their working directory
        self.root, self.clients, self.host = root, list(clients), host
        self.prefixes = prefixes or {}
        self.credentials = root / "credentials"
        make_credentials(self.credentials, [host], self.clients)
        self.fleet_port, self.http_port, *ports = free_ports(2 + len(clients))
        self.runtime_ports = dict(zip(self.clients, ports, strict=True))
        self.superlink = SuperLinkClient(
            root / "flwr",
            f"127.0.0.1:{self.http_port}",
            self.credentials / "server" / "ca.pem",
            self.prefixes.get("server", ()),
        )
        self.processes: dict[str, LocalProcess] = {}

    def start(self, name: str, owner: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a command of `server` or of a client under this name."""
        command = [*self.prefixes.get(owner, ()), *command]
        self.processes[name] = LocalProcess(command, env, self.log_file(name))

    def log_file(self, name: str) -> Path:
        """The output of a process."""
        return self.root / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of a process."""
        return self.processes[name].process.pid

    def environment(self, owner: str) -> dict[str, str]:
        """Environment of the processes of `server` or of a client: homes of its own."""
        home = self.root / owner
        registry = self.credentials / "server" / "clients.json"
        own = {"KEEL_CLIENT_REGISTRY": str(registry)} if owner == "server" else {}
        return environment(home / "flwr") | {"KEEL_HOME": str(home / "keel")} | own

    def start_server(self) -> None:
        """Start SuperLink and ServerApp executor; `register` waits for them."""
        home, own = self.root / "server", self.credentials / "server"
        home.mkdir(parents=True, exist_ok=True)
        env, ca = self.environment("server"), str(own / "ca.pem")
        superlink = [
            *(*PROGRAM, "superlink", "--isolation", "process"),
            *("--host", "127.0.0.1", "--port", str(self.http_port)),
            *("--fleet-api-address", f"{self.host}:{self.fleet_port}"),
            *("--ssl-ca-certfile", ca, "--ssl-certfile", str(own / "server.pem")),
            *("--ssl-keyfile", str(own / "server.key"), "--enable-supernode-auth"),
            *("--database", str(home / "superlink.db")),
            *("--superexec-auth-secret-file", str(own / "executor.secret")),
        ]
        self.start("superlink", "server", superlink, env)
        # runs are rare, and each look costs the SuperLink time
        env = env | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"}
        executor = self.executor_command("server", self.http_port, "--root-certificates", ca)
        self.start("serverapp-executor", "server", executor, env)

    def register(self) -> None:
        """Register the clients' keys and record their names, as the administrator does."""
        command = [*self.prefixes.get("server", ()), sys.executable, "-m", "keel"]
        command += ["deploy", "register", "--credentials", str(self.credentials / "server")]
        command += ["--superlink", f"127.0.0.1:{self.http_port}", "--wait", str(start_timeout_s)]
        command += [str(self.credentials / name / f"{name}.pub") for name in self.clients]
        done = captured(command, self.environment("server"))
        if done.returncode:
            log = self.log_file("superlink").read_text()[-2000:]
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}{log}")

    def start_client(self, name: str, node_config: Mapping[str, OptionValue]) -> None:
        """Start SuperNode, executor and resident worker of one client."""
        env = self.environment(name) | {worker_variable: str(self.worker_socket(name))}
        (self.root / name).mkdir(parents=True, exist_ok=True)
        executor = self.executor_command(name, self.runtime_ports[name], "--insecure")
        self.start(f"worker-{name}", name, [sys.executable, "-m", "client_app.worker_server"], env)
        self.start(f"supernode-{name}", name, self.supernode_command(name, node_config), env)
        self.start(f"executor-{name}", name, executor, env)

    def executor_command(self, owner: str, port: int, *security: str) -> list[str]:
        """The command of an executor, which its secret authenticates at this port."""
        return [
            *(*PROGRAM, "executor", *security),
            *("--runtime-api-address", f"127.0.0.1:{port}"),
            *("--superexec-auth-secret-file", str(self.credentials / owner / "executor.secret")),
        ]

    def supernode_command(self, name: str, node_config: Mapping[str, OptionValue]) -> list[str]:
        """The command of a client's SuperNode."""
        own = self.credentials / name
        return [
            *(*PROGRAM, "supernode", "--isolation", "process"),
            *("--superlink", f"{self.host}:{self.fleet_port}"),
            *("--root-certificates", str(own / "ca.pem")),
            *("--auth-supernode-private-key", str(own / "client.key")),
            *("--host", "127.0.0.1", "--port", str(self.runtime_ports[name])),
            *("--superexec-auth-secret-file", str(own / "executor.secret")),
            *("--node-config", run_config({"name": name, **node_config})),
        ]

    def worker_socket(self, name: str) -> Path:
        """The socket of a client's worker."""
        return self.root / name / "worker.sock"


@contextlib.contextmanager
def running(
    root: Path,
    node_configs: Mapping[str, Mapping[str, OptionValue]],
    host: str = "127.0.0.1",
    prefixes: Mapping[str, Sequence[str]] | None = None,
    kind: type[Loopback] = Loopback,
) -> Iterator[Loopback]:
    """A deployment under `root` with these clients (name to node config), ended on the way out."""
    local = kind(root, list(node_configs), host, prefixes)
    with restarting(local.processes):
        local.start_server()
        local.register()
        for name, node_config in node_configs.items():
            local.start_client(name, node_config)
        for name in node_configs:
            if f"worker-{name}" in local.processes:
                worker_status(str(local.worker_socket(name)), start_timeout_s)
        yield local


def partitions(count: int) -> dict[str, dict[str, OptionValue]]:
    """Clients that are partitions of the run's source, named as in simulation."""
    return {f"client-{i:04d}": {"partition-id": i, "num-partitions": count} for i in range(count)}


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock on the file; ValueError with this text if another process holds it."""
    with path.open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        yield


def state_hint(root: Path | None) -> str:
    """What a run needs to be continued, besides its directory. root: as for `deploy_and_run`."""
    return " and the same --output" if root else "; a stateful method needs --output for this"


def deploy_and_run(
    app: Path,
    overrides: Mapping[str, OptionValue],
    num_clients: int,
    root: Path | None,
    timeout_s: float,
) -> tuple[bool, str]:
    """Deploy on this machine and run once; whether the run finished, and its log.

    app: directory of the Flower app. root: of logs and state; None: a temporary directory.
    TimeoutError, with how to continue the run, if it does not end in time. ValueError if another
    deployment is running in `root`: their clients have the same keys.
    """
    state = state_hint(root)
    with contextlib.ExitStack() as stack:
        if root is None:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-")))
        root.mkdir(parents=True, exist_ok=True)
        refusal = (
            f"--output {root}: another deployment is running there: wait for it or stop it, or "
            "choose another folder"
        )
        stack.enter_context(locked(root / LOCK_FILE, refusal))
        local = stack.enter_context(running(root, partitions(num_clients)))
        run_id = local.superlink.submit(overrides, app)
        try:
            status = local.superlink.wait(run_id, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}, the limit of --timeout, so all processes are stopped: repeat the "
                "command with a longer one, or continue the run, whose directory `keel list` "
                f"names, with resume=DIRECTORY{state}"
            ) from error
        return status == "finished:completed", local.superlink.log(run_id)
