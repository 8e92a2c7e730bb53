"""Who is sampled: a share of the clients by name, without those that failed again and again."""

import random

import pytest

from protocol.config import resolve_config
from protocol.messages import RosterEntry
from strategies.cohort import BACKOFF_ROUNDS, Cohort


def cohort_of(num_clients, nodes=None, **keys):
    cohort = Cohort(resolve_config({k.replace("_", "-"): v for k, v in keys.items()}).rounds)
    names = [f"client-{i:04d}" for i in range(num_clients)]
    cohort.roster = {
        node: RosterEntry(name, [10], [1], [1, 28, 28], "cnn", 8, "", num_clients)
        for node, name in zip(nodes or range(100, 100 + num_clients), names, strict=True)
    }
    return cohort


def names_in(cohort, server_round):
    return [cohort.roster[node].client for node in cohort.sample(server_round)]


@pytest.mark.parametrize(
    ("num_clients", "fraction", "count"), [(10, 1.0, 10), (10, 0.3, 3), (10, 0.01, 1), (7, 0.5, 4)]
)
def test_a_fraction_of_the_clients_without_repeats_at_least_one(num_clients, fraction, count):
    cohort = cohort_of(num_clients, train_fraction=fraction)
    for server_round in range(1, 20):
        names = names_in(cohort, server_round)
        assert len(set(names)) == len(names) == count
        assert names == sorted(names)


def test_sampling_depends_on_names_seed_and_round_but_not_on_node_ids():
    found = [
        [names_in(cohort_of(20, nodes, train_fraction=0.25, seed=seed), r) for r in range(1, 6)]
        for nodes, seed in [(None, 3), (random.Random(1).sample(range(10**9), 20), 3), (None, 4)]
    ]
    assert found[0] == found[1] != found[2]
    assert len({tuple(names) for names in found[0]}) == 5  # another cohort every round


def test_repeated_failures_back_a_client_off_for_five_rounds_and_one_success_clears_it():
    cohort = cohort_of(3, backoff_after=2)
    bad, good = "client-0000", {"client-0001", "client-0002"}
    cohort.note(1, good, {bad})
    assert cohort.backed_off(2) == set()
    cohort.note(2, good, {bad})
    assert [r for r in range(1, 12) if bad in cohort.backed_off(r)] == [
        *range(3, 3 + BACKOFF_ROUNDS)
    ]
    resumed = cohort_of(3, backoff_after=2)
    resumed.load(cohort.state())
    assert resumed.backed_off(3) == {bad}
    cohort.note(8, good, {bad})  # one more failure is enough
    assert cohort.backed_off(9) == {bad}
    cohort.note(9, {bad}, set())
    assert cohort.backed_off(10) == set()
    never = cohort_of(3, backoff_after=0)
    for number in range(1, 9):
        never.note(number, good, {bad})
    assert never.backed_off(9) == set()


def test_nobody_is_left_out_where_too_few_would_remain():
    cohort = cohort_of(4, backoff_after=1, aggregation="median")  # needs three replies
    cohort.away = {"client-0000"}
    assert cohort.backed_off(1) == {"client-0000"}
    cohort.away = {"client-0000", "client-0001"}
    assert cohort.backed_off(1) == set()
    cohort.away = set()
    cohort.note(1, set(), {"client-0002", "client-0003"})
    assert cohort.backed_off(2) == set()
