"""A SuperLink as its users see it: Flower's command line, with a timeout on every wait."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.deployment import proxy_exceptions
from protocol.config import app_folder, project_file
from protocol.options import OptionValue
from protocol.own_code import table_of

command_timeout_s = 100.0
poll_s = 2.0  # each look takes a process a second
connection = "deployment"  # name of the SuperLink in the configuration of Flower's command line
app_packages = (
    "client_app",
    "data",
    "flower_adapter",
    "models",
    "protocol",
    "server_app",
    "strategies",
)


def toml(value: OptionValue) -> str:
    """The value as a TOML literal, which its JSON is too."""
    return json.dumps(value, ensure_ascii=False)


def run_config(values: Mapping[str, OptionValue]) -> str:
    """Keys and values in the form of --run-config and --node-config."""
    return " ".join(f"{key}={toml(value)}" for key, value in values.items())


def flower_keys(overrides: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """The overrides with keys that Flower takes: options of an own method in `method-options`."""
    prefix = f"{table_of(str(overrides.get('method', '')))}."
    own = {k.removeprefix(prefix): v for k, v in overrides.items() if k.startswith(prefix)}
    if not own:
        return dict(overrides)
    texts = [f"{key} = {toml(value)}" for key, value in own.items()]
    others = {k: v for k, v in overrides.items() if not k.startswith(prefix)}
    return others | {"method-options": ", ".join(texts)}


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def captured(
    words: Sequence[str], env: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """The command of these words once it has ended. TimeoutExpired after `timeout` s."""
    return subprocess.run(
        words, env=env, cwd=app_folder, capture_output=True, text=True, timeout=timeout, check=False
    )


class SuperLinkClient:
    """Talks to the SuperLink at `address` (its HTTP API) through `flwr`."""

    def __init__(self, flwr_home: Path | None, address: str, ca: Path | None = None) -> None:
        """flwr_home: a directory of this client's own, into which config.toml is written.

        None: the user's, in whose config.toml `address` names a connection. ca: None for a
        SuperLink without TLS.
        """
        self.environment = environment(flwr_home)
        self.connection = connection if flwr_home else address
        if flwr_home:
            security = (
                f"root-certificates = {toml(str(ca.absolute()))}" if ca else "insecure = true"
            )
            flwr_home.mkdir(parents=True, exist_ok=True)
            (flwr_home / "config.toml").write_text(
                f'[superlink]\ndefault = "{connection}"\n\n[superlink.{connection}]\n'
                f"address = {toml(address)}\n{security}\n"
            )

    def command(self, *arguments: str) -> list[str]:
        """The words of `flwr` with these arguments."""
        return [sys.executable, "-P", "-m", "flwr.cli.app", *arguments]

    def flwr(self, *arguments: str) -> str:
        """The output of `flwr`; RuntimeError, with that output, if it fails or takes too long."""
        try:
            done = captured(self.command(*arguments), self.environment, command_timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"flwr {' '.join(arguments)}: timed out") from None
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def flwr_json(self, *arguments: str) -> dict[str, Any]:
        """The parsed output of `flwr ... --format json`; RuntimeError if it reports a failure."""
        output = self.flwr(*arguments, "--format", "json")
        parsed: dict[str, Any] = json.loads(output[output.index("{") :])
        if parsed.get("success") is False:
            raise RuntimeError(f"flwr {' '.join(arguments)}: {parsed.get('error-message', parsed)}")
        return parsed

    def nodes(self) -> list[dict[str, Any]]:
        """The registered SuperNodes: node-id, status, ..."""
        nodes: list[dict[str, Any]] = self.flwr_json("supernode", "list", self.connection)["nodes"]
        return nodes

    def submit(self, overrides: Mapping[str, OptionValue], app: Path = app_folder) -> int:
        """Start a run of the Flower app in `app`; its id."""
        arguments = ["--run-config", run_config(flower_keys(overrides))]
        return int(self.flwr_json("run", str(app), self.connection, *arguments)["run-id"])

    def run_info(self, run_id: int) -> dict[str, Any]:
        """What the SuperLink knows about a run: status, network-traffic, ...

        ValueError if it does not know it, RuntimeError if it does not answer.
        """
        rows: list[dict[str, Any]] = self.flwr_json("list", self.connection)["runs"]
        for row in rows:
            if row["run-id"] == str(run_id):
                return row
        raise ValueError(f"the SuperLink does not know run {run_id}")

    def log(self, run_id: int) -> str:
        """The log of a run's ServerApp."""
        return self.flwr("log", str(run_id), self.connection, "--show")

    def wait(self, run_id: int, timeout_s: float) -> str:
        """The status of a run once it has ended; TimeoutError if it does not.

        A SuperLink that does not answer, for example while it restarts, is asked again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                status = str(self.run_info(run_id)["status"])
            except RuntimeError as error:
                status = f"unknown ({' '.join(str(error).split())[:300]})"
            if status.startswith("finished"):
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(f"run {run_id} is {status} after {timeout_s:g} s")
            time.sleep(poll_s)

    def stop(self, run_id: int) -> None:
        """Stop a run."""
        self.flwr("stop", str(run_id), self.connection)


def environment(flwr_home: Path | None) -> dict[str, str]:
    """This environment with this Python's scripts first, quick polls, nothing sent to Flower.

    flwr_home: Flower's home; None: the user's.
    """
    own_home = {"FLWR_HOME": str(flwr_home)} if flwr_home else {}
    return {
        **os.environ,
        **proxy_exceptions(os.environ),
        **own_home,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # Flower's own: 1 s
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "COLUMNS": "400",  # long lines stay whole
    }


def check_connection(name: str) -> None:
    """ValueError if `name` is neither HOST:PORT nor a SuperLink in the user's config.toml."""
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    if ":" in name or not path.exists():  # Flower's command line makes the file
        return
    try:
        found = tomllib.loads(path.read_text()).get("superlink", {})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    known = sorted(key for key, value in found.items() if isinstance(value, dict))
    if name not in known:
        raise ValueError(
            f"--federation {name}: expected HOST:PORT, or a connection in {path}: "
            f"{', '.join(known)}"
        )


@contextmanager
def app_directory() -> Iterator[Path]:
    """The Flower app: the checkout, or a temporary copy of the installed packages."""
    if (app_folder / "pyproject.toml").exists():
        yield app_folder
        return
    with tempfile.TemporaryDirectory(prefix="keel-app-") as folder:
        for package in app_packages:
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(app_folder / package, Path(folder, package), ignore=skip)
        Path(folder, "keel").mkdir()  # own methods import it
        shutil.copy(app_folder / "keel" / "__init__.py", Path(folder, "keel"))
        # Flower refuses patterns that match nothing, and what they exclude is not there
        project = re.sub(r"(?m)^fab-exclude = .*\n", "", project_file().read_text())
        Path(folder, "pyproject.toml").write_text(project)
        Path(folder, "LICENSE").write_text("Apache-2.0\n")
        yield Path(folder)
