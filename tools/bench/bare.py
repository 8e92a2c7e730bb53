"""W1 and W2 without any framework: what one would write by hand, on float tensors in memory.

    python -m tools.bench.bare fedavg --processes 2 --rounds 5

10 clients of Fashion-MNIST (Dirichlet 0.5) train 1 epoch with batch 64; then the global model is
evaluated on the test set. One process simulates all clients; two simulate five each. Prints wall
seconds, processor seconds and accuracy, one line a round.
"""

import argparse
import copy
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.partitions import dirichlet_partition
from data.sources import Reading, load_source
from protocol.config import keel_home

num_clients, batch_size, mu, tau = 10, 64, 1.0, 0.5
Weights = dict[str, Tensor]


class PlainCNN(nn.Module):
    """Three 3x3 convolutions (8, 16, 32), each with ReLU and pool; fully connected 128, 96, 10."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 32, 3)])
        self.fc1, self.fc2, self.out = nn.Linear(32, 128), nn.Linear(128, 96), nn.Linear(96, 10)

    def features(self, x: Tensor) -> Tensor:
        """[B, 1, 28, 28] -> [B, 96]."""
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))

    def forward(self, x: Tensor) -> Tensor:
        """[B, 1, 28, 28] -> [B, 10]."""
        logits: Tensor = self.out(self.features(x))
        return logits


class Data:
    """The images as normalised float tensors; `parts` are the indices of each client's."""

    def __init__(self, source_key: str, device: str = "cpu") -> None:
        source = load_source(
            source_key, keel_home() / "data", keel_home() / "cache", Reading((28, 28), 1)
        )
        labels = np.asarray(source.train.labels)
        self.parts = [torch.from_numpy(p) for p in dirichlet_partition(labels, num_clients, 0.5, 0)]
        self.mean, self.std = source.mean[0], source.std[0]
        self.images = source.train.images[:, 0]  # [60,000, 28, 28], uint8
        self.x, self.x_test = (
            ((torch.from_numpy(np.array(s.images)).float() / 255 - self.mean) / self.std).to(device)
            for s in (source.train, source.test)
        )
        self.y, self.y_test = (
            torch.from_numpy(np.array(s.labels)).to(device) for s in (source.train, source.test)
        )


def train(
    data: Data, client: int, received: Weights, previous: Weights | None, is_moon: bool
) -> Weights:
    """One epoch of one client from the received weights."""
    model, w_g, w_p = (PlainCNN().to(data.x.device) for _ in range(3))
    model.load_state_dict(received)
    w_g.load_state_dict(received)
    w_p.load_state_dict(previous or received)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5)
    part = data.parts[client]
    order = part[torch.randperm(len(part))].to(data.x.device)
    for index in torch.split(order, batch_size):
        x, y = data.x[index], data.y[index]
        z = model.features(x)
        loss = F.cross_entropy(model.out(z), y)
        if is_moon:
            with torch.no_grad():
                z_g, z_p = w_g.features(x), w_p.features(x)
            sims = [F.cosine_similarity(z, other, dim=1) for other in (z_g, z_p)]
            target = torch.zeros_like(y)
            loss = loss + mu * F.cross_entropy(torch.stack(sims, dim=1) / tau, target)
        sgd.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        sgd.step()
    return {name: array.detach().clone() for name, array in model.state_dict().items()}


class Clients:
    """Trains some of the clients in one process."""

    def __init__(self, data: Data, clients: list[int], is_moon: bool) -> None:
        self.data, self.clients, self.is_moon = data, clients, is_moon
        self.previous: dict[int, Weights] = {}

    def round(self, received: Weights) -> Weights:
        """The sum of the clients' weights times their number of samples."""
        total: Weights = {}
        for client in self.clients:
            previous = self.previous.get(client) if self.is_moon else None
            w = self.previous[client] = train(self.data, client, received, previous, self.is_moon)
            n = len(self.data.parts[client])
            total = {name: total.get(name, 0) + n * array for name, array in w.items()}
        return total


def other_process(pipe: Connection, source: str, clients: list[int], is_moon: bool) -> None:
    """Answers each set of weights with the sum over its clients, until it receives None."""
    torch.set_num_threads(1)
    group = Clients(Data(source), clients, is_moon)
    pipe.send(None)
    while (received := pipe.recv()) is not None:
        total = group.round({n: torch.from_numpy(a) for n, a in received.items()})
        pipe.send(({n: a.numpy() for n, a in total.items()}, time.process_time()))


def accuracy(model: nn.Module, data: Data) -> float:
    """Accuracy of the model on the test set."""
    batches = zip(torch.split(data.x_test, 500), torch.split(data.y_test, 500), strict=True)
    with torch.no_grad():
        num_correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return num_correct / len(data.y_test)


def set_up() -> None:
    """One thread; on a GPU float32 in convolutions too, as Keel's runs: torch's default is TF32."""
    torch.set_num_threads(1)
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # at import


def main() -> None:
    """Print seconds and accuracy of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["fedavg", "moon"])
    parser.add_argument("--processes", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="for one process; two use the CPU")
    parser.add_argument("--source", default="fashion-mnist")
    arguments = parser.parse_args()
    is_moon = arguments.method == "moon"
    set_up()
    torch.manual_seed(0)
    data, model = Data(arguments.source, arguments.device), PlainCNN().to(arguments.device)
    half = num_clients // arguments.processes
    group = Clients(data, list(range(half)), is_moon)
    pipe: Connection | None = None
    process = None
    if arguments.processes == 2:
        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=other_process,
            args=(theirs, arguments.source, list(range(half, num_clients)), is_moon),
            daemon=True,
        )
        process.start()
        pipe.recv()
    theirs_cpu = theirs_before = 0.0
    for _ in range(arguments.rounds):
        started, cpu_started = time.perf_counter(), time.process_time()
        received = copy.deepcopy(model.state_dict())
        if pipe:
            pipe.send({n: a.numpy() for n, a in received.items()})
        total = group.round(received)
        if pipe:
            theirs_total, theirs_now = pipe.recv()
            theirs_cpu, theirs_before = theirs_now - theirs_before, theirs_now
            total = {n: a + torch.from_numpy(theirs_total[n]) for n, a in total.items()}
        model.load_state_dict({n: a / len(data.y) for n, a in total.items()})
        score = accuracy(model, data)
        wall_s = time.perf_counter() - started
        cpu_s = time.process_time() - cpu_started + theirs_cpu
        print(f"{wall_s:.4f} {cpu_s:.4f} {score:.4f}", flush=True)
    if pipe and process:
        pipe.send(None)
        process.join(timeout=60)


if __name__ == "__main__":
    main()
