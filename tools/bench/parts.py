"""The benchmarks. Each yields rows: what was measured, a ratio, and both sides of it."""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keel
from tools.bench.runs import (
    LIMIT_S,
    ROOT,
    Cost,
    Keys,
    bare_rounds,
    column,
    inline_cpu_s,
    inline_training_s,
    marked,
    median_wall,
    random_source,
    ray_rounds,
)

Row = dict[str, object]


@dataclass(frozen=True)
class Sizes:
    """is_quick: the smallest sizes, to see that a part runs; its numbers mean nothing."""

    is_quick: bool = False
    repetitions: int = 2
    rounds: int = 5
    device: str = "cuda"  # of the part gpu


def bare(sizes: Sizes) -> Iterator[Row]:
    """W1 and W2: rounds on Ray with two workers, over two processes that are bare loops.

    W1: Fashion-MNIST, 10 clients, Dirichlet 0.5, one epoch of batch 64, a CNN for 28 x 28 x 1, the
    global model evaluated in each round. W2: the same with MOON. Medians; both take turns.
    """
    source = random_source(600) if sizes.is_quick else "fashion-mnist"
    rounds = 2 if sizes.is_quick else sizes.rounds
    w1: Keys = {"source": source, "model": "cnn-fedintr", "image-size": 28, "channels": 1}
    w1 |= {"alpha": 0.5, "num-rounds": rounds, "device": "cpu"}
    workloads: dict[str, Keys] = {
        "W1": {**w1, "method": "fedavg"},
        "W2": {**w1, "method": "moon", "moon.mu": 1.0, "moon.tau": 0.5},
    }
    for name, keys in workloads.items():
        ours: list[Cost] = []
        theirs: list[Cost] = []
        for _ in range(1 if sizes.is_quick else sizes.repetitions):
            ours += ray_rounds(keys, 10)[1]
            theirs += bare_rounds(str(keys["method"]), source, 2, rounds)
        cpu_s = [statistics.median(cost.cpu_s for cost in costs) for costs in (ours, theirs)]
        yield ratio(
            f"{name}: round / two bare processes", median_wall(ours), median_wall(theirs)
        ) | {"cpu_seconds": [round(s, 2) for s in cpu_s]}


def steps(sizes: Sizes) -> Iterator[Row]:
    """FedCKA over FedAvg with its small CNN: processor seconds of a round of one client.

    1,280 images, batch 128, 10 epochs, one thread. The least of interleaved repetitions after one
    to warm up.
    """
    num, rounds = (128, 1) if sizes.is_quick else (1280, 2)
    common: Keys = {"source": random_source(num), "model": "cnn-fedcka", "partition": "iid"}
    common |= {"batch-size": 128, "local-epochs": 1 if sizes.is_quick else 10}
    common |= {"evaluate-every": 1000, "device": "cpu", "threads": 1}
    spent: dict[str, list[float]] = {"fedcka": [], "fedavg": []}
    for _ in range(2 if sizes.is_quick else 2 + sizes.repetitions):
        for method, seconds in spent.items():
            seconds.append(inline_cpu_s({**common, "method": method}, 1, rounds))
    yield ratio("cnn-fedcka: fedcka / fedavg", *(min(s[1:]) for s in spent.values()))


class LeNet(nn.Module):
    """The layers of cnn-fedreco for 3 x 32 x 32, as one would write them without Keel."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(400, 120), nn.Linear(120, 84)
        self.out = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, num_classes]."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        logits: Tensor = self.out(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return logits


def own(sizes: Sizes) -> Iterator[Row]:
    """A network of one's own over the built-in one of the same layers, as `steps` measures."""
    num, rounds = (128, 1) if sizes.is_quick else (1280, 5)
    common: Keys = {"source": random_source(num), "partition": "iid", "batch-size": 128}
    common |= {"local-epochs": 1 if sizes.is_quick else 10, "evaluate-every": 1000}
    common |= {"device": "cpu", "threads": 1}
    for method in ("fedavg", "fedcka"):
        spent: dict[str, list[float]] = {"tools.bench.parts:LeNet": [], "cnn-fedreco": []}
        for _ in range(2 if sizes.is_quick else 1 + sizes.repetitions):
            for model, seconds in spent.items():
                keys = {**common, "method": method, "model": model}
                seconds.append(inline_cpu_s(keys, 1, rounds))
        yield ratio(f"{method}: own network / cnn-fedreco", *(min(s[1:]) for s in spent.values()))


