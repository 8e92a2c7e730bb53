"""Runs of Keel and of plain loops, as their processes and history files show them from outside.

Runs are started by public commands and functions. Their processes carry a mark in the environment.
"""

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import keel
from protocol.config import keel_home
from server_app.history import Line
from server_app.inline import run_inline
from server_app.observers import RunObserver

Keys = dict[str, str | int | float]
ROOT = Path(__file__).resolve().parents[2]
MARK = "BENCH_MARK"
TICKS = os.sysconf("SC_CLK_TCK")
LIMIT_S = 900.0
POLL_S = 0.02


def random_source(num: int) -> str:
    """The `source` key of `num` random 32 x 32 images in 10 classes, stored in Keel's home."""
    path = keel_home() / f"bench-{num}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        images = np.random.default_rng(0).integers(0, 256, (num, 32, 32, 3), dtype=np.uint8)
        labels = np.arange(num) % 10
        np.savez(path, x_train=images, y_train=labels, x_test=images[:50], y_test=labels[:50])
    return f"npz:{path}"


@dataclass(frozen=True)
class Process:
    """A living process, as /proc shows it. cpu_s: with ended children. own_mb: not shared."""

    command: str
    cpu_s: float
    own_mb: float


def pids(mark: str) -> list[int]:
    """The living processes with this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def process(pid: int) -> Process | None:
    """The process with this id; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text().splitlines()
    except OSError:
        return None
    own_kb = sum(int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return Process(command, sum(map(int, stat[11:15])) / TICKS, own_kb / 1024)


@contextmanager
def marked() -> Iterator[tuple[str, dict[str, str]]]:
    """A mark and an environment that has it; what is left of its processes is killed at the end."""
    mark = uuid.uuid4().hex
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        yield mark, os.environ | {MARK: mark, "PYTHONPATH": python_path}
    finally:
        for pid in pids(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Cost:
    """Of one round: wall and processor seconds; the largest process's peak, workers apart."""

    wall_s: float
    cpu_s: float
    server_mb: float = 0.0


def ray_rounds(keys: Keys, num_clients: int) -> tuple[float, list[Cost]]:
    """(seconds to the end of round 1, the cost of each later round) on Ray with two workers.

    A round is the time between two lines of history.jsonl, so its checkpoint is included.
    """
    with (
        tempfile.TemporaryDirectory(prefix="keel-bench-", ignore_cleanup_errors=True) as folder,
        marked() as (mark, environment),
    ):
        keys = {**keys, "output-dir": folder, "run-name": "bench"}
        share = len(os.sched_getaffinity(0)) / 2
        command = [sys.executable, "-m", "keel", "run", "--engine", "flower"]
        command += ["--clients", str(num_clients), "--cpus-per-client", f"{share:g}"]
        command += [f"{key}={value}" for key, value in keys.items()]
        started = time.perf_counter()
        history, log = Path(folder, "bench", "history.jsonl"), Path(folder, "log")
        with log.open("w") as stream:
            run = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=stream, stderr=stream)
        at: list[float] = []
        cpu_s: list[float] = []
        peaks_mb = [0.0]
        while len(at) < int(keys["num-rounds"]):
            time.sleep(POLL_S)
            found = [p for p in map(process, pids(mark)) if p]
            if not found or time.perf_counter() - started > LIMIT_S:
                run.kill()
                raise RuntimeError(f"the run did not finish:\n{log.read_text()[-2000:]}")
            own_mb = [p.own_mb for p in found if not p.command.startswith("ray::")]
            peaks_mb[-1] = max([peaks_mb[-1], *own_mb])
            if history.exists() and history.read_bytes().count(b"\n") > len(at):
                at.append(time.perf_counter())
                cpu_s.append(sum(p.cpu_s for p in found))
                peaks_mb.append(0.0)
        run.wait(timeout=120)
    spent = zip(itertools.pairwise(at), itertools.pairwise(cpu_s), peaks_mb[1:], strict=False)
    return at[0] - started, [Cost(b - a, d - c, mb) for (a, b), (c, d), mb in spent]


def bare_rounds(method: str, source: str, num_processes: int, rounds: int) -> list[Cost]:
    """The cost of each round but the first of bare.py."""
    command = [sys.executable, "-m", "tools.bench.bare", method, "--source", source]
    command += ["--processes", str(num_processes), "--rounds", str(rounds)]
    with marked() as (_, environment):
        done = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=LIMIT_S, check=True, stdout=subprocess.PIPE
        )
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    return [Cost(float(wall), float(cpu)) for wall, cpu, _ in lines[1:]]


class CpuClock(RunObserver):
    """The processor seconds that this process has spent at the end of each round."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_round(self, line: Line) -> None:
        """Note them."""
        self.at.append(time.process_time())


def inline_cpu_s(keys: Keys, num_clients: int, rounds: int) -> float:
    """Median processor seconds of a round of the inline engine after the first."""
    clock = CpuClock()
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
        run_keys = {**keys, "output-dir": folder, "num-rounds": 1 + rounds}
        run_inline(run_keys, num_clients, [clock])
    return statistics.median(b - a for a, b in itertools.pairwise(clock.at))


def inline_training_s(keys: Keys, num_clients: int) -> float:
    """The fewest wall seconds of local training in an inline round after the first."""
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
        history = keel.run({**keys, "output-dir": folder}, clients=num_clients, quiet=True).history
    return min(column(history, "seconds/training")[1:])


def column(history: object, name: str) -> list[float]:
    """A column of `Run.history`, with or without pandas."""
    rows = history if isinstance(history, list) else history.to_dict("records")  # type: ignore[attr-defined]  # a DataFrame
    return [float(row[name]) for row in rows]


def median_wall(costs: Sequence[Cost]) -> float:
    """Median wall seconds a round."""
    return statistics.median(cost.wall_s for cost in costs)
