"""Whole rounds under `flwr run`: W1 and W2 against the bare loops, and many clients.

Every run has its own SuperLink, which is ended with all its processes. Processor seconds are summed
over all processes of the run; other work on the machine disturbs them less than wall time.
"""

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keel.benchmarks.report import BenchOptions, Keys, Row, random_source, workload_source
from keel.deployment.simulation import MARK, marked_processes, simulation_superlink
from keel.deployment.superlink import app_directory, run_config
from protocol.config import app_folder
from server_app.history import Line
from server_app.inline import run_inline
from server_app.manifest import NUM_NOTED_ROUNDS
from server_app.observers import RunObserver
from server_app.run_reader import RunReader

ticks = os.sysconf("SC_CLK_TCK")
run_limit_s = 900.0
W1: Keys = {
    "model": "cnn-fedintr",
    "image-size": 28,
    "channels": 1,
    "alpha": 0.5,
    "method": "fedavg",
}
W2: Keys = {**W1, "method": "moon", "moon.mu": 1.0, "moon.tau": 0.5}
WORKLOADS = {"W1": W1, "W2 (MOON)": W2}


@dataclass
class Process:
    """One living process of a benchmark, as /proc shows it."""

    pid: int
    command: str
    cpu_s: float
    memory_mb: float
    faults: int  # minor page faults since it started


def processes(mark: str) -> list[Process]:
    """The living processes with this mark in their environment."""
    found = []
    for pid in marked_processes(mark):
        folder = Path(f"/proc/{pid}")
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        cpu_s = sum(int(stat[n]) for n in (11, 12, 13, 14)) / ticks  # with ended children
        found.append(Process(pid, command, cpu_s, own_mb(pid), int(stat[7])))
    return found


