"""Server optimizers: from the round's average to the next global model.

The average A of the replies gives a pseudo-gradient w - A, which FedAvg, FedAvgM and FedAdam
descend. They act on trainable arrays; buffers (BatchNorm's statistics) become the average.
Arrays are float32 on the CPU, by parameter name.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.server_optimizers import FedACGOptions, FedAdamOptions, FedAvgMOptions


class ServerOptimizer:
    """A server update rule; its `state` (moments, by name) is part of the server's checkpoint.

    This one is FedAvg's, without state: the average itself (McMahan et al. 2017), which is SGD with
    learning rate 1.
    """

    def __init__(self, options: Any) -> None:
        self.options = options

    def broadcast(self, current: Arrays) -> Arrays:
        """What clients start from: the global model, or FedACG's look-ahead model."""
        return current

    def step(self, current: Arrays, average: Arrays, trainable: Collection[str]) -> Arrays:
        """The next global model from the average of the clients' models; here w <- A, exactly."""
        return average

    def state(self) -> Arrays:
        """What a resumed run needs to produce the same result."""
        return {}

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""


class FedAvgMStep(ServerOptimizer):
    """FedAvgM (Hsu, Qi, Brown 2019): v <- beta v + (A - w); w <- w + lr v. No damping.

    This is torch's SGD with momentum on the gradient w - A; its momentum buffer is -v. It is
    written out as torch.optim imports torch's compiler, which takes a second.
    """

    def __init__(self, options: FedAvgMOptions) -> None:
        super().__init__(options)
        self.velocity: Arrays = {}

    def step(self, current: Arrays, average: Arrays, trainable: Collection[str]) -> Arrays:
        """One step of SGD on every trainable array."""
        moved = dict(average)
        for name in trainable:
            step = current[name] - average[name]
            if self.options.beta:
                if name in self.velocity:
                    step = self.velocity[name].mul(self.options.beta).add(step)
                self.velocity[name] = step
            moved[name] = current[name].add(step, alpha=-self.options.lr)
        return moved

    def state(self) -> Arrays:
        """The momentum buffer, by parameter name."""
        return dict(self.velocity)

    def load(self, state: Arrays) -> None:
        """Restore this momentum buffer."""
        self.velocity = dict(state)


class FedAdamStep(ServerOptimizer):
    """FedAdam (Reddi et al. 2021): moments of the pseudo-gradient, no bias correction.

    With D = A - w: m <- b1 m + (1 - b1) D;  v <- b2 v + (1 - b2) D^2;  then
    w <- w + lr m / (sqrt v + tau), from m = 0 and v = tau^2. torch's Adam corrects the bias.
    """

    def __init__(self, options: FedAdamOptions) -> None:
        super().__init__(options)
        self.m: Arrays = {}
        self.v: Arrays = {}

    def step(self, current: Arrays, average: Arrays, trainable: Collection[str]) -> Arrays:
        """One step on every trainable array."""
        o = self.options
        stepped = dict(average)
        for name in trainable:
            delta = average[name] - current[name]
            if name not in self.m:
                self.m[name] = torch.zeros_like(delta)
                self.v[name] = torch.full_like(delta, o.tau * o.tau)
            self.m[name] = o.beta1 * self.m[name] + (1 - o.beta1) * delta
            self.v[name] = o.beta2 * self.v[name] + (1 - o.beta2) * delta.square()
            stepped[name] = current[name] + o.lr * self.m[name] / (self.v[name].sqrt() + o.tau)
        return stepped

    def state(self) -> Arrays:
        """Both moments, by parameter name."""
        return {f"m.{k}": t for k, t in self.m.items()} | {f"v.{k}": t for k, t in self.v.items()}

    def load(self, state: Arrays) -> None:
        """Restore these moments."""
        self.m = {k[2:]: t for k, t in state.items() if k.startswith("m.")}
        self.v = {k[2:]: t for k, t in state.items() if k.startswith("v.")}


class FedACGStep(ServerOptimizer):
    """FedACG (Kim et al. 2024): clients start from the look-ahead model wh = w + lambda m.

    m <- lambda m + (A - wh);  w <- w + m, which is A itself. The global model is w, never wh. The
    clients' term is in client_app/objective.py.
    """

    def __init__(self, options: FedACGOptions) -> None:
        super().__init__(options)
        self.lambda_ = options.lambda_
        self.m: Arrays = {}

    def broadcast(self, current: Arrays) -> Arrays:
        """wh."""
        ahead = {name: current[name] + self.lambda_ * m for name, m in self.m.items()}
        return current | ahead if ahead else current

    def step(self, current: Arrays, average: Arrays, trainable: Collection[str]) -> Arrays:
        """m and w; buffers become the average."""
        sent = self.broadcast(current)
        for name in trainable:
            delta = average[name] - sent[name]
            self.m[name] = self.lambda_ * self.m[name] + delta if name in self.m else delta
        return average

    def state(self) -> Arrays:
        """m, by parameter name."""
        return dict(self.m)

    def load(self, state: Arrays) -> None:
        """Restore this m."""
        self.m = dict(state)


UPDATE_RULES: dict[str, Callable[[Any], ServerOptimizer]] = {
    "fedavg": ServerOptimizer,
    "fedavgm": FedAvgMStep,
    "fedadam": FedAdamStep,
    "fedacg": FedACGStep,
}


def server_optimizer(config: RunConfig) -> ServerOptimizer:
    """The run's server optimizer."""
    return UPDATE_RULES[config.rounds.server_optimizer](config.server_optimizer_options())
