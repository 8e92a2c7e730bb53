"""Whole rounds under `flwr run`: W1 and W2 against the bare loops, and many clients.

Every run has a SuperLink of its own, ended with everything that it started. Beside the wall time of
a round stand the processor seconds of all processes together, which other work disturbs less.
"""

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from client_app.setup import model_for, open_source
from data.partitions import partition_indices
from keel.benchmarks.report import Row
from protocol.config import resolve_config
from protocol.options import OptionValue

root = Path(__file__).resolve().parent.parent
ticks = os.sysconf("SC_CLK_TCK")
Keys = dict[str, OptionValue]
W1: Keys = {
    "source": "fashion-mnist",
    "model": "cnn-fedintr",
    "image-size": 28,
    "channels": 1,
    "alpha": 0.5,
    "method": "fedavg",
}
W2: Keys = {**W1, "method": "moon", "moon.mu": 1.0, "moon.tau": 0.5}


@dataclass
class Process:
    """One process of ours, as /proc shows it."""

    pid: int
    command: str
    cpu_s: float
    memory_mb: float
    faults: int  # page faults without reading a disk, since it began


def processes(mark: str) -> list[Process]:
    """The living processes that have this mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            status = (folder / "status").read_text()
        except OSError:  # it has ended, or belongs to another user
            continue
        if stat[0] not in "ZX":
            cpu_s = sum(int(stat[n]) for n in (11, 12, 13, 14)) / ticks  # with ended children
            # its own memory: mapped files are everybody's
            [own_kb] = [line.split()[1] for line in status.splitlines() if "RssAnon" in line]
            pid, faults = int(folder.name), int(stat[7])
            found.append(Process(pid, command, cpu_s, int(own_kb) / 1024, faults))
    return found


def end(mark: str) -> None:
    """End the processes with this mark."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes(mark):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while processes(mark) and time.monotonic() < deadline:
            time.sleep(0.2)


@dataclass
class RoundCost:
    """Of one round: wall and processor seconds. Memory after it, in MB: server, largest worker.

    client_cpu_s: of local training, all clients together; the engine's is the rest of cpu_s.
    faults: page faults of all workers.
    """

    wall_s: float
    cpu_s: float
    server_mb: float = 0.0
    worker_mb: float = 0.0
    client_cpu_s: float = 0.0
    mb_down: float = 0.0
    mb_up: float = 0.0
    faults: int = 0


@contextmanager
def superlink_home(home: Path) -> Iterator[tuple[str, dict[str, str], Path]]:
    """(mark, environment, folder of the app) for one `flwr run`; its processes are ended after."""
    folder = Path(tempfile.mkdtemp(prefix="keel-b-"))  # short: Ray's sockets lie in it
    mark = f"KEEL_BENCHMARK={secrets.token_hex(16)}"
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    http, control = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    app = folder / "app"
    shutil.copytree(root, app, ignore=shutil.ignore_patterns(".*", "*.egg-info", "__pycache__"))
    shutil.copy(root / ".gitignore", app)
    env = os.environ | {
        mark.partition("=")[0]: mark.partition("=")[2],
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(http),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "KEEL_HOME": str(home),
        "RAY_TMPDIR": str(folder),
    }
    try:
        yield mark, env, app
    finally:
        end(mark)
        shutil.rmtree(folder, ignore_errors=True)


