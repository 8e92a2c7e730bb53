"""The roster of a simulation: entries are computed from the partition when they are read.

A simulated client is a number: nothing is sent to it or written about it until it is sampled.
Values over all clients are computed from arrays.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache

import numpy as np

from client_app.node_config import own_architecture, own_roster_entry
from client_app.setup import (
    client_indices,
    model_for,
    representation_width,
    simulated_node,
    split_over_clients,
)
from data.sources import Source
from protocol.config import RunConfig
from protocol.messages import RosterEntry
from strategies.cohort import FIRST_NODE, name_of

CACHED_ENTRIES = 4096
MAX_LISTED, NUM_SHOWN = 10_000, 1000  # of more clients, files and pictures show the first thousand


class SimulatedRoster(Mapping[int, RosterEntry]):
    """Node id to entry of clients 0 to N - 1, which are nodes 2 to N + 1."""

    def __init__(self, config: RunConfig, source: Source, num_clients: int) -> None:
        self.config, self.source, self.num_clients = config, source, num_clients
        self.parts = split_over_clients(config, num_clients)  # raises where it is impossible
        self.widths = {
            name: representation_width(config, model_for(config, source, name))
            for name in config.client_models or [config.model.model]
        }
        self._entry = lru_cache(maxsize=CACHED_ENTRIES)(self._made)

    def __len__(self) -> int:
        return self.num_clients

    def __iter__(self) -> Iterator[int]:
        return iter(range(FIRST_NODE, FIRST_NODE + self.num_clients))

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and FIRST_NODE <= node < FIRST_NODE + self.num_clients

    def __getitem__(self, node: int) -> RosterEntry:
        if node not in self:
            raise KeyError(node)
        return self._entry(node - FIRST_NODE)

    def _made(self, number: int) -> RosterEntry:
        config, source = self.config, self.source
        node_config = simulated_node(config, number, self.num_clients)
        labels = np.asarray(source.train.labels)
        splits = [labels[part] for part in client_indices(config, number, self.num_clients)]
        width = self.widths[own_architecture(config, node_config)]
        shape = source.image_shape
        return own_roster_entry(config, node_config, shape, width, splits, source.num_classes)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Each client's (training, local test) samples, [N, 2]."""
        if self.source.train.groups is not None:
            parts = (
                client_indices(self.config, i, self.num_clients) for i in range(self.num_clients)
            )
            return np.array([[len(train), len(test)] for train, test in parts])
        total = self.parts.sizes
        num_test = np.zeros_like(total)
        if self.config.data.local_test_fraction:
            num_classes = self.source.num_classes
            labels = np.asarray(self.source.train.labels)[self.parts.indices]
            owners = np.repeat(np.arange(self.num_clients), total)
            pairs, counts = np.unique(owners * num_classes + labels, return_counts=True)
            # of each class of a client, as `split_local_test` takes them
            of_class = np.rint(self.config.data.local_test_fraction * counts)
            of_class = np.minimum(np.maximum(of_class, 1), counts - 1)
            owners = pairs // num_classes
            num_test = np.bincount(owners, of_class, self.num_clients).astype(np.int64)
        return np.stack([total - num_test, num_test], axis=1)

    @cached_property
    def node_of(self) -> dict[str, int]:
        """The node of each client, by name."""
        return {self.name_of(number): FIRST_NODE + number for number in range(self.num_clients)}

    def name_of(self, number: int) -> str:
        """A client's name: the partition's, if it gives names."""
        return self.parts.names[number] if self.parts.names else name_of(number)

    @property
    def num_train(self) -> int:
        """Training samples of all clients."""
        return int(self.sizes[:, 0].sum())

    def shown(self) -> list[RosterEntry]:
        """All entries; of more than `MAX_LISTED` clients the first thousand."""
        num = len(self) if len(self) <= MAX_LISTED else NUM_SHOWN
        return [self[node] for node in itertools.islice(self, num)]
