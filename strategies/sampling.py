"""The cohort of a round: which clients are sampled."""

from collections.abc import Collection

import numpy as np

from protocol.seeds import seed_of


def sample_cohort(
    clients: Collection[str],
    unavailable: Collection[str],
    fraction: float,
    seed: int,
    server_round: int,
) -> list[str]:
    """The names of the sampled clients, in alphabetical order.

    A `fraction` of all clients (at least one), drawn without replacement from those that are
    available. The draw depends on the run's seed, the round and the clients' names alone: Flower's
    own sampling depends on node ids, which are random.
    """
    available = sorted(set(clients) - set(unavailable))
    count = min(max(1, round(fraction * len(clients))), len(available))
    rng = np.random.default_rng(seed_of(seed, server_round, "sampling"))
    chosen = sorted(rng.choice(len(available), size=count, replace=False))
    return [available[i] for i in chosen]
