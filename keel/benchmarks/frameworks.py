"""W1 and W2 in the inline engine, the bare loop and other frameworks: `keel bench frameworks`.

W1 also with pfl and fluke, and with Flower's own strategy and simulation, where each client has a
share of the GPU if there is one. All use the in-memory data and the network of bare.py, and Flower
also its training loop, so only the framework differs. On a CPU each is also compared with
`flwr run` on all cores, and so is Flower as its tutorials write it: a DataLoader that transforms
one image after the other. Frameworks that are not installed are left out.
"""

import contextlib
import importlib.util
import itertools
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from keel.benchmarks import bare
from keel.benchmarks.engine import (
    WORKLOADS,
    RoundClock,
    RoundCost,
    bare_rounds,
    history_of,
    keel_rounds,
    median_wall,
    processes,
    round_costs,
)
from keel.benchmarks.report import BenchOptions, Keys, Row, workload_source
from keel.deployment.simulation import MARK, marked_processes
from protocol.processes import num_cores

Measurement = tuple[str, Callable[[], Row]]  # what is measured, and how


# --- one process for each framework -------------------------------------------------------------


class Clock:
    """Prints seconds, processor seconds of all marked processes, and accuracy of each round."""

    def __init__(self, data: bare.Data, out: TextIO) -> None:
        self.data, self.out = data, out
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.cpu_s = sum(process.cpu_s for process in processes(os.environ[MARK]))
        self.started = time.perf_counter()

    def end(self, model: nn.Module) -> None:
        """Evaluate the model, print the round's line, begin the next round."""
        score = bare.accuracy(model, self.data)
        wall_s, cpu_before = time.perf_counter() - self.started, self.cpu_s
        self.start()
        print(f"{wall_s:.4f} {self.cpu_s - cpu_before:.4f} {score:.4f}", file=self.out, flush=True)


class PflNetwork(bare.PlainCNN):
    """The network of bare.py with the two methods that pfl calls."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy of a batch."""
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, float]:
        """Nothing: the clock evaluates."""
        return {}


def with_pfl(data: bare.Data, source: str, device: str, rounds: int, clock: Clock) -> None:
    """W1 with pfl's FederatedAveraging."""
    os.environ["PFL_PYTORCH_DEVICE"] = device
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    def samples_of(client: int) -> Any:
        part = data.parts[client]
        order = part[torch.randperm(len(part))].to(device)
        return Dataset((data.x[order], data.y[order]), user_id=str(client))

    class Rounds(TrainingProcessCallback):  # type: ignore[misc]  # without pfl, its base is Any
        def on_train_begin(self, *, model: Any) -> Any:
            clock.start()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            clock.end(model.pytorch_model)
            return False, Metrics()

    network = PflNetwork()
    sampler = get_user_sampler("minimize_reuse", list(range(bare.num_clients)))
    clients = FederatedDataset(samples_of, sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=bare.num_clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(clients, clients, [WeightByDatapoints()]),
        PyTorchModel(
            network,
            partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-5),
            torch.optim.SGD(network.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.01, local_batch_size=bare.batch_size
        ),
        callbacks=[Rounds()],
        send_metrics_to_platform=False,
    )


