"""Partitions: how the samples of a data set are split over clients.

A partition is a pure function of the labels, the number of clients, its options and a seed, and is
the same on every machine. It returns sorted indices into `labels` (int64) for each client; every
index appears exactly once.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator

import numpy as np

from data.partition_checks import (
    check_classes,
    check_dirichlet,
    check_num_clients,
    check_shards,
)
from protocol.code import place_of
from protocol.files import digest
from protocol.options import ConfigError
from protocol.text import num_of

# A Dirichlet split that fails this often is practically impossible.
MAX_DRAWS = 10_000
# Limit on the random numbers drawn, about 20 s: 500 draws for 200 classes and 2,000 clients.
MAX_NUMBERS = 200_000_000
SMALLEST_WEIGHT = 1e-300  # of a sample; Dirichlet proportions may be 0, or too small to divide by


class Parts:
    """Each client's sorted indices in two arrays, which also hold a million clients."""

    def __init__(
        self,
        indices: np.ndarray,
        owners: np.ndarray,
        num_clients: int,
        names: tuple[str, ...] = (),
    ) -> None:
        """owners [n]: the client that holds each of `indices` [n]. names: of clients; (): none."""
        self.names = names
        self.indices = indices[np.lexsort((indices, owners))].astype(np.int64, copy=False)
        sizes = np.bincount(owners, minlength=num_clients)
        self.ends = np.concatenate([[0], np.cumsum(sizes)])  # [N + 1]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client}: expected 0 to {len(self) - 1}")
        return self.indices[self.ends[client] : self.ends[client + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """Each client's number of samples, [N]."""
        return np.diff(self.ends)

    def digest(self) -> str:
        """The first 16 hex digits of the SHA-256 of all parts."""
        return digest(self.ends.astype("<i8"), self.indices.astype("<i8"))

    def of(self, labels: np.ndarray) -> "Parts":
        """The same parts of `labels`, into which the indices point."""
        moved = object.__new__(Parts)
        moved.indices, moved.ends, moved.names = labels[self.indices], self.ends, self.names
        return moved

    def of_groups(self, groups: np.ndarray) -> "Parts":
        """The samples of each client's groups. groups: of each sample [N]; `indices` are groups."""
        owner_of = np.full(groups.max() + 1, -1)
        owner_of[self.indices] = np.repeat(np.arange(len(self)), self.sizes)
        owners = owner_of[groups]
        return Parts(np.flatnonzero(owners >= 0), owners[owners >= 0], len(self), self.names)


def iid_partition(labels: np.ndarray, num_clients: int, seed: int) -> Parts:
    """Random parts regardless of label; sizes differ by at most 1."""
    check_num_clients(len(labels), num_clients)
    shuffled = _rng(seed).permutation(len(labels))
    return Parts(
        shuffled, np.repeat(np.arange(num_clients), _split(len(labels), num_clients)), num_clients
    )


def dirichlet_partition(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int, min_size: int = 10
) -> Parts:
    """Each class is divided over the clients by shares ~ Dir(alpha) (Yurochkin et al. 2019).

    As in their paper. Their code, and MOON's, also gives no more samples to a client that has
    `len(labels) / num_clients` already. Client sizes vary; the smaller alpha, the fewer classes a
    client has. Shares are redrawn until every client has `min_size` samples. ValueError if there
    are too few samples, or after `MAX_DRAWS` draws or `MAX_NUMBERS` random numbers.
    """
    check_num_clients(len(labels), num_clients)
    check_dirichlet(len(labels), num_clients, min_size)
    rng = _rng(seed)
    classes, class_sizes = np.unique(labels, return_counts=True)
    max_draws = min(MAX_DRAWS, max(1, MAX_NUMBERS // (len(classes) * num_clients)))
    for _ in range(max_draws):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(classes))  # [K, N]
        ends = np.floor(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
        ends[:, -1] = class_sizes  # floating-point shares may sum to less than 1
        counts = np.diff(ends, axis=1, prepend=0)  # [K, N]
        if counts.sum(axis=0).min() >= min_size:
            return _deal(labels, counts.T, rng)
    raise ConfigError(
        "partition",
        f"partition = 'dirichlet': in {max_draws} draws with alpha = {alpha}, no draw gave each "
        f"of {num_clients} clients min-samples = {min_size} of {len(labels)} samples; raise "
        "alpha, or lower min-samples or the number of clients",
    )


def dirichlet_balanced_partition(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int, order: str = "interleaved"
) -> Parts:
    """Sizes differ by at most 1; each client's class proportions are ~ Dir(alpha).

    order: "interleaved": clients take turns in random order, each to draw a class from its
    proportions, and then a sample of it. Exhausted classes are dropped and the proportions
    renormalised; a client with no class left draws in proportion to the samples that remain. Most
    clients find their classes already thinned out. "sequential": client after client draws samples
    without replacement, with its proportions as the samples' weights, as in FedRCL's released
    splits: a class counts as much as its proportion times what remains of it.
    """
    check_num_clients(len(labels), num_clients)
    rng = _rng(seed)
    classes, left = np.unique(labels, return_counts=True)
    ratios = rng.dirichlet(np.full(len(classes), alpha), size=num_clients)  # [N, K]
    if order == "sequential":
        sizes = _split(len(labels), num_clients)
        return _deal(labels, drawn_in_sequence(ratios, left, sizes, rng), rng)
    turns = rng.permutation(np.resize(np.arange(num_clients), len(labels)))  # one for each sample
    counts = np.zeros((num_clients, len(classes)), dtype=np.int64)
    cumulative = _cumulative_ratios(ratios, left)
    for client, draw in zip(turns.tolist(), rng.random(len(turns)).tolist(), strict=True):
        drawn = bisect_right(cumulative[client], draw)
        counts[client, drawn] += 1
        left[drawn] -= 1
        if left[drawn] == 0 and left.any():
            cumulative = _cumulative_ratios(ratios, left)
    return _deal(labels, counts, rng)


def _cumulative_ratios(ratios: np.ndarray, left: np.ndarray) -> list[list[float]]:
    """Each client's cumulative distribution over the classes with samples left; ends in 1.0."""
    open_ratios = ratios * (left > 0)
    open_ratios[open_ratios.sum(axis=1) == 0] = left
    cumulative = np.cumsum(open_ratios, axis=1)
    as_lists: list[list[float]] = (cumulative / cumulative[:, -1:]).tolist()
    return as_lists


def drawn_in_sequence(
    weights: np.ndarray, left: np.ndarray, sizes: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Sample counts [N, K]: client after client draws its number of samples without replacement.

    weights [N, K]: of each sample of a class, for each client. left [K]: the samples of each class.
    To draw by weight is to take the first of exponential clocks that run at these rates: while n
    samples of a class remain, its next one rings after a time of rate n times the weight.
    """
    counts = np.zeros(weights.shape, dtype=np.int64)
    for client, size in enumerate(sizes):
        remaining = left[:, None] - np.arange(min(size, left.max()))  # [K, draws from the class]
        # without a weight a class would never ring, though it may be all that is left
        rates = np.maximum(weights[client], SMALLEST_WEIGHT)[:, None] * remaining
        waits = rng.standard_exponential(remaining.shape)
        waits = np.divide(waits, rates, out=np.full_like(waits, np.inf), where=remaining > 0)
        first = np.argpartition(waits.cumsum(axis=1), size - 1, axis=None)[:size]
        counts[client] = np.bincount(first // remaining.shape[1], minlength=len(left))
        left = left - counts[client]
    return counts


def classes_partition(
    labels: np.ndarray, num_clients: int, classes_per_client: int, seed: int
) -> Parts:
    """Exactly `classes_per_client` random classes for each client, with sizes as equal as possible.

    The numbers of clients that hold any two classes differ by at most 1. If two clients share a
    class, the larger has at most 1 sample more, unless it has a single sample of that class. With
    classes of equal size, held by equally many clients each, client sizes differ by at most 1
    sample per class. ValueError if no client would hold a class, or it has fewer samples than
    holders.
    """
    check_num_clients(len(labels), num_clients)
    classes, class_sizes = np.unique(labels, return_counts=True)
    check_classes(len(classes), num_clients, classes_per_client)
    rng = _rng(seed)
    holds = np.zeros((num_clients, len(classes)), dtype=bool)
    holders = np.zeros(len(classes), dtype=np.int64)
    for client in range(num_clients):  # the classes with fewest holders; ties are broken at random
        chosen = np.lexsort((rng.random(len(classes)), holders))[:classes_per_client]
        holds[client, chosen] = True
        holders[chosen] += 1
    for label, size, num_holders in zip(classes, class_sizes, holders, strict=True):
        if size < num_holders:
            raise ConfigError(
                "classes-per-client",
                f"classes-per-client = {classes_per_client} for {num_of('client', num_clients)}: "
                f"class {label} has {num_of('sample', size)} for the {num_holders} clients that "
                "hold it; lower one of them",
            )
    return _deal(labels, _levelled_counts(holds, class_sizes), rng)


def _levelled_counts(holds: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Sample counts [N, K], at least 1 where `holds`, with client sizes as equal as possible.

    Redistributes one class at a time, each sample to its smallest holder, until no class can
    improve. This terminates because the sum of squared client sizes decreases every time.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    for k, size in enumerate(class_sizes):
        counts[holds[:, k], k] = _level(np.zeros(holds[:, k].sum(), dtype=np.int64), size)
    totals = counts.sum(axis=1)  # [N]
    holders_of = [np.flatnonzero(holds[:, k]) for k in range(len(class_sizes))]
    is_level = False
    while not is_level:
        is_level = True
        for k, (size, holders) in enumerate(zip(class_sizes, holders_of, strict=True)):
            before = totals[holders]
            others = before - counts[holders, k]
            dealt = 1 + _level(others + 1, size - len(holders))
            if ((others + dealt) ** 2).sum() < (before**2).sum():
                counts[holders, k] = dealt
                totals[holders] = others + dealt
                is_level = False
    return counts


def _level(totals: np.ndarray, amount: int) -> np.ndarray:
    """How many of `amount` samples each gets if every sample goes to the smallest total so far."""
    order = np.argsort(totals, kind="stable")
    ascending = totals[order]
    # needed[m]: samples that raise the first m totals to the next one
    needed = ascending * np.arange(1, len(totals) + 1) - np.cumsum(ascending)
    m = int(np.searchsorted(needed, amount, side="right"))
    level, extra = divmod(amount + int(ascending[:m].sum()), m)
    gains = np.zeros_like(totals)
    gains[order[:m]] = level - ascending[:m]
    gains[order[:extra]] += 1
    return gains


def shards_partition(
    labels: np.ndarray, num_clients: int, shards_per_client: int, seed: int
) -> Parts:
    """Samples sorted by label, cut into equal shards, `shards_per_client` for each client.

    McMahan et al. 2017. Shard sizes differ by at most 1, client sizes by `shards_per_client`.
    """
    check_num_clients(len(labels), num_clients)
    check_shards(len(labels), num_clients, shards_per_client)
    num_shards = num_clients * shards_per_client
    rng = _rng(seed)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    dealt = rng.permutation(num_shards)  # shards_per_client for each client
    owners = np.empty(num_shards, dtype=np.int64)
    owners[dealt] = np.repeat(np.arange(num_clients), shards_per_client)
    return Parts(by_label, np.repeat(owners, _split(len(labels), num_shards)), num_clients)


# Each partition function and the options it takes.
PARTITIONS: dict[str, tuple[Callable[..., Parts], tuple[str, ...]]] = {
    "iid": (iid_partition, ()),
    "dirichlet": (dirichlet_partition, ("alpha", "min_size")),
    "dirichlet-balanced": (dirichlet_balanced_partition, ("alpha", "order")),
    "classes": (classes_partition, ("classes_per_client",)),
    "shards": (shards_partition, ("shards_per_client",)),
}


def partition_indices(
    name: str, labels: np.ndarray, num_clients: int, *, seed: int, **options: float | str
) -> Parts:
    """The partition called `name`; options it does not take are ignored.

    ValueError unless it gives each sample to exactly one client.
    """
    partition, taken = PARTITIONS[name]
    chosen = {option: value for option, value in options.items() if option in taken}
    place = f"partition = {name!r}: {place_of(partition)}"
    try:
        parts = partition(labels, num_clients, seed=seed, **chosen)
    except ConfigError:
        raise
    except Exception as error:
        raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
    if (
        not isinstance(parts, Parts)
        or len(parts) != num_clients
        or not np.array_equal(np.sort(parts.indices), np.arange(len(labels)))
    ):
        raise ValueError(
            f"{place} must return Parts that give each of the {len(labels)} samples to exactly one "
            f"of {num_clients} clients"
        )
    return parts


def stratified_share(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted indices into `labels` of a random `fraction` of each class, at least 1 of each."""
    shuffled = _rng(seed).permutation(len(labels))
    chosen = []
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        chosen.append(members[: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(chosen))


def group_labels(labels: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The most frequent label of each group, [G]; of several the lowest. groups: below G, [N]."""
    counts = np.zeros((groups.max() + 1, labels.max() + 1), dtype=np.int64)
    np.add.at(counts, (groups, labels), 1)
    most_frequent: np.ndarray = counts.argmax(axis=1)
    return most_frequent


def split_local_test(
    indices: np.ndarray,
    labels: np.ndarray,
    fraction: float,
    seed: int,
    groups: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """A client's `indices` into `labels` as (train, test), with `fraction` of each class in test.

    Both parts contain every class that has at least 2 samples; a single sample goes to train.
    groups: of each of `labels`; the same then holds of whole groups, each with its most frequent
    label, and no group is in both parts.
    """
    if groups is not None:
        parts = split_local_test(
            np.unique(groups[indices]), group_labels(labels, groups), fraction, seed
        )
        indices = np.sort(indices)
        train, test = (indices[np.isin(groups[indices], part)] for part in parts)
        return train, test
    shuffled = _rng(seed).permutation(np.sort(indices))
    is_test = np.zeros(len(shuffled), dtype=bool)
    for label in np.unique(labels[shuffled]):
        members = np.flatnonzero(labels[shuffled] == label)
        num_test = min(max(round(fraction * len(members)), 1), len(members) - 1)
        is_test[members[:num_test]] = True
    return np.sort(shuffled[~is_test]), np.sort(shuffled[is_test])


def _deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Parts:
    """Random sample indices for each client: counts[i, k] of the k-th class for client i."""
    members = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    owners = [np.repeat(np.arange(len(counts)), column) for column in counts.T]
    return Parts(np.concatenate(members), np.concatenate(owners), len(counts))


def _split(amount: int, num_parts: int) -> np.ndarray:
    """The sizes of parts that differ by at most 1, the larger ones first."""
    return amount // num_parts + (np.arange(num_parts) < amount % num_parts)


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))  # default_rng may change its algorithm