def own_mb(pid: int | str = "self") -> float:
    """A process's anonymous memory, in MB (mapped files are shared); 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in status if "RssAnon" in line) / 1024


@dataclass
class RoundCost:
    """Cost of one round.

    server_mb: peak during the round. worker_mb: of the largest worker, at the end of the round.
    client_cpu_s: processor seconds of local training, summed over clients. faults: of all workers.
    """

    wall_s: float
    cpu_s: float
    server_mb: float = 0.0
    worker_mb: float = 0.0
    client_cpu_s: float = 0.0
    mb_down: float = 0.0
    mb_up: float = 0.0
    faults: int = 0


def keel_rounds(
    home: Path, keys: Keys, num_clients: int, num_nodes: int
) -> tuple[float, list[RoundCost]]:
    """(seconds from `flwr run` to the end of round 1, the cost of every later round).

    num_nodes: nodes that simulate the clients, with one core each.
    A round is the time between two lines of history.jsonl, so its checkpoint is included.
    RuntimeError with the end of the run's output if it fails or takes too long.
    """
    variables = {"KEEL_HOME": str(home), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with (
        tempfile.TemporaryDirectory(prefix="keel-bench-") as folder,
        app_directory() as app,
        simulation_superlink(Path(folder), variables) as client,
    ):
        out, log = Path(folder, "runs"), Path(folder, "log")
        mark = client.environment[MARK]
        federation = f"num-supernodes={num_nodes} client-resources-num-cpus=1"
        keys = {**keys, "num-clients": num_clients}
        command = ["flwr", "run", ".", client.connection, "--stream"]
        command += ["--federation-config", federation]
        command += ["--run-config", run_config({**keys, "output-dir": str(out)})]
        with log.open("w") as stream:
            flwr = subprocess.Popen(
                command, cwd=app, env=client.environment, stdout=stream, stderr=stream
            )
        started = time.perf_counter()
        peaks_mb, server_pid = [0.0], 0
        seen: list[tuple[float, list[Process]]] = []
        while len(seen) < int(keys["num-rounds"]):
            history = [line for path in out.glob("*") for line in RunReader(path).history]
            if len(history) > len(seen):
                seen.append((time.perf_counter(), processes(mark)))
                servers = [p.pid for p in seen[-1][1] if "flwr-simulation" in p.command]
                server_pid = servers[0] if servers else 0
                peaks_mb.append(0.0)
            if server_pid:
                peaks_mb[-1] = max(peaks_mb[-1], own_mb(server_pid))
            has_failed = flwr.poll() not in (None, 0)
            if has_failed or time.perf_counter() - started > run_limit_s:
                raise RuntimeError(f"the run did not finish:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        flwr.wait(timeout=60)
    costs = []
    for ((before, old), (after, new)), line, server_mb in zip(
        itertools.pairwise(seen), history[1:], peaks_mb[1:-1], strict=True
    ):
        workers = [p for p in new if p.command.startswith("ray::")]
        faults_before = {p.pid: p.faults for p in old}
        costs.append(
            RoundCost(
                after - before,
                sum(p.cpu_s for p in new) - sum(p.cpu_s for p in old),
                server_mb,
                max((p.memory_mb for p in workers), default=0.0),
                line["client_cpu_seconds"],
                line["bytes_down"] / 1e6,
                line["bytes_up"] / 1e6,
                sum(p.faults - faults_before.get(p.pid, 0) for p in workers),
            )
        )
    return seen[0][0] - started, costs


def bare_rounds(
    options: BenchOptions, method: str, num_processes: int, rounds: int, device: str = "cpu"
) -> list[RoundCost]:
    """The cost of every round but the first of keel/benchmarks/bare.py."""
    command = [sys.executable, "-m", "keel.benchmarks.bare", method, "--device", device]
    command += ["--processes", str(num_processes), "--rounds", str(rounds)]
    return round_costs([*command, "--source", workload_source(options)], options, {})


def round_costs(
    command: Sequence[str], options: BenchOptions, variables: Mapping[str, str]
) -> list[RoundCost]:
    """The cost of every round but the first of a program that prints what bare.py prints.

    RuntimeError with the last error in its log if it fails, or takes too long.
    """
    with tempfile.TemporaryFile("w+") as log:
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"KEEL_HOME": str(options.home)} | dict(variables),
                cwd=app_folder,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=run_limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"it did not finish within {run_limit_s:.0f} s") from error
        if done.returncode:
            log.seek(0)
            text = log.read().strip() or f"exit code {done.returncode}"
            errors = re.findall(r"^[\w.]+(?:Error|Exception)\b.*", text, re.MULTILINE)
            raise RuntimeError(errors[-1] if errors else text.splitlines()[-1])
    lines = [line.split() for line in done.stdout.splitlines()]
    return [RoundCost(float(wall), float(cpu)) for wall, cpu, _ in lines[1:]]


def median_wall(costs: list[RoundCost]) -> float:
    """Median seconds a round."""
    return statistics.median(c.wall_s for c in costs)


def against_bare(options: BenchOptions) -> Iterator[Row]:
    """W1 and W2: medians over all rounds and repetitions; Keel and two processes take turns.

    One bare process runs W1 once, for comparison. Memory is what a worker needs beyond one with a
    hundredth of the data.
    """
    home, rounds = options.home, 2 if options.is_quick else options.rounds
    source = {"source": workload_source(options)}
    small = {**W1, **source, "data-fraction": 0.2 if options.is_quick else 0.01, "num-rounds": 3}
    base_mb = max(cost.worker_mb for cost in keel_rounds(home, small, 10, 2)[1])
    for name, workload in WORKLOADS.items():
        keys = {**workload, **source}
        costs: dict[str, list[RoundCost]] = {"flwr run": [], "bare, 2": []}
        method = str(keys["method"])
        for _ in range(1 if options.is_quick else options.repetitions):
            costs["flwr run"] += keel_rounds(home, {**keys, "num-rounds": rounds}, 10, 2)[1]
            costs["bare, 2"] += bare_rounds(options, method, 2, rounds)
        if name == "W1":
            costs["bare, 1"] = bare_rounds(options, method, 1, 2)
        wall = {form: median_wall(each) for form, each in costs.items()}
        cpu = {form: statistics.median(c.cpu_s for c in each) for form, each in costs.items()}
        for form in list(costs)[1:]:
            yield {
                "what": f"{name}: flwr run with 2 workers / {form} process(es), s a round",
                "rounds": [len(costs["flwr run"]), len(costs[form])],
                "ratio": round(wall["flwr run"] / wall[form], 3),
                "wall_seconds": [round(wall["flwr run"], 3), round(wall[form], 3)],
                "cpu_seconds": [round(cpu["flwr run"], 3), round(cpu[form], 3)],
            }
        keel = costs["flwr run"]
        training = statistics.median(c.client_cpu_s for c in keel)
        yield {
            "what": f"{name}: processor seconds of a round besides local training / local training",
            "ratio": round(cpu["flwr run"] / training - 1, 3),
            "cpu_seconds": [round(cpu["flwr run"] - training, 3), round(training, 3)],
            "mb_down_and_up": [round(keel[-1].mb_down, 2), round(keel[-1].mb_up, 2)],
            "page_faults_of_workers": statistics.median(c.faults for c in keel),
        }
        worker_mb = max(cost.worker_mb for cost in keel)
        yield {
            "what": f"{name}: largest worker's memory in MB, beyond that with 1 % of the data",
            "ratio": round(worker_mb - base_mb),
            "worker_mb": [round(worker_mb), round(base_mb)],
        }


def scale(options: BenchOptions) -> Iterator[Row]:
    """10 of 100 to 100,000 logical clients a round, 3 samples each: seconds, start-up, memory."""
    counts = (10, 20) if options.is_quick else (100, 10_000, 100_000)
    start_s, costs = {}, {}
    for count in counts:
        keys: Keys = {
            "source": random_source(options.home, 3 * count),
            "model": "cnn-fedreco",
            "partition": "iid",
            "fraction-train": 10 / count,
            "num-rounds": 2 if options.is_quick else 21,
        }
        start_s[count], costs[count] = keel_rounds(options.home, keys, count, 2)
    base, largest = counts[0], counts[-1]
    for count, each in costs.items():
        wall = [median_wall(each), median_wall(costs[base])]
        yield {
            "what": f"{count} clients, 10 sampled / {base} clients, s a round",
            "ratio": round(wall[0] / wall[1], 3),
            "wall_seconds": [round(s, 3) for s in wall],
            "seconds_to_end_of_round_1": round(start_s[count], 1),
            "server_mb": round(each[-1].server_mb, 1),
        }
    if largest > base:
        grown_mb = costs[largest][-1].server_mb - costs[base][-1].server_mb
        growth_kb = round(1024 * grown_mb / (largest - base), 1)
        yield {"what": "server's memory, KB a client", "ratio": growth_kb}


# method, model, clients: rounds in which nothing is trained
class RoundClock(RunObserver):
    """Observes a run: this process's processor seconds, and MB, at the end of each round."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.mb: list[float] = []

    def on_round(self, line: Line) -> None:
        """Note time and memory."""
        self.at.append(time.process_time())
        self.mb.append(own_mb())

    def rounds_s(self) -> list[float]:
        """Processor seconds of each round.

        Without the last, which always has a checkpoint, and the first, whose digests are noted.
        """
        rounds = [after - before for before, after in itertools.pairwise(self.at)]
        return rounds[NUM_NOTED_ROUNDS - 1 : -1]


