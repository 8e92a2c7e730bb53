"""One client in one round: everything that a method's client half reads."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from client_app.samples import Samples, Step, batch_size_for
from models import StagedModel
from protocol.config import RunConfig
from protocol.messages import DatasetSpec
from protocol.seeds import seed_of

if TYPE_CHECKING:
    from client_app.feature_cache import FrozenFeatureCache
    from client_app.worker import Worker

Arrays = dict[str, Tensor]


@dataclass(frozen=True)
class RoundContext:
    """Client `client` in round `round` (from 1).

    data: what labels and pixels of the run mean.
    received: the arrays that the server sent, on `device`; extra: what it sent beside them.
    state: what this client kept, by group name, on the CPU; {} at its first participation.
    last_accepted_round: the last round whose reply of this client the server used; 0: none.
    model: this client's network on `device`, its weights not yet set.
    is_simulated: its data is a partition; its noise may come from the run's seed.
    caches: those alive, which share the run's `cache-mb`.
    """

    config: RunConfig
    data: DatasetSpec
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
    worker: "Worker" = field(repr=False)
    caches: "WeakSet[FrozenFeatureCache]" = field(default_factory=WeakSet, repr=False)

    @property
    def lr_factor(self) -> float:
        """What every learning rate of this round is multiplied by."""
        return float(self.config.train.lr_decay ** (self.round - 1))

    def seed(self, *names: int | str) -> int:
        """The seed of one of this client's random streams in this round."""
        return seed_of(self.config.rounds.seed, self.round, self.client, *names)

    @cached_property
    def label_counts(self) -> Tensor:
        """This client's training samples per class, [num_classes]."""
        return torch.bincount(self.train_samples.labels, minlength=self.model.num_classes)

    def initial_weights(self) -> Arrays:
        """The weights that the run's seed gives this client's network; the same for all clients."""
        return self.worker.initial_weights(self.model.name)

    def batches(self, stream: str, epoch: int = 0) -> Iterator[Step]:
        """One epoch of the training samples in the order of the stream (seed, round, client)."""
        generator = torch.Generator().manual_seed(self.seed(stream, epoch))
        size = batch_size_for(len(self.train_samples), self.config.train)
        return self.train_samples.batches(size, self.config.data, generator)

    def frozen(self, name: str, arrays: Arrays) -> StagedModel:
        """Another instance of this client's network with these weights, in eval mode, no gradient.

        One instance a name lives in the worker: a second call with a name overwrites the first.
        """
        model = self.worker.network(self.config, self.data, self.model.name, name, self.device)
        model.load_state_dict(arrays)
        return model.eval().requires_grad_(False)
