"""A Ray cluster of two nodes on this machine, each with an address and a /tmp/ray of its own."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PORT = 6379
START_TIMEOUT_S = 200
START_ATTEMPTS = 3  # a busy machine may miss a deadline of Ray's own
# the head notices that a node was killed after 5 s instead of 30
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=True, timeout=30, capture_output=True, text=True)
    return done.stdout


def make_network(switch: str, spaces: Mapping[str, tuple[str, str]]) -> None:
    """Namespaces on a switch, which has no firewall of this machine's: (cable there, address)."""
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "br0", "type", "bridge")
    ip("-n", switch, "link", "set", "br0", "up")
    for space, (cable, address) in spaces.items():
        ip("netns", "add", space)
        ends = ("type", "veth", "peer", "name", "eth0", "netns", space)
        ip("-n", switch, "link", "add", cable, *ends)
        ip("-n", switch, "link", "set", cable, "master", "br0", "up")
        ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")


class Node:
    """A raylet in a network and a mount namespace of its own."""

    def __init__(self, cluster: "Cluster", number: int, mounts: Sequence[str], cpus: int) -> None:
        self.address, self.space = cluster.address(number), f"{cluster.mark}-{number}"
        own = cluster.folder / f"ray-{number}-{time.monotonic_ns()}"
        own.mkdir(parents=True)
        start = [
            *("ray", "start", f"--node-ip-address={self.address}", f"--num-cpus={cpus}"),
            *("--object-store-memory=150000000", "--block", "--disable-usage-stats"),
            *(["--head", f"--port={PORT}", "--include-dashboard=false"] if number == 0 else
              [f"--address={cluster.ray}"]),
        ]  # fmt: skip
        script = "; ".join(
            (
                *("set -e", "mkdir -p /tmp/ray", f"mount --bind {own} /tmp/ray"),
                *mounts,
                f"exec {' '.join(start)}",
            )
        )
        self.log = own.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.space, "unshare", "-m", "sh", "-c", script],
                env=cluster.environment | HEALTH,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command as one that runs on this node."""
        return ["nsenter", "-t", str(self.process.pid), "-m", "-n", *command]

    def kill(self) -> None:
        """End every process of the node, at once."""
        for pid in ip("netns", "pids", self.space).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.process.wait(timeout=30)


class Cluster:
    """Two namespaces on one switch. Nodes are started by `start`; `head` is number 0."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.mark, self.folder, self.home = f"kr{os.getpid() % 10000}", folder, home
        self.ray = f"{self.address(0)}:{PORT}"
        self.nodes: dict[int, Node] = {}
        python = Path(shutil.which("ray") or "ray").parent
        self.environment = os.environ | {
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "KEEL_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_TMPDIR": "/tmp",  # whose folder `ray` each node has for itself
        }
        self.environment.pop("RAY_ADDRESS", None)

    @staticmethod
    def address(number: int) -> str:
        return f"10.213.78.{number + 1}"

    def make_network(self) -> None:
        make_network(
            f"{self.mark}-s",
            {f"{self.mark}-{n}": (f"{self.mark}v{n}", self.address(n)) for n in range(2)},
        )

    def start(self, number: int, mounts: Sequence[str] = (), cpus: int = 1) -> Node:
        """Start this node, ending the one that had its number; returns once it has joined."""
        if number in self.nodes:
            self.nodes.pop(number).kill()
        for _ in range(START_ATTEMPTS):
            node = Node(self, number, mounts, cpus)
            deadline = time.monotonic() + START_TIMEOUT_S
            while "--block" not in node.log.read_text():
                if node.process.poll() is not None or time.monotonic() > deadline:
                    node.kill()
                    break
                time.sleep(0.2)
            else:
                self.nodes[number] = node
                return node
        raise AssertionError(node.log.read_text())

    def keel(self, *words: str) -> subprocess.Popen[str]:
        """`keel` with these words on the head."""
        return subprocess.Popen(
            self.nodes[0].inside(["python", "-m", "keel", *words]),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, timeout_s: float = 600) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `keel run` on the cluster."""
        process = self.keel("run", *words, "--engine", "flower", "--ray", self.ray)
        out, err = process.communicate(timeout=timeout_s)
        return process.returncode, out, err

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
        for space in (f"{self.mark}-0", f"{self.mark}-1", f"{self.mark}-s"):
            with contextlib.suppress(subprocess.CalledProcessError):
                for pid in ip("netns", "pids", space).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                ip("netns", "del", space)


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """A cluster whose nodes share `folder/home` as $KEEL_HOME; skips where there can be none."""
    if os.getuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    home = folder / "home"
    home.mkdir(parents=True)
    cluster = Cluster(folder, home)
    try:
        try:
            cluster.make_network()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no namespaces: {error.stderr}")
        cluster.start(0)
        yield cluster
    finally:
        cluster.close()


def assert_only_who_has_the_token_joins(raylet: Path) -> None:
    """Its Ray accepts a client with its token, and none without or with another one.

    raylet: its folder in /proc.
    """
    address = re.search(r"--gcs-address=([\d.:]+)", (raylet / "cmdline").read_text())
    assert address
    own = dict(v.split("=", 1) for v in (raylet / "environ").read_text().split("\0") if v)
    none = {k: v for k, v in own.items() if not k.startswith("RAY_AUTH")}
    none |= {"RAY_NUM_REDIS_GET_RETRIES": "1"}  # to be refused soon
    others = none | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    code = f"import ray; ray.init(address={address[1]!r}); print('in')"
    joining = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for environment in (none, others, own)
    ]
    assert [each.communicate(timeout=START_TIMEOUT_S)[0] for each in joining] == ["", "", "in\n"]
