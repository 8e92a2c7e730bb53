"""One client in one round: everything that the client half of a method reads."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from client_app.networks import Networks
from client_app.precision import resolved
from client_app.samples import BatchPlan, Samples, Step, batch_size_for
from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.seeds import seed_of


def on_device(arrays: Arrays, device: torch.device) -> Arrays:
    """The arrays on this device; those that are there are not copied."""
    return {name: array.to(device) for name, array in arrays.items()}


@dataclass(frozen=True)
class RoundContext:
    """Client `client` in round `round` (from 1).

    received: the arrays that the server sent, on `device`; extra: what it sent beside them.
    state: the client state, by group name, on the CPU; {} at the first participation.
    last_accepted_round: the last round in which this client's update was aggregated; 0: none.
    model: this client's network on `device`, its weights not yet set.
    is_simulated: its data is a partition, and its noise may be drawn from the run's seed.
    caches: each `FrozenFeatureCache` in use; they share the run's `cache-mb`.
    faults: the loss terms that were not finite in training, as `MeanTerms.fault` names them.
    releases: the number of values in each call of `privatise`.
    """

    config: RunConfig
    client: str
    round: int
    device: torch.device
    train_samples: Samples
    test_samples: Samples
    received: Arrays
    extra: Arrays
    state: dict[str, Arrays]
    last_accepted_round: int
    model: StagedModel
    is_simulated: bool
    networks: Networks = field(repr=False)
    caches: WeakSet[Any] = field(default_factory=WeakSet, repr=False)
    faults: list[str] = field(default_factory=list, repr=False)
    releases: list[int] = field(default_factory=list, repr=False)

    @property
    def lr_factor(self) -> float:
        """The factor on every learning rate of this round."""
        return float(self.config.train.lr_decay ** (self.round - 1))

    @cached_property
    def precision(self) -> str:
        """The precision in which this client trains: fp32, tf32 or bf16."""
        return resolved(self.config.train.precision, self.model, self.device)

    def seed(self, *names: int | str) -> int:
        """The seed of one of this client's random streams in this round."""
        return seed_of(self.config.rounds.seed, self.round, self.client, *names)

    @cached_property
    def label_counts(self) -> Tensor:
        """This client's training samples per class, [num_classes]."""
        return torch.bincount(self.train_samples.labels, minlength=self.model.num_classes)

    def initial_weights(self) -> Arrays:
        """The weights that the run's seed gives this client's network; the same for all clients."""
        return self.networks.initial_weights[self.model.name]

    def plan(self, stream: str, count: int, unit: str) -> BatchPlan:
        """The batches of `count` epochs or steps (`unit`) in the order of the stream.

        Epoch n draws from (seed, round, client, stream, n).
        """
        numbers = range(count) if unit == "epochs" else itertools.count()
        generators = (torch.Generator().manual_seed(self.seed(stream, n)) for n in numbers)
        samples, train = self.train_samples, self.config.train
        size = batch_size_for(len(samples), train)
        max_steps = None if unit == "epochs" else count
        return samples.plan(size, self.config.data, generators, max_steps)

    def steps(self, stream: str, count: int, unit: str = "epochs") -> Iterator[Step]:
        """The steps of `plan`."""
        plan = self.plan(stream, count, unit)
        for number in range(len(plan.epochs)):
            yield self.train_samples.step(plan, number)

    def network(self, slot: str, name: str = "") -> StagedModel:
        """Another instance of this client's network (or `name`); its weights are unspecified.

        There is one instance per slot: a second call with the same slot returns the same instance.
        """
        return self.networks.network(name or self.model.name, slot)

    def frozen(self, slot: str, arrays: Arrays) -> StagedModel:
        """`network(slot)` with these weights, in eval mode and without gradient."""
        model = self.network(slot)
        model.load_state_dict(arrays)
        return model.eval().requires_grad_(False)