def history_of(keys: Keys, num_clients: int, *observers: RunObserver) -> list[Line]:
    """The history of a run of the inline engine in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder:
        path = run_inline({**keys, "output-dir": folder}, num_clients, observers=observers)
        return RunReader(path).history


def personal(options: BenchOptions) -> Iterator[Row]:
    """Processor seconds to evaluate 2,000 personal models, over those of the rest of a round.

    FedReCo, inline, 10 clients sampled; 16 training and 4 test samples a client. Every second round
    is evaluated; clients that have trained keep their score.
    """
    num_clients = 100 if options.is_quick else 2000
    keys: Keys = {
        "source": random_source(options.home, 20 * num_clients),
        "partition": "iid",
        "method": "fedreco",
        "model": "cnn-fedreco",
        "fraction-train": 10 / num_clients,
        "local-test-fraction": 0.2,
        "evaluate-every": 2,
        "num-rounds": NUM_NOTED_ROUNDS + (3 if options.is_quick else 7),
        "device": "cpu",
    }
    clock = RoundClock()
    num = len(history_of(keys, num_clients, clock)[1]["personal"]["clients"])
    rounds = dict(enumerate(clock.rounds_s(), start=NUM_NOTED_ROUNDS + 1))
    evaluated, rest = (
        statistics.median(cost for number, cost in rounds.items() if number % 2 == odd)
        for odd in (0, 1)
    )
    yield {
        "what": f"evaluation of {num} personal models / the rest of a round, 10 trained: CPU s",
        "ratio": round((evaluated - rest) / rest, 2),
        "cpu_seconds": [round(evaluated - rest, 2), round(rest, 2)],
    }


def million(options: BenchOptions) -> Iterator[Row]:
    """FedReCo with 1,000,000 clients of 2 samples, 100 of them a round: 20 rounds, inline.

    Processor seconds, and this process's memory before the run and at its end.
    """
    num_clients, rounds = (1000, 5) if options.is_quick else (1_000_000, 20)
    keys: Keys = {
        "source": random_source(options.home, 2 * num_clients, (28, 28)),
        "partition": "shards",
        "shards-per-client": 1,
        "method": "fedreco",
        "model": "cnn-fedreco",
        "local-test-fraction": 0.5,
        "fraction-train": 100 / num_clients,
        "evaluate-clients": "cohort",
        "num-rounds": rounds,
        "device": "cpu",
    }
    started, before_mb, clock = time.process_time(), own_mb(), RoundClock()
    lines = history_of(keys, num_clients, clock)
    yield {
        "what": f"FedReCo, {num_clients:,} clients, 100 a round, {len(lines)} rounds",
        "cpu_s_a_round": round(statistics.median(clock.rounds_s()), 2),
        "cpu_s_to_end_of_round_1": round(clock.at[0] - started, 1),
        "mb_before_and_at_the_end": [round(before_mb), round(clock.mb[-1])],
        "clients_trained": len({name for line in lines for name in line["participants"]}),
    }


def memory(options: BenchOptions) -> Iterator[Row]:
    """Peak memory of rounds in which ResNet-50s are sent, none trained, over one round's updates.

    For the inline engine's process, and for the server under `flwr run` with two workers.
    """
    num_clients = 3 if options.is_quick else 20
    keys: Keys = {
        "source": random_source(options.home, 20 * num_clients),
        "partition": "iid",
        "model": "resnet20" if options.is_quick else "resnet50",
        "local-epochs": 0,
        "num-rounds": 3,
        "evaluate-every": 1000,
        "device": "cpu",
    }
    seen, is_over = [own_mb()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            seen.append(own_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        update_mb = history_of(keys, num_clients)[0]["bytes_up"] / 2**20
    finally:
        is_over.set()
        watcher.join()
    yield {
        "what": f"{num_clients} {keys['model']} clients: peak MB / MB of a round's updates",
        "ratio": round(max(seen) / update_mb, 2),
        "peak_and_updates_mb": [round(max(seen)), round(update_mb)],
    }
    peak_mb = max(cost.server_mb for cost in keel_rounds(options.home, keys, num_clients, 2)[1])
    yield {
        "what": "the same under flwr run with 2 workers: the server's peak",
        "ratio": round(peak_mb / update_mb, 2),
        "peak_and_updates_mb": [round(peak_mb), round(update_mb)],
    }
