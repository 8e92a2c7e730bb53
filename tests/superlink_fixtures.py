"""A SuperLink of the tests' own, for runs through `flwr run`."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from keel.deployment.loopback import free_ports
from keel.deployment.superlink import toml
from protocol.options import OptionValue

root = Path(__file__).parent.parent
left_behind_s = 20.0  # what a process may take to end after it was asked to


class SuperLink:
    """A local SuperLink of our own: its own ports, home and Ray, and a copy of the app to run.

    `flwr` starts it with its first command, as for any user. Every process that comes of it has
    our mark in its environment: these, and no others, are ended by `close`.
    """

    def __init__(self, folder: Path) -> None:
        self.mark = f"KEEL_TEST_SUPERLINK={secrets.token_hex(16)}"
        self.app = folder / "app"
        self.packages = folder / "packages"  # installed for everything that comes of it
        self.packages.mkdir()
        self.ray = Path(tempfile.mkdtemp(prefix="keel-ray-"))  # short: it holds sockets' paths
        skip = (".*", "*.egg-info", "__pycache__", "build")
        shutil.copytree(root, self.app, ignore=shutil.ignore_patterns(*skip))
        shutil.copy(root / ".gitignore", self.app)
        http, control = free_ports(2)
        name, _, value = self.mark.partition("=")
        self.env = os.environ | {
            name: value,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(self.packages), os.environ.get("PYTHONPATH", "")]),
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "KEEL_HOME": str(folder / "keel"),
            "RAY_TMPDIR": str(self.ray),
            "COLUMNS": "200",
        }

    def flwr(
        self, *arguments: str, timeout_s: float = 280, app: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`flwr` with these arguments, in the folder of the app, or of another one."""
        return subprocess.run(
            ["flwr", *arguments],
            cwd=app or self.app,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def run(
        self,
        keys: Mapping[str, OptionValue],
        num_supernodes: int,
        cpus_each: int,
        app: Path | None = None,
    ) -> str:
        """`flwr run . --stream`; returns what it printed."""
        config = " ".join(f"{key}={toml(value)}" for key, value in keys.items())
        federation = f"num-supernodes={num_supernodes} client-resources-num-cpus={cpus_each}"
        options = ["--stream", "--run-config", config, "--federation-config", federation]
        return self.flwr("run", ".", *options, app=app).stdout

    def processes(self) -> list[int]:
        """Ids of the living processes that came of this SuperLink."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = self.mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended, or belongs to another user
                continue
            if is_ours and state not in "ZX":
                found.append(int(folder.name))
        return found

    def close(self) -> list[int]:
        """End all that was started; the ids of processes that are still there after that."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.processes():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
            deadline = time.monotonic() + left_behind_s
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.2)
        shutil.rmtree(self.ray, ignore_errors=True)
        return self.processes()