def clients(sizes: Sizes) -> Iterator[Row]:
    """10 of 100,000 clients a round, over 10 of 100: round and start, on Ray with two workers."""
    few, many = (10, 20) if sizes.is_quick else (100, 100_000)
    start_s, round_s = [], []
    for count in (many, few):
        keys: Keys = {"source": random_source(3 * count), "model": "cnn-fedreco"}
        keys |= {"partition": "iid", "train-fraction": 10 / count, "device": "cpu"}
        keys["num-rounds"] = 2 if sizes.is_quick else 21
        start, costs = ray_rounds(keys, count)
        start_s.append(start)
        round_s.append(median_wall(costs))
    yield ratio(f"{many:,} clients / {few}: to the end of round 1", *start_s)
    yield ratio(f"{many:,} clients / {few}: round", *round_s)


def memory(sizes: Sizes) -> Iterator[Row]:
    """The server's peak memory with 20 clients of ResNet-50, nothing trained, in GB."""
    num, model = (3, "resnet20") if sizes.is_quick else (20, "resnet50")
    keys: Keys = {"source": random_source(20 * num), "partition": "iid", "model": model}
    keys |= {"local-epochs": 0, "num-rounds": 3, "evaluate-every": 1000, "device": "cpu"}
    peak_mb = max(cost.server_mb for cost in ray_rounds(keys, num)[1])
    what = f"{num} clients of {model}: the server's peak, GB"
    yield {"what": what, "value": round(peak_mb / 1024, 2)}


def deployment(sizes: Sizes) -> Iterator[Row]:
    """Seconds of a deployed round of two clients on loopback, a tenth of one in training."""
    keys: Keys = {"source": "digits", "model": "cnn-fedreco", "alpha": 5.0, "device": "cpu"}
    keys |= {"evaluate-global": "false", "num-rounds": 2 if sizes.is_quick else 10}
    with tempfile.TemporaryDirectory(prefix="keel-bench-") as folder, marked() as (_, environment):
        command = [sys.executable, "-m", "keel", "deploy", "loopback", "--clients", "2"]
        keys |= {"output-dir": f"{folder}/runs", "run-name": "bench"}
        command += ["--output", folder, *(f"{key}={value}" for key, value in keys.items())]
        subprocess.run(
            command, env=environment, cwd=ROOT, timeout=LIMIT_S, check=True, capture_output=True
        )
        history = keel.load_run(f"{folder}/runs/bench").history
        seconds = column(history, "seconds/training")[1:]
    yield {"what": "deployed round, s", "value": round(statistics.median(seconds), 2)}


RECORDED = (  # network, method, batch size, clients
    ("cnn-fedreco", "fedavg", 10, 10),
    ("cnn-fedreco", "fedreco", 10, 50),
    ("cnn-fedintr", "fedavg", 64, 10),
    ("cnn-fedintr", "fedintr", 64, 10),
    ("cnn-fedcka", "fedavg", 64, 10),
    ("cnn-fedcka", "fedcka", 64, 10),
    ("resnet18", "fedavg", 50, 4),
    ("resnet18", "fedrcl", 50, 4),
)


def gpu(sizes: Sizes) -> Iterator[Row]:
    """Local training with recorded steps over eager ones, in seconds a round.

    Each client has eight batches and five epochs, for FedReCo an epoch each of k_u
    and k_v. On a CPU, steps are not recorded.
    """
    for model, method, batch, num_clients in RECORDED[: 2 if sizes.is_quick else None]:
        num_clients, num_batches = (2, 1) if sizes.is_quick else (num_clients, 8)
        keys: Keys = {"source": random_source(num_clients * batch * num_batches * 5 // 4)}
        keys |= {"model": model, "method": method, "batch-size": batch, "partition": "iid"}
        keys |= {"local-test-fraction": 0.2}
        if method != "fedreco":
            keys["local-epochs"] = 1 if sizes.is_quick else 5
        keys |= {"device": sizes.device, "num-rounds": 2 if sizes.is_quick else 4}
        keys |= {"evaluate-every": 1000}
        recorded, eager = (
            inline_training_s({**keys, "cuda-graphs": is_recorded}, num_clients)
            for is_recorded in (sizes.device == "cuda", False)
        )
        what = f"{num_clients} clients, {model}, batch {batch}: {method}, recorded / eager"
        peak_mb = torch.cuda.max_memory_allocated() >> 20 if sizes.device == "cuda" else None
        yield ratio(what, recorded, eager) | {"peak_mb": peak_mb}


def ratio(what: str, one_s: float, other_s: float) -> Row:
    """A row of two times."""
    return {
        "what": what,
        "value": round(one_s / other_s, 3),
        "seconds": [round(one_s, 3), round(other_s, 3)],
    }


PARTS: dict[str, Callable[[Sizes], Iterator[Row]]] = {
    part.__name__: part for part in (bare, steps, own, clients, memory, deployment, gpu)
}
ON_A_CPU = ("bare", "steps", "own", "clients", "memory", "deployment")


def machine() -> Row:
    """The machine that the numbers were measured on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 1) for load in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }
