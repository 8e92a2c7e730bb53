import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from data.partition_checks import check_shards
from data.partitions import (
    PARTITIONS,
    Parts,
    classes_partition,
    dirichlet_balanced_partition,
    dirichlet_partition,
    iid_partition,
    partition_indices,
    shards_partition,
    split_local_test,
    stratified_share,
)
from protocol.options import ConfigError

seeds = st.integers(0, 2**63 - 1)
may_refuse = settings(suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def labels_and_clients(draw):
    """Labels of unequal, gappy classes in random order, and how many clients share them."""
    class_sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    names = draw(st.permutations(range(9)))[: len(class_sizes)]
    labels = np.repeat(names, class_sizes)
    np.random.default_rng(draw(seeds)).shuffle(labels)
    return labels, draw(st.integers(1, min(len(labels), 12)))


def balanced_labels(num_classes, samples_per_class):
    labels = np.repeat(np.arange(num_classes), samples_per_class)
    np.random.default_rng(5).shuffle(labels)
    return labels


def label_counts(parts, labels):
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


def assert_splits_all(parts, labels, num_clients):
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))


def sizes(parts):
    return [len(part) for part in parts]


def same(parts, others):
    return all(np.array_equal(a, b) for a, b in zip(parts, others, strict=True))


# --- properties of each -----------------------------------------------------------------------