def keel_rounds(
    home: Path, keys: Keys, num_clients: int, timeout_s: float
) -> tuple[float, list[RoundCost]]:
    """(seconds from `flwr run` to the end of round 1, the cost of every later round).

    One core a client. A round is the time between two lines of history.jsonl: all of it, checkpoint
    included. RuntimeError with the end of the run's output if it fails or takes too long.
    """
    with superlink_home(home) as (mark, env, app):
        out = Path(env["FLWR_HOME"]).parent / "runs"
        given = {**keys, "output-dir": str(out)}
        config = " ".join(
            f'{k}="{v}"' if isinstance(v, str) else f"{k}={str(v).lower()}"
            for k, v in given.items()
        )
        federation = f"num-supernodes={num_clients} client-resources-num-cpus=1"
        log = app.parent / "log"
        command = ["flwr", "run", ".", "--stream", "--run-config", config]
        with log.open("w") as stream:
            flwr = subprocess.Popen(
                [*command, "--federation-config", federation],
                cwd=app,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        started = time.perf_counter()
        seen: list[tuple[float, list[Process]]] = []
        deadline = time.monotonic() + timeout_s
        while len(seen) < keys["num-rounds"]:  # type: ignore[operator]  # an int
            lines = [line for f in out.glob("*/history.jsonl") for line in f.open()]
            if len(lines) > len(seen):
                seen.append((time.perf_counter(), processes(mark)))
            has_failed = flwr.poll() not in (None, 0)
            if has_failed or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not finish:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        flwr.wait(timeout=60)
    costs = []
    history = [json.loads(line) for line in lines[1:]]
    for ((before, old), (after, new)), line in zip(itertools.pairwise(seen), history, strict=True):
        cpu_s = sum(p.cpu_s for p in new) - sum(p.cpu_s for p in old)
        workers = [p for p in new if p.command.startswith("ray::")]
        server = [p.memory_mb for p in new if "flwr-simulation" in p.command]
        faults_before = {p.pid: p.faults for p in old}
        costs.append(
            RoundCost(
                after - before,
                cpu_s,
                max(server, default=0.0),
                max((p.memory_mb for p in workers), default=0.0),
                line["client_cpu_seconds"],
                line["bytes_down"] / 1e6,
                line["bytes_up"] / 1e6,
                sum(p.faults - faults_before.get(p.pid, 0) for p in workers),
            )
        )
    return seen[0][0] - started, costs


def bare_rounds(
    home: Path, method: str, num_processes: int, rounds: int, device: str = "cpu"
) -> list[RoundCost]:
    """The cost of every round but the first of keel/benchmarks/bare.py."""
    command = [sys.executable, "-m", "keel.benchmarks.bare", method, "--device", device]
    done = subprocess.run(
        [*command, "--processes", str(num_processes), "--rounds", str(rounds)],
        env=os.environ | {"KEEL_HOME": str(home)},
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    return [RoundCost(float(wall), float(cpu)) for wall, cpu, _ in lines[1:]]


def median_wall(costs: list[RoundCost]) -> float:
    """Seconds a round."""
    return statistics.median(c.wall_s for c in costs)


def against_bare(home: Path, repetitions: int, rounds: int) -> Iterator[Row]:
    """W1 and W2: medians over all rounds of all repetitions, ours and two processes taking turns.

    One plain process has no bound to hold: one round of W1, once. Memory is beyond what a worker
    of W1 has with a hundredth of the data.
    """
    little = keel_rounds(home, {**W1, "data-fraction": 0.01, "num-rounds": 3}, 10, 900)[1]
    base_mb = max(cost.worker_mb for cost in little)
    for name, keys in (("W1", W1), ("W2 (MOON)", W2)):
        costs: dict[str, list[RoundCost]] = {"flwr run": [], "bare, 2": []}
        method = str(keys["method"])
        for _ in range(repetitions):
            costs["flwr run"] += keel_rounds(home, {**keys, "num-rounds": rounds}, 10, 900)[1]
            costs["bare, 2"] += bare_rounds(home, method, 2, rounds)
        if name == "W1":
            costs["bare, 1"] = bare_rounds(home, method, 1, 2)
        wall = {form: median_wall(each) for form, each in costs.items()}
        cpu = {form: statistics.median(c.cpu_s for c in each) for form, each in costs.items()}
        for form in list(costs)[1:]:
            yield {
                "what": f"{name}: flwr run with 2 workers / {form} process(es), s a round",
                "rounds": [len(costs["flwr run"]), len(costs[form])],
                "ratio": round(wall["flwr run"] / wall[form], 3),
                "to_reach": 0.8 if form == "bare, 2" else None,
                "wall_seconds": [round(wall["flwr run"], 3), round(wall[form], 3)],
                "cpu_seconds": [round(cpu["flwr run"], 3), round(cpu[form], 3)],
            }
        ours = costs["flwr run"]
        training = statistics.median(c.client_cpu_s for c in ours)
        yield {
            "what": f"{name}: processor seconds of a round beside local training, over those of it",
            "ratio": round(cpu["flwr run"] / training - 1, 3),
            "cpu_seconds": [round(cpu["flwr run"] - training, 3), round(training, 3)],
            "mb_down_and_up": [round(ours[-1].mb_down, 2), round(ours[-1].mb_up, 2)],
            "page_faults_of_workers": statistics.median(c.faults for c in ours),
        }
        worker_mb = max(cost.worker_mb for cost in ours)
        yield {
            "what": f"{name}: largest worker's own memory in MB, beyond a hundredth of the data",
            "ratio": round(worker_mb - base_mb),
            "to_reach": round(allowed_mb(keys)),
            "worker_mb": [round(worker_mb), round(base_mb)],
        }


def allowed_mb(keys: Keys) -> float:
    """What a worker may keep: the data once, the cache (none for FedAvg), four times the model."""
    config = resolve_config(keys)
    source = open_source(config)
    model = sum(array.nbytes for array in model_for(config, source).state_dict().values())
    cache_mb = 0 if config.rounds.method == "fedavg" else config.train.cache_mb
    return float((source.train.images.nbytes + 4 * model) / 2**20 + cache_mb)


def scale(home: Path, sources: dict[int, str]) -> Iterator[Row]:
    """10 of so many clients a round, 30 samples each: seconds a round, start-up, memory."""
    start_s, costs = {}, {}
    for count, source in sources.items():
        keys: Keys = {
            "source": source,
            "model": "cnn-fedreco",
            "partition": "iid",
            "fraction-train": 10 / count,
            "num-rounds": 21,
        }
        start_s[count], costs[count] = keel_rounds(home, keys, count, 900)
    base, most = 100, max(sources)
    for count, each in costs.items():
        wall = [median_wall(each), median_wall(costs[base])]
        yield {
            "what": f"{count} clients, 10 sampled / {base} clients, s a round",
            "ratio": round(wall[0] / wall[1], 3),
            "to_reach": 1.1 if count == most else None,
            "wall_seconds": [round(s, 3) for s in wall],
            "seconds_to_end_of_round_1": round(start_s[count], 1),
            "server_mb": round(each[-1].server_mb, 1),
        }
    grown_kb = 1024 * (costs[most][-1].server_mb - costs[base][-1].server_mb) / (most - base)
    yield {"what": "server's memory, KB a client", "ratio": round(grown_kb, 1), "to_reach": 20}


def splits(num_clients: int = 2000) -> Iterator[Row]:
    """Processor seconds to split 100,000 samples over so many clients."""
    labels = np.arange(100_000) % 200
    for name in ("classes", "dirichlet", "dirichlet-balanced"):
        started = time.process_time()
        partition_indices(
            name,
            labels,
            num_clients,
            alpha=0.5,
            classes_per_client=10,
            shards_per_client=2,
            min_size=1,
            seed=0,
        )
        seconds = round(time.process_time() - started, 1)
        what = f"split of 100,000 samples in 200 classes over {num_clients} clients: {name}"
        yield {"what": what, "cpu_seconds": seconds}