def with_fluke(data: bare.Data, source: str, device: str, rounds: int, clock: Clock) -> None:
    """W1 with fluke's FedAVG, its own evaluation off."""
    from fluke import DDict, FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.data import FastDataLoader
    from fluke.utils import FederationObserver

    class Parts:
        """What fluke calls a splitter: the clients' training data, and no test data."""

        def assign(self, num_clients: int, batch_size: int) -> Any:
            loaders = [
                FastDataLoader(
                    data.x[part], data.y[part], num_labels=10, batch_size=batch_size, shuffle=True
                )
                for part in data.parts
            ]
            return (loaders, [None] * num_clients), None

    class Rounds(FederationObserver):  # type: ignore[misc]  # without fluke, its base is Any
        def end_round(self, round: int) -> None:
            clock.end(algorithm.server.model.to(device))

    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device(device)
    environment.set_inmemory(True)
    environment.set_eval_cfg(pre_fit=False, post_fit=False, server=False, locals=False)
    client = {
        "batch_size": bare.batch_size,
        "local_epochs": 1,
        "loss": nn.CrossEntropyLoss,
        "optimizer": {"name": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    server = {"weighted": True}
    keys = DDict(client=DDict(client), server=DDict(server), model=bare.PlainCNN())
    algorithm = FedAVG(bare.num_clients, Parts(), keys)
    algorithm.set_callbacks(Rounds())
    clock.start()
    algorithm.run(rounds, 1.0)


@lru_cache(maxsize=1)
def data_of(source: str, device: str) -> bare.Data:
    """The data of a worker of Flower's simulation, read once."""
    return bare.Data(source, device)


class Pictures(Dataset[tuple[Tensor, int]]):
    """A client's images as a tutorial has them: each is decoded and transformed when it is read."""

    def __init__(self, data: bare.Data, client: int) -> None:
        from torchvision.transforms import Compose, Normalize, ToTensor

        self.data, self.part = data, data.parts[client]
        self.transform = Compose([ToTensor(), Normalize(data.mean, data.std)])

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, n: int) -> tuple[Tensor, int]:
        """The n-th image and its label."""
        from PIL import Image

        index = int(self.part[n])
        return self.transform(Image.fromarray(self.data.images[index])), int(self.data.y[index])


def train_as_written(data: bare.Data, client: int, received: bare.Weights) -> bare.Weights:
    """One epoch of one client, as in Flower's tutorial."""
    model = bare.PlainCNN()
    model.load_state_dict(received)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    for x, y in DataLoader(Pictures(data, client), batch_size=bare.batch_size, shuffle=True):
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return model.state_dict()


def client_app(source: str, device: str, is_tutorial: bool = False) -> ClientApp:
    """Trains a client as the bare loop does, or as a tutorial."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        bare.set_up()
        data, client = data_of(source, device), int(context.node_config["partition-id"])
        received = dict(message.content.array_records["arrays"].to_torch_state_dict())
        if is_tutorial:
            w = train_as_written(data, client, received)
        else:
            w = bare.train(data, client, received, None, is_moon=False)
        count = MetricRecord({"num-examples": len(data.parts[client])})
        content = RecordDict({"arrays": ArrayRecord(w), "metrics": count})
        return Message(content, reply_to=message)

    return app


class Strict(FedAvg):
    """Flower's FedAvg, except that a client that fails ends the run."""

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As in FedAvg."""
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        return super().aggregate_train(server_round, replies)


def with_flower(
    data: bare.Data, source: str, device: str, rounds: int, clock: Clock, is_tutorial: bool = False
) -> None:
    """W1 with Flower's FedAvg on Ray; the clients share a GPU, or have a core each."""
    from flwr.simulation import run_simulation

    app, model = ServerApp(), bare.PlainCNN().to(device)

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays.to_torch_state_dict())
        if server_round:
            clock.end(model)
        else:
            clock.start()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = bare.num_clients
        strategy = Strict(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        strategy.start(grid, ArrayRecord(model.state_dict()), rounds, evaluate_fn=evaluate)

    share = 1 / bare.num_clients if device == "cuda" else 0.0
    run_simulation(
        app,
        client_app(source, device, is_tutorial),
        bare.num_clients,
        backend_config={
            "init_args": {"address": "local"},  # not the cluster of the last `ray start` here
            "client_resources": {"num_cpus": 1, "num_gpus": share},
        },
    )


FRAMEWORKS = {
    "pfl": (with_pfl, "pfl"),
    "fluke": (with_fluke, "fluke"),
    "Flower with Ray": (with_flower, "ray"),
}
AS_WRITTEN = {"Flower as in its tutorials": (partial(with_flower, is_tutorial=True), "ray")}


def main(name: str, source: str, device: str, rounds: int, threads: int = 1) -> None:
    """Print a line for each round, as bare.py does; what the framework prints goes to stderr."""
    bare.set_up()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    data, out = bare.Data(source, device), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        train, _ = (FRAMEWORKS | AS_WRITTEN)[name]
        train(data, source, device, rounds, Clock(data, out))


# --- beside the inline engine -------------------------------------------------------------------


def rounds_with(name: str, options: BenchOptions, rounds: int, threads: int = 1) -> list[RoundCost]:
    """The cost of every round of W1 but the first, in a process of its own."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    arguments = name, workload_source(options), options.device, rounds, threads
    # not `-m`: Ray's workers have to find the functions in this module
    program = f"from keel.benchmarks.frameworks import main; main(*{arguments!r})"
    variables = {MARK: mark, "SPT_NOENV": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    try:
        return round_costs([sys.executable, "-c", program], options, variables)
    finally:
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def rounds(options: BenchOptions) -> Iterator[Measurement]:
    """W1 and W2: the inline engine in one process, against the others on the same device.

    On a GPU with eager steps, then with recorded ones.
    """
    count = 2 if options.is_quick else options.rounds
    common: Keys = {
        "source": workload_source(options),
        "device": options.device,
        "threads": 1,
        "num-rounds": count,
    }

    ways: dict[str, Keys] = {"inline engine": {}}
    if options.device == "cuda":
        ways["inline engine, recorded steps"] = {"cuda-graphs": True}

    @lru_cache(maxsize=1)
    def inline(name: str, way: str) -> list[RoundCost]:
        clock = RoundClock()
        keys = {**WORKLOADS[name], **common, **ways[way]}
        lines = history_of(keys, bare.num_clients, clock)
        costs = []
        for line, (before, after) in zip(lines[1:], itertools.pairwise(clock.at), strict=True):
            sent = {"mb_down": line["bytes_down"] / 1e6, "mb_up": line["bytes_up"] / 1e6}
            costs.append(RoundCost(sum(line["seconds"].values()), after - before, **sent))
        return costs

    def measure(workload: str, way: str, other: Callable[[], list[RoundCost]]) -> Row:
        both = inline(workload, way), other()
        wall, cpu = (
            [statistics.median(getattr(cost, key) for cost in costs) for costs in both]
            for key in ("wall_s", "cpu_s")
        )
        return {
            "ratio": round(wall[0] / wall[1], 3),
            "wall_seconds": [round(s, 3) for s in wall],
            "cpu_seconds": [round(s, 3) for s in cpu],
            "mb_down_and_up": [round(both[0][-1].mb_down, 2), round(both[0][-1].mb_up, 2)],
        }

    others = list(installed(FRAMEWORKS))
    for way in ways:
        for name, workload in WORKLOADS.items():
            loop = partial(bare_rounds, options, str(workload["method"]), 1, count, options.device)
            what = f"{name}: {way} / bare, 1 process, s a round"
            yield what, partial(measure, name, way, loop)
        for name in others:
            other = partial(rounds_with, name, options, count)
            yield f"W1: {way} / {name}, s a round", partial(measure, "W1", way, other)


def installed(frameworks: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    """The names of those whose package is installed; prints the others."""
    for name, (_, package) in frameworks.items():
        if importlib.util.find_spec(package) is not None:
            yield name
        else:
            print(f"{name} is left out: {package} is not installed", flush=True)


def on_all_cores(options: BenchOptions) -> Iterator[Row]:
    """W1 under `flwr run` with a worker a core, against the frameworks with a thread a core.

    Medians over all rounds and repetitions. Keel runs again before each of the others.
    """
    count, cores = 2 if options.is_quick else options.rounds, num_cores()
    keys = {**WORKLOADS["W1"], "source": workload_source(options), "num-rounds": count}
    names = list(installed(FRAMEWORKS | AS_WRITTEN))
    costs: dict[str, list[RoundCost]] = defaultdict(list)
    for name in names * (1 if options.is_quick else options.repetitions):
        costs["Keel"] += keel_rounds(options.home, keys, bare.num_clients, cores)[1]
        costs[name] += rounds_with(name, options, count, cores)
    for name in names:
        keel, other = median_wall(costs["Keel"]), median_wall(costs[name])
        yield {
            "what": f"W1 on {cores} cores: flwr run / {name}, s a round",
            "rounds": [len(costs["Keel"]), len(costs[name])],
            "ratio": round(keel / other, 3),
            "wall_seconds": [round(keel, 3), round(other, 3)],
        }


def frameworks(options: BenchOptions) -> Iterator[Row]:
    """`rounds` on the CPU, where Flower uses every core and the others one; then on all cores."""
    options = replace(options, device="cpu")
    for what, measure in rounds(options):
        yield {"what": what, **measure()}
    yield from on_all_cores(options)
