"""How the samples of a data set are split over clients.

A partition is a function of the labels, the number of clients, its own options and a seed, and of
nothing else: the same on every machine, and no global random state is touched. It returns, for
each client, sorted indices into `labels` (int64); together they hold every index exactly once.
"""

import math
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

# Drawing again is cheap; this many failures mean that a split as asked for is next to impossible.
MAX_DRAWS = 10_000
# ... or this many numbers drawn, about 20 seconds: 500 draws for 200 classes and 2,000 clients.
MAX_NUMBERS = 200_000_000


def iid_partition(labels: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Random parts whatever the labels; sizes differ by at most 1."""
    _check(labels, num_clients)
    shuffled = _rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(shuffled, num_clients)]


def dirichlet_partition(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int, min_size: int = 10
) -> list[np.ndarray]:
    """Per class, shares over clients ~ Dir(alpha) (Yurochkin et al. 2019); client sizes vary.

    Small alpha, few classes a client. Shares are redrawn until every client has `min_size` samples;
    ValueError if there are too few samples for that, or if `MAX_DRAWS` draws, or `MAX_NUMBERS`
    shares, did not get there.
    """
    _check(labels, num_clients)
    _check_alpha(alpha)
    if min_size < 1:
        raise ValueError(f"min-samples = {min_size}: every client needs at least 1 sample")
    if min_size * num_clients > len(labels):
        raise ValueError(
            f"min-samples = {min_size} for {num_clients} clients needs {min_size * num_clients} "
            f"samples, there are {len(labels)}; ask for fewer of either"
        )
    rng = _rng(seed)
    classes, class_sizes = np.unique(labels, return_counts=True)
    max_draws = min(MAX_DRAWS, max(1, MAX_NUMBERS // (len(classes) * num_clients)))
    for _ in range(max_draws):
        shares = rng.dirichlet(np.full(num_clients, alpha), size=len(classes))  # [K, N]
        ends = np.floor(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
        ends[:, -1] = class_sizes  # a sum of floats may fall short of 1
        counts = np.diff(ends, axis=1, prepend=0)  # [K, N]
        if counts.sum(axis=0).min() >= min_size:
            return _deal(labels, counts.T, rng)
    raise ValueError(
        f"partition = 'dirichlet': in {max_draws} draws with alpha = {alpha}, not once did each "
        f"of {num_clients} clients get min-samples = {min_size} of {len(labels)} samples; raise "
        "alpha, or lower min-samples or the number of clients"
    )


def dirichlet_balanced_partition(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int
) -> list[np.ndarray]:
    """Sizes that differ by at most 1; each client's label ratio ~ Dir(alpha) over the classes.

    In random order the clients draw one sample at a time, without replacement, of a class drawn
    from their own ratio. A class that has run out gives its share to the others, in proportion; a
    client none of whose classes are left goes on with what is left, in proportion to that.
    """
    _check(labels, num_clients)
    _check_alpha(alpha)
    rng = _rng(seed)
    classes, left = np.unique(labels, return_counts=True)
    ratios = rng.dirichlet(np.full(len(classes), alpha), size=num_clients)  # [N, K]
    turns = np.resize(np.arange(num_clients), len(labels))  # how often a client is in it: its size
    turns = rng.permutation(turns)
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
    """Each client's distribution function over the classes that have samples left; ends in 1.0."""
    open_ratios = ratios * (left > 0)
    open_ratios[open_ratios.sum(axis=1) == 0] = left
    cumulative = np.cumsum(open_ratios, axis=1)
    as_lists: list[list[float]] = (cumulative / cumulative[:, -1:]).tolist()
    return as_lists


def classes_partition(
    labels: np.ndarray, num_clients: int, classes_per_client: int, seed: int
) -> list[np.ndarray]:
    """Exactly `classes_per_client` classes for each client, and sizes as equal as that allows.

    Which classes is random; the numbers of clients that hold two classes differ by at most 1. Of
    two clients that share a class, the larger has at most 1 sample more, unless it is down to a
    single sample of that class. So with equal classes, each held by equally many clients, all
    have the same size up to 1 sample per class.
    ValueError if a class would be held by no client, or has fewer samples than holders.
    """
    _check(labels, num_clients)
    classes, class_sizes = np.unique(labels, return_counts=True)
    if not 1 <= classes_per_client <= len(classes):
        raise ValueError(
            f"classes-per-client = {classes_per_client}: it has to be from 1 to {len(classes)}, "
            "the number of classes in the data"
        )
    if num_clients * classes_per_client < len(classes):
        raise ValueError(
            f"classes-per-client = {classes_per_client} for {num_clients} clients leaves some of "
            f"the {len(classes)} classes without a client; it has to be at least "
            f"{math.ceil(len(classes) / num_clients)}"
        )
    rng = _rng(seed)
    holds = np.zeros((num_clients, len(classes)), dtype=bool)
    holders = np.zeros(len(classes), dtype=np.int64)
    for client in range(num_clients):  # the least held classes, ties by chance
        chosen = np.lexsort((rng.random(len(classes)), holders))[:classes_per_client]
        holds[client, chosen] = True
        holders[chosen] += 1
    for label, size, num_holders in zip(classes, class_sizes, holders, strict=True):
        if size < num_holders:
            raise ValueError(
                f"classes-per-client = {classes_per_client} for {num_clients} clients: class "
                f"{label} has {size} samples for the {num_holders} clients that hold it; ask for "
                "fewer of either"
            )
    return _deal(labels, _levelled_counts(holds, class_sizes), rng)


def _levelled_counts(holds: np.ndarray, class_sizes: np.ndarray) -> np.ndarray:
    """Samples [N, K], at least 1 where `holds`, that no change of one class makes more equal.

    Class after class is dealt anew, each sample to the smallest of its holders. The sum of the
    squared client sizes falls every time, so this ends.
    """
    counts = np.zeros(holds.shape, dtype=np.int64)
    for k, size in enumerate(class_sizes):
        counts[holds[:, k], k] = _level(np.zeros(holds[:, k].sum(), dtype=np.int64), size)
    totals = counts.sum(axis=1)  # [N], kept up to date
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
    """How many of `amount` samples each gets if one at a time goes to the smallest total."""
    order = np.argsort(totals, kind="stable")
    ascending = totals[order]
    needed = ascending * np.arange(1, len(totals) + 1) - np.cumsum(
        ascending
    )  # to level the first m
    m = int(np.searchsorted(needed, amount, side="right"))
    level, extra = divmod(amount + int(ascending[:m].sum()), m)
    given = np.zeros_like(totals)
    given[order[:m]] = level - ascending[:m]
    given[order[:extra]] += 1
    return given


def shards_partition(
    labels: np.ndarray, num_clients: int, shards_per_client: int, seed: int
) -> list[np.ndarray]:
    """Sorted by label and cut into equal shards, of which each client gets `shards_per_client`.

    McMahan et al. 2017. Shards differ by at most 1 sample, so clients by `shards_per_client`.
    """
    _check(labels, num_clients)
    num_shards = num_clients * shards_per_client
    if not 1 <= shards_per_client <= len(labels) // num_clients:
        raise ValueError(
            f"shards-per-client = {shards_per_client} for {num_clients} clients: it has to be from "
            f"1 to {len(labels) // num_clients}; every shard of the {len(labels)} samples needs one"
        )
    rng = _rng(seed)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    shards = np.array_split(by_label, num_shards)
    dealt = rng.permutation(num_shards).reshape(num_clients, shards_per_client)
    return [np.sort(np.concatenate([shards[s] for s in row])) for row in dealt]


# Name to the function and the names of the options that it takes.
PARTITIONS: dict[str, tuple[Callable[..., list[np.ndarray]], tuple[str, ...]]] = {
    "iid": (iid_partition, ()),
    "dirichlet": (dirichlet_partition, ("alpha", "min_size")),
    "dirichlet-balanced": (dirichlet_balanced_partition, ("alpha",)),
    "classes": (classes_partition, ("classes_per_client",)),
    "shards": (shards_partition, ("shards_per_client",)),
}


def partition_indices(
    name: str,
    labels: np.ndarray,
    num_clients: int,
    *,
    alpha: float,
    classes_per_client: int,
    shards_per_client: int,
    min_size: int,
    seed: int,
) -> list[np.ndarray]:
    """The partition called `name`, given those of the options that it takes."""
    if name not in PARTITIONS:
        raise ValueError(f"partition = {name!r}: it has to be one of {', '.join(PARTITIONS)}")
    options = {
        "alpha": alpha,
        "classes_per_client": classes_per_client,
        "shards_per_client": shards_per_client,
        "min_size": min_size,
    }
    partition, taken = PARTITIONS[name]
    return partition(
        labels, num_clients, seed=seed, **{option: options[option] for option in taken}
    )


def stratified_share(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Sorted indices into `labels` of a random `fraction` of each class, rounded, 1 at least."""
    if not 0 < fraction <= 1:
        raise ValueError(f"data-fraction = {fraction}: it has to be more than 0 and at most 1")
    shuffled = _rng(seed).permutation(len(labels))
    kept = []
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        kept.append(members[: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(kept))


def split_local_test(
    indices: np.ndarray, labels: np.ndarray, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A client's `indices` into `labels` as (train, test), with `fraction` of each class in test.

    Rounded per class, but so that both parts have every class of which there are 2 samples or
    more; a single sample is for training.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"local-test-fraction = {fraction}: it has to be between 0 and 1")
    shuffled = _rng(seed).permutation(np.sort(indices))
    is_test = np.zeros(len(shuffled), dtype=bool)
    for label in np.unique(labels[shuffled]):
        members = np.flatnonzero(labels[shuffled] == label)
        num_test = min(max(round(fraction * len(members)), 1), len(members) - 1)
        is_test[members[:num_test]] = True
    return np.sort(shuffled[~is_test]), np.sort(shuffled[is_test])


def _deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices of random samples: counts[i, k] of class k, in order of the labels, for client i."""
    parts: list[list[np.ndarray]] = [[] for _ in counts]
    for k, label in enumerate(np.unique(labels)):
        members = rng.permutation(np.flatnonzero(labels == label))
        dealt = np.split(members, np.cumsum(counts[:-1, k]))
        for part, piece in zip(parts, dealt, strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def _rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))  # default_rng may change its algorithm


def _check(labels: np.ndarray, num_clients: int) -> None:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(f"labels are {labels.dtype} {labels.shape}: they have to be integers [N]")
    if not 1 <= num_clients <= len(labels):
        raise ValueError(
            f"num-clients = {num_clients}: it has to be from 1 to {len(labels)}, the number of "
            "samples to split"
        )


def _check_alpha(alpha: float) -> None:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(
            f"alpha = {alpha}: the concentration of a Dirichlet distribution is a finite number > 0"
        )
