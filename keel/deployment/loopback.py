"""A whole deployment on this machine, without containers: every process is a real one.

    python -m keel.deployment.loopback --clients 3 'method="fedintr"' num-rounds=5

SuperLink, ServerApp executor, and for each client a SuperNode, an executor and a resident worker,
over TLS on loopback, with registered keys; all supervised. For tests, measurements and to try.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from client_app.worker_client import worker_says, worker_variable
from keel.deployment.credentials import make_credentials
from keel.deployment.superlink import SuperLinkClient, as_words, environment
from keel.deployment.supervise import Kept, supervise
from protocol.config import app_folder, keel_home
from protocol.options import OptionValue
from server_app.inline import parse_overrides

start_limit_s = 100.0


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Loopback:
    """The processes of a deployment in `folder`, each a `Kept`; see `running`."""

    def __init__(
        self,
        folder: Path,
        clients: Sequence[str],
        host: str = "127.0.0.1",
        inside: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """clients: their names; host: the address that SuperNodes call the SuperLink by.

        inside: what comes before each command of `server` or of a client, such as the words that
        run it in a network namespace.
        """
        self.inside = inside or {}
        self.folder, self.clients, self.host = folder, list(clients), host
        self.credentials = folder / "credentials"
        make_credentials(self.credentials, [host], self.clients)
        self.fleet_port, self.http_port, *ports = free_ports(2 + len(clients))
        self.runtime_ports = dict(zip(self.clients, ports, strict=True))
        self.superlink = SuperLinkClient(
            folder / "flwr",
            f"127.0.0.1:{self.http_port}",
            self.credentials / "server" / "ca.pem",
            self.inside.get("server", ()),
        )
        self.kept: dict[str, Kept] = {}
        self.logs: list[int] = []
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None

    # --- processes ---------------------------------------------------------------------------
    def keep(self, name: str, owner: str, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a command under this name; its output goes to a file of the same name."""
        log = os.open(self.log_file(name), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.logs.append(log)
        whole = [*self.inside.get(owner, ()), *command]
        self.kept[name] = Kept(whole, env, log, cwd=str(app_folder))

    def log_file(self, name: str) -> Path:
        """What a process printed."""
        return self.folder / f"{name}.log"

    def environment(self, owner: str) -> dict[str, str]:
        """Environment of the processes of `server` or of a client: homes of its own."""
        home = self.folder / owner
        return environment(home / "flwr") | {"KEEL_HOME": str(home / "keel")}

    def start_server(self) -> None:
        """SuperLink and ServerApp executor."""
        home, own = self.folder / "server", self.credentials / "server"
        home.mkdir(parents=True, exist_ok=True)
        env = self.environment("server")
        self.keep(
            "superlink",
            "server",
            [
                *(
                    sys.executable,
                    "-m",
                    "keel.deployment.superlink_server",
                    "--isolation",
                    "process",
                ),
                *("--host", "127.0.0.1", "--port", str(self.http_port)),
                *("--fleet-api-address", f"{self.host}:{self.fleet_port}"),
                *("--ssl-ca-certfile", str(own / "ca.pem")),
                *("--ssl-certfile", str(own / "server.pem")),
                *("--ssl-keyfile", str(own / "server.key")),
                *("--enable-supernode-auth", "--database", str(home / "superlink.db")),
                *("--superexec-auth-secret-file", str(own / "executor.secret")),
            ],
            env,
        )
        self.keep(
            "serverapp-executor",
            "server",
            [
                *("flower-superexec", "--root-certificates", str(own / "ca.pem")),
                *("--runtime-api-address", f"127.0.0.1:{self.http_port}"),
                *("--superexec-auth-secret-file", str(own / "executor.secret")),
            ],
            env,
        )
        for address in (f"127.0.0.1:{self.http_port}", f"{self.host}:{self.fleet_port}"):
            self.wait_for_server(address)

    def wait_for_server(self, address: str) -> None:
        """Return once the SuperLink answers there over TLS; TimeoutError after `start_limit_s`."""
        command = [*self.inside.get("server", ()), sys.executable, "-m", "keel.deployment.reach"]
        command += [address, str(self.credentials / "server" / "ca.pem")]
        deadline = time.monotonic() + start_limit_s
        while subprocess.run(command, cwd=app_folder, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                printed = self.log_file("superlink").read_text()[-2000:]
                raise TimeoutError(f"no SuperLink answers at {address}: {printed}")
            time.sleep(0.2)

    def start_client(self, name: str, node_config: Mapping[str, OptionValue]) -> None:
        """SuperNode, ClientApp executor and resident worker of one client."""
        own = self.credentials / name
        port = self.runtime_ports[name]
        env = self.environment(name) | {worker_variable: str(self.worker_socket(name))}
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.keep(f"worker-{name}", name, [sys.executable, "-m", "client_app.worker_server"], env)
        self.keep(f"supernode-{name}", name, self.supernode_command(name, node_config), env)
        self.keep(
            f"executor-{name}",
            name,
            [
                *(sys.executable, "-m", "keel.deployment.executor"),
                "--insecure",  # loopback; the secret authenticates it
                *("--runtime-api-address", f"127.0.0.1:{port}"),
                *("--superexec-auth-secret-file", str(own / "executor.secret")),
            ],
            env,
        )

    def supernode_command(self, name: str, node_config: Mapping[str, OptionValue]) -> list[str]:
        """What starts the SuperNode of a client."""
        own = self.credentials / name
        return [
            *(sys.executable, "-m", "keel.deployment.supernode", "--isolation", "process"),
            *("--superlink", f"{self.host}:{self.fleet_port}"),
            *("--root-certificates", str(own / "ca.pem")),
            *("--auth-supernode-private-key", str(own / "client.key")),
            *("--host", "127.0.0.1", "--port", str(self.runtime_ports[name])),
            *("--superexec-auth-secret-file", str(own / "executor.secret")),
            *("--node-config", as_words({"name": name, **node_config})),
        ]

    def worker_socket(self, name: str) -> Path:
        """The socket of a client's worker."""
        return self.folder / name / "worker.sock"

    def look_after(self) -> None:
        """Restart what dies, from now on."""
        arguments = (list(self.kept.values()), self.stop)
        self.thread = threading.Thread(target=supervise, args=arguments)
        self.thread.start()

    def pid(self, name: str) -> int:
        """The process id of a kept process."""
        return self.kept[name].process.pid

    def close(self) -> None:
        """End every process."""
        self.stop.set()
        if self.thread:
            self.thread.join()
        for kept in reversed(self.kept.values()):
            kept.end()
        for log in self.logs:
            os.close(log)


@contextlib.contextmanager
def running(
    folder: Path,
    node_configs: Mapping[str, Mapping[str, OptionValue]],
    host: str = "127.0.0.1",
    inside: Mapping[str, Sequence[str]] | None = None,
    kind: type[Loopback] = Loopback,
) -> Iterator[Loopback]:
    """A deployment with these clients (name to node config), ended on the way out."""
    local = kind(folder, list(node_configs), host, inside)
    try:
        local.start_server()
        for name, node_config in node_configs.items():
            local.superlink.register(local.credentials / name / "client.pub", name)
            local.start_client(name, node_config)
        local.look_after()
        for name in node_configs:
            if f"worker-{name}" in local.kept:
                worker_says(str(local.worker_socket(name)), start_limit_s)
        yield local
    finally:
        local.close()


def partitions(count: int) -> dict[str, dict[str, OptionValue]]:
    """Clients that are partitions of the run's source, named as in simulation."""
    return {f"client-{i:04d}": {"partition-id": i, "num-partitions": count} for i in range(count)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m keel.deployment.loopback", description=__doc__)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for the whole run")
    parser.add_argument("--folder", type=Path, help="keep logs and state here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keel-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            overrides: dict[str, OptionValue] = {"output-dir": str(keel_home() / "runs")}
            overrides |= parse_overrides(arguments.overrides)
            with running(folder, partitions(arguments.clients)) as local:
                run_id = local.superlink.submit(overrides)
                status = local.superlink.wait(run_id, arguments.limit_s)
                print(local.superlink.flwr("log", str(run_id), "deployment", "--show"))
        except (ValueError, OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0 if status == "finished:completed" else 1


if __name__ == "__main__":
    sys.exit(main())
