"""The cohort of a round: which clients are sampled."""

from collections.abc import Collection, Iterable, Iterator, Set
from typing import Any

import numpy as np

from protocol.seeds import seed_of


def sample_cohort(
    clients: np.ndarray, unavailable: Collection[Any], fraction: float, seed: int, server_round: int
) -> list[Any]:
    """The sampled clients, in alphabetical order.

    clients: their names in alphabetical order, or their numbers in that of their names. Drawn is a
    `fraction` of all (at least one), without replacement, from those that are available. The draw
    depends on the run's seed, the round and the clients' names alone: Flower's own sampling depends
    on node ids, which are random.
    """
    available = clients
    if unavailable:
        available = clients[~np.isin(clients, list(unavailable))]
    count = min(max(1, round(fraction * len(clients))), len(available))
    rng = np.random.default_rng(seed_of(seed, server_round, "sampling"))
    chosen = np.sort(rng.choice(len(available), size=count, replace=False))
    found: list[Any] = available[chosen].tolist()
    return found


def name_order(num_clients: int) -> np.ndarray:
    """The numbers 0 to N - 1 in alphabetical order of their names, client-0000 and so on.

    With more than 10,000 clients this is not numerical order: client-10000 precedes client-1001.
    """
    numbers = np.arange(num_clients)
    width = np.maximum(np.floor(np.log10(np.maximum(numbers, 1))).astype(np.int64) + 1, 4)
    scaled = numbers * 10 ** (18 - width)  # as if filled with zeros on the right
    return np.lexsort((width, scaled))


FIRST_NODE = 2  # the node of simulated client 0; 1 is Flower's SuperLink


def name_of(number: int) -> str:
    """A simulated client's name."""
    return f"client-{number:04d}"


class ClientNames(Set[str]):
    """The names of clients 0 to N - 1."""

    def __init__(self, num_clients: int) -> None:
        self.num_clients = num_clients
        self.in_order = name_order(num_clients)

    def number(self, name: str) -> int:
        """The client's number; -1 if no client has this name."""
        _, _, digits = name.partition("client-")
        number = int(digits) if digits.isdecimal() else -1
        return number if number < self.num_clients and name_of(number) == name else -1

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.number(name) >= 0

    def __iter__(self) -> Iterator[str]:
        return (name_of(int(number)) for number in self.in_order)

    def __len__(self) -> int:
        return self.num_clients

    @classmethod
    def _from_iterable(cls, names: Iterable[str]) -> set[str]:  # type: ignore[override]
        return set(names)
