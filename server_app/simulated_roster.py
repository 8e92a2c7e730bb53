"""The roster of logical clients: entries are computed from the partition when they are read.

A logical client is a number: it is not queried, sent to or written about until it is sampled.
Values over all clients are computed from arrays.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import TypeVar

import flwr
import numpy as np
import torch

from client_app.node_config import own_architecture
from client_app.setup import client_indices, model_for, representation_width, split_over_clients
from data.sources import Source
from protocol.config import RunConfig
from protocol.files import digest
from protocol.messages import RosterEntry
from server_app.logical_clients import LogicalGrid
from server_app.roster import MAX_LISTED, check_widths, class_without_samples
from strategies.sampling import FIRST_NODE, ClientNames, name_of

CACHED_ENTRIES = 4096
T = TypeVar("T")


class SimulatedRoster(Mapping[int, RosterEntry]):
    """Node id to entry of clients 0 to N - 1, which are nodes 2 to N + 1."""

    def __init__(self, config: RunConfig, source: Source, num_clients: int) -> None:
        self.config, self.source, self.num_clients = config, source, num_clients
        self.names = ClientNames(num_clients)
        self.parts = split_over_clients(config, num_clients)  # raises where it is impossible
        self.widths = {
            name: representation_width(config, model_for(config, source, name))
            for name in config.client_models or [config.model.model]
        }
        self.versions = f"flwr {flwr.__version__}, torch {torch.__version__}"
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
        node_config = {"partition-id": number, "num-partitions": self.num_clients}
        labels = np.asarray(source.train.labels)
        splits = [labels[part] for part in client_indices(config, number, self.num_clients)]
        hides = config.privacy.withholds_metrics
        counts = [np.bincount(split, minlength=source.num_classes).tolist() for split in splits]
        name = own_architecture(config, node_config)
        return RosterEntry(
            client=name_of(number),
            image_shape=list(source.image_shape),
            model=name,
            representation_width=self.widths[name],
            versions=self.versions,
            num_partitions=self.num_clients,
            label_counts=[] if hides else counts[0],
            test_label_counts=[] if hides else counts[1],
            num_train=len(splits[0]) if hides else 0,
            num_test=len(splits[1]) if hides else 0,
        )

    @cached_property
    def sizes(self) -> np.ndarray:
        """Each client's (training, local test) samples, [N, 2]."""
        total = self.parts.sizes
        num_test = np.zeros_like(total)
        if self.config.data.local_test_fraction:
            pairs, _, of_class = self._samples_of_classes()
            owner = pairs // self.source.num_classes
            num_test = np.bincount(owner, of_class, self.num_clients).astype(np.int64)
        return np.stack([total - num_test, num_test], axis=1)

    def _samples_of_classes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(key, samples, local test samples) of each class that a client has, [P] each.

        key: the client's number times C, plus the class. As many test samples as
        `split_local_test` takes.
        """
        fraction = self.config.data.local_test_fraction
        labels = np.asarray(self.source.train.labels)[self.parts.indices]
        owners = np.repeat(np.arange(self.num_clients), self.parts.sizes)
        pairs, counts = np.unique(owners * self.source.num_classes + labels, return_counts=True)
        num_test = np.minimum(np.maximum(np.rint(fraction * counts), 1), counts - 1)
        return pairs, counts, num_test if fraction else np.zeros_like(counts)

    def _training_counts(self) -> np.ndarray:
        """Each client's training samples of each class, [N, C]."""
        pairs, counts, num_test = self._samples_of_classes()
        found = np.zeros(self.num_clients * self.source.num_classes, dtype=np.int32)
        found[pairs] = counts - num_test
        return found.reshape(self.num_clients, -1)

    @property
    def num_train(self) -> int:
        """Training samples of all clients."""
        return int(self.sizes[:, 0].sum())

    def digest(self) -> str:
        """A digest of the split: every client's samples, and how local test parts are chosen."""
        parts = (array.astype("<i8") for array in (self.parts.ends, self.parts.indices))
        return digest(f"{self.config.data.local_test_fraction}".encode(), *parts)

    @property
    def label_counts(self) -> "ByName[list[int]]":
        """Each client's training samples of each class, by name; empty if they are withheld."""
        if self.config.privacy.withholds_metrics:
            return ByName(self, lambda number: [])
        counts = cache(self._training_counts)  # when the first is read: few methods read them
        return ByName(self, lambda number: counts()[number].tolist())


class ByName(Mapping[str, T]):
    """Client name to what `read` makes of its number, computed when read."""

    def __init__(self, roster: SimulatedRoster, read: Callable[[int], T]) -> None:
        self.roster, self.read = roster, read

    def __getitem__(self, name: str) -> T:
        return self.read(self.roster.names.number(name))  # or KeyError

    def __iter__(self) -> Iterator[str]:
        return iter(self.roster.names)

    def __len__(self) -> int:
        return len(self.roster)


def check_simulated_roster(roster: SimulatedRoster, evaluates_clients: bool) -> None:
    """ValueError, one line naming the client, as `check_roster` for entries of their own.

    Image shapes and classes, which that function compares, are the source's for all clients here.
    """
    config, source = roster.config, roster.source
    networks = config.client_models or [config.model.model]
    widths: Counter[tuple[str, int]] = Counter()
    for i, name in enumerate(networks[: roster.num_clients]):
        widths[name, roster.widths[name]] += len(range(i, roster.num_clients, len(networks)))
    check_widths(config, widths, source)
    sizes = roster.sizes
    if not sizes[:, 0].all():
        client = name_of(int(np.argmin(sizes[:, 0])))
        raise ValueError(f"client {client} has no training samples")
    labels = np.asarray(roster.source.train.labels)[roster.parts.indices]
    totals = np.bincount(labels, minlength=roster.source.num_classes).tolist()
    if 0 in totals and not config.privacy.withholds_metrics:  # else clients do not say it
        raise class_without_samples(source, totals.index(0))
    if evaluates_clients and not sizes[:, 1].all():
        client = name_of(int(np.argmin(sizes[:, 1])))
        raise roster.config.no_test_part(client)


Roster = dict[int, RosterEntry] | SimulatedRoster


def simulated_roster(config: RunConfig, source: Source, grid: LogicalGrid) -> SimulatedRoster:
    """The checked roster of a grid's logical clients; sets the grid's expected times."""
    roster = SimulatedRoster(config, source, grid.num_clients)
    check_simulated_roster(roster, config.evaluated_clients != "none")
    num_samples = roster.sizes[:, 0]
    grid.expected_time = lambda node: 1.0 + float(num_samples[node - FIRST_NODE])
    return roster


def shown_entries(roster: Roster) -> list[RosterEntry]:
    """All entries; of more than `MAX_LISTED` logical clients the first thousand."""
    is_whole = isinstance(roster, dict) or len(roster) <= MAX_LISTED
    nodes = list(itertools.islice(roster, len(roster) if is_whole else 1000))
    return [roster[node] for node in nodes]