@given(labels_and_clients(), seeds, st.floats(1e-3, 100), st.data())
def test_nothing_is_lost_and_sizes_are_as_promised(case, seed, alpha, data):
    """They differ by 1 at most; those of shards by a sample a shard."""
    labels, num_clients = case
    gamma = data.draw(st.integers(1, len(labels) // num_clients))
    order = data.draw(st.sampled_from(["interleaved", "sequential"]))
    for largest, parts in (
        (1, iid_partition(labels, num_clients, seed)),
        (1, dirichlet_balanced_partition(labels, num_clients, alpha, seed, order)),
        (gamma, shards_partition(labels, num_clients, gamma, seed)),
    ):
        assert_splits_all(parts, labels, num_clients)
        assert max(sizes(parts)) - min(sizes(parts)) <= largest


@may_refuse
@given(labels_and_clients(), seeds, st.floats(0.3, 100))
def test_dirichlet_loses_nothing_and_keeps_to_the_minimum(case, seed, alpha):
    labels, num_clients = case
    min_size = max(len(labels) // (4 * num_clients), 1)
    try:
        parts = dirichlet_partition(labels, num_clients, alpha, seed, min_size)
    except ValueError:  # few samples for many clients at a small alpha
        reject()
    assert_splits_all(parts, labels, num_clients)
    assert min(sizes(parts)) >= min_size


@may_refuse
@given(labels_and_clients(), seeds, st.data())
def test_classes_gives_c_classes_and_levels_sizes_as_its_docstring_says(case, seed, data):
    labels, num_clients = case
    num_classes = len(np.unique(labels))
    c = data.draw(st.integers(-(-num_classes // num_clients), num_classes))
    try:
        parts = classes_partition(labels, num_clients, c, seed)
    except ValueError:  # a small class with more holders than samples
        reject()
    assert_splits_all(parts, labels, num_clients)
    counts = label_counts(parts, labels)
    assert ((counts > 0).sum(axis=1) == c).all()
    num_holders = (counts > 0).sum(axis=0)[np.unique(labels)]
    assert num_holders.max() - num_holders.min() <= 1
    for a in range(num_clients):
        for b in range(num_clients):
            for k in np.unique(labels):
                if counts[a, k] > 1 and counts[b, k] > 0:
                    assert len(parts[a]) <= len(parts[b]) + 1


# --- what each does to the labels -------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "released"), [(0.05, 1.62), (0.1, 2.05), (0.3, 3.36), (0.6, 4.65)]
)
def test_sequential_splits_are_as_skewed_as_those_released_by_fedrcls_group(alpha, released):
    """Effective classes of a client, 1 / sum of squared shares: mean of 100 clients, CIFAR-10."""
    labels, found = balanced_labels(10, 5000), []
    for seed in range(12):
        parts = dirichlet_balanced_partition(labels, 100, alpha, seed, "sequential")
        shares = label_counts(parts, labels) / 500
        found.append((1 / (shares**2).sum(axis=1)).mean())
    assert released == pytest.approx(np.mean(found), abs=np.std(found, ddof=1))


def test_dirichlet_is_the_loop_of_the_public_code_without_its_cap():
    """Yurochkin et al.'s: class by class, cut at int(cumulative share * size), until all have 4.

    Theirs also sets the share of a client to 0 once it has `len(labels) / num_clients` samples.
    """
    labels, num_draws, smallest = balanced_labels(4, 12), 0, set()
    for seed in range(20):
        rng = np.random.Generator(np.random.PCG64(seed))
        expected = np.zeros((3, 4), dtype=int)
        while expected.sum(axis=1).min() < 4:
            num_draws += 1
            for k in range(4):
                cuts = [int(end * 12) for end in np.cumsum(rng.dirichlet([0.3] * 3))[:2]]
                expected[:, k] = np.diff([0, *cuts, 12])
        parts = dirichlet_partition(labels, 3, 0.3, seed, min_size=4)
        assert (label_counts(parts, labels) == expected).all()
        smallest.add(min(sizes(parts)))
    assert num_draws > 20
    assert min(smallest) == 4  # is enough


# --- all of them by name ----------------------------------------------------------------------

options = {"alpha": 0.5, "classes_per_client": 3, "shards_per_client": 2, "min_size": 7}


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_depends_on_its_arguments_alone(name):
    labels = balanced_labels(8, 100)
    parts = partition_indices(name, labels, 6, **options, seed=9)
    np.random.seed(0)  # noqa: NPY002
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    again = partition_indices(name, labels.astype(np.uint8), 6, **options, seed=9)
    assert same(parts, again)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert not same(parts, partition_indices(name, labels, 6, **options, seed=10))
    assert_splits_all(parts, labels, 6)


def test_a_partition_is_the_same_in_every_version():
    labels = balanced_labels(8, 100)
    assert {
        name: partition_indices(name, labels, 6, **options, seed=9).digest() for name in PARTITIONS
    } == {
        "iid": "47e73fa5583ff7d3",
        "dirichlet": "72d46506a2d00614",
        "dirichlet-balanced": "df7a92c0e0cb06d7",
        "classes": "11625e59db182827",
        "shards": "6d49b515c0af2550",
    }


labels_of_40 = balanced_labels(4, 10)


@pytest.mark.parametrize(
    ("partition", "key"),
    [
        (lambda: iid_partition(labels_of_40, 41, 0), "num-clients"),
        (lambda: iid_partition(labels_of_40, 0, 0), "num-clients"),
        (lambda: dirichlet_partition(labels_of_40, 5, 1.0, 0), "min-samples"),
        (lambda: dirichlet_partition(labels_of_40, 20, 0.01, 0, min_size=2), "partition"),
        (lambda: classes_partition(labels_of_40, 5, 5, 0), "classes-per-client"),
        (lambda: classes_partition(labels_of_40, 5, 0, 0), "classes-per-client"),
        (lambda: classes_partition(labels_of_40, 2, 1, 0), "classes-per-client"),
        (lambda: classes_partition(labels_of_40, 30, 2, 0), "classes-per-client"),
        (lambda: shards_partition(labels_of_40, 5, 9, 0), "shards-per-client"),
        (lambda: shards_partition(labels_of_40, 5, 0, 0), "shards-per-client"),
        (lambda: check_shards(40, 41, 2), "num-clients"),
    ],
)
def test_impossible_splits_are_refused_by_their_key(partition, key):
    with pytest.raises(ConfigError) as refusal:
        partition()
    assert refusal.value.key == key
    assert "\n" not in str(refusal.value)


# --- a client's own test part -----------------------------------------------------------------


@given(labels_and_clients(), st.floats(0.01, 0.99), seeds)
def test_local_test_part_is_stratified_and_loses_nothing(case, fraction, seed):
    labels, num_clients = case
    for indices in iid_partition(labels, num_clients, 0):
        train, test = split_local_test(indices, labels, fraction, seed)
        assert sorted([*train, *test]) == indices.tolist()
        for k in np.unique(labels[indices]):
            size, num_test = (labels[indices] == k).sum(), (labels[test] == k).sum()
            assert num_test == 0 if size == 1 else 1 <= num_test <= size - 1
            if 1 <= fraction * size <= size - 1:
                assert abs(num_test - fraction * size) <= 0.5
        again = split_local_test(indices[::-1], labels, fraction, seed)
        assert same((train, test), again)


def test_a_partition_that_leaves_out_or_repeats_samples_is_refused(monkeypatch):
    for wrong in (np.arange(7), Parts(np.arange(7) // 2, np.arange(7) % 3, 3)):
        monkeypatch.setitem(PARTITIONS, "blocks", (lambda *_, parts=wrong: parts, ()))
        with pytest.raises(ValueError, match="blocks"):
            partition_indices("blocks", np.zeros(7, int), 3, seed=0)


@pytest.mark.parametrize("fraction", [0.001, 0.25, 1.0])
def test_a_stratified_share_has_its_part_of_each_class(fraction):
    labels = np.random.default_rng(3).permutation(np.repeat([0, 1, 2, 7], [400, 200, 40, 1]))
    share = stratified_share(labels, fraction, seed=5)
    assert share.tolist() == sorted({*share.tolist()})
    for label, size in ((0, 400), (1, 200), (2, 40), (7, 1)):
        assert (labels[share] == label).sum() == max(1, round(fraction * size))
