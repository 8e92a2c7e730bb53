"""The exact sum, robust aggregation, and what a bad client can do under each."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import random_arrays, same_bits

from protocol.config import ConfigError, resolve_config
from protocol.messages import TrainReply
from strategies.aggregation import (
    PIECE,
    ExactSum,
    capped_counts,
    coordinate_wise,
    selected,
    with_enough_replies,
)


def rounds_of(**given):
    return resolve_config({k.replace("_", "-"): v for k, v in given.items()}).rounds


def replies_with(values, dtype=torch.float32):
    return [
        TrainReply(f"c{i}", 1, {"w": torch.tensor([v], dtype=dtype)}, {}, {})
        for i, v in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("dtype", "values", "keys", "expected"),
    [
        (torch.int64, [1, 2, 5, 9], {"aggregation": "median"}, 4),
        (torch.bfloat16, [-1.0, 1.5, 2.5, 90.0], {"aggregation": "median"}, 2.0),
        (
            *(torch.float32, [-9.0, 90.0, 1.0, 4.0, 2.0]),
            *({"aggregation": "trimmed-mean", "trim_fraction": 0.2}, 7 / 3),
        ),
    ],
)
def test_each_coordinate_is_combined_and_keeps_its_type(dtype, values, keys, expected):
    """Whole numbers are rounded."""
    found = coordinate_wise(replies_with(values, dtype), rounds_of(**keys))["w"]
    assert found.dtype is dtype
    assert found.tolist() == pytest.approx([expected])


@pytest.mark.parametrize(
    ("name", "clients"), [("krum", ["c2"]), ("multi-krum", ["c1", "c2", "c3"])]
)
def test_krum_selects_updates_that_are_near_to_others(name, clients):
    replies = replies_with([-100.0, 1.0, 1.1, 1.25, 90.0])
    rounds = rounds_of(aggregation=name, num_malicious=2 if name == "multi-krum" else 1)
    assert [r.client for r in selected(replies, rounds, lambda reply: reply.arrays)] == clients


@pytest.mark.parametrize(
    ("keys", "num_honest"),
    [
        ({"aggregation": "trimmed-mean", "trim_fraction": 0.2}, 3),
        ({"aggregation": "krum", "num_malicious": 1}, 3),
        ({"aggregation": "multi-krum", "num_malicious": 1}, 2),
    ],
)
def test_with_replies_missing_the_median_tolerates_the_liar_that_is_left(keys, num_honest, caplog):
    values = [-100.0, *(1 + 0.01 * i for i in range(num_honest))]
    replies = replies_with(values)
    rounds = with_enough_replies(rounds_of(**keys), len(replies))
    assert rounds.aggregation == "median"
    assert float(coordinate_wise(replies, rounds)["w"]) == pytest.approx(np.median(values))
    assert keys["aggregation"] in caplog.text
    many = rounds_of(**keys)
    assert with_enough_replies(many, 5) is many


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.booleans()), min_size=1, max_size=12),
    st.floats(0.05, 1),
)
def test_no_unchecked_count_is_above_its_share_and_no_more_is_cut_than_needed(pairs, share):
    counts, is_checked = zip(*pairs, strict=True)
    capped = capped_counts(counts, is_checked, share)
    limit = max(share, 1 / len(counts))
    total = sum(capped)
    for before, after, known in zip(counts, capped, is_checked, strict=True):
        assert 0 < after <= before
        assert not known or after == before
        assert known or after <= limit * total * (1 + 1e-6)
        assert after == before or after >= limit * total * (1 - 1e-6)  # just at its share


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"method": "scaffold", "aggregation": "median"}, "aggregation"),
        ({"method": "fedreco", "aggregation": "krum"}, "aggregation"),
        ({"aggregation": "krum"}, "num-malicious"),
        ({"aggregation": "trimmed-mean"}, "trim-fraction"),
        ({"aggregation": "median", "train-fraction": 0.5}, "aggregation"),
        ({"norm-bound-value": 0.0}, "norm-bound-value"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(run, keys, key):
    with pytest.raises(ConfigError) as caught:
        run({"local-test-fraction": 0.2} | keys)
    assert caught.value.key == key


# --- the exact sum ----------------------------------------------------------------------------


def summed(arrays, weights, limit=1e4, order=None, max_weight=None):
    limits = {name: limit for name, a in arrays[0].items() if a.is_floating_point()}
    total = ExactSum(arrays[0], limits, max_weight or sum(weights))
    for i in order or range(len(arrays)):
        total.add(arrays[i], weights[i])
    return total


@given(
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.float64]),
    st.permutations(range(6)),
    st.sets(st.integers(0, 5), max_size=5),
)
def test_the_mean_is_the_exact_one_whatever_the_order_of_the_clients(seed, dtype, order, missing):
    generator, shapes = torch.Generator().manual_seed(seed), {"fc": (2, 3), "scalar": ()}
    arrays = [
        {n: torch.randn(s, generator=generator).to(dtype) * 3**i for n, s in shapes.items()}
        for i in range(6)
    ]
    weights = [10.0 ** (i % 4) / 3 for i in range(6)]  # as cut by max-weight-share: no integers
    kept = [i for i in order if i not in missing]
    mean, in_order = (
        summed(arrays, weights, order=each, max_weight=sum(weights)).mean()
        for each in (kept, sorted(kept))
    )
    assert same_bits(mean, in_order)
    total = sum(Fraction(weights[i]) for i in kept)
    for name, array in mean.items():
        assert (array.dtype, array.shape) == (dtype, shapes[name])
        for at in np.ndindex(array.shape):
            exact = sum(Fraction(weights[i]) * Fraction(float(arrays[i][name][at])) for i in kept)
            expected = torch.tensor(float(exact / total), dtype=dtype)
            torch.testing.assert_close(array[at], expected, rtol=1e-7, atol=1e-13)


def test_one_client_gives_its_own_arrays():
    sizes = {"conv": (2, 3, 1), "large": (PIECE + 3,), "scalar": (), "small": (5,)}
    arrays = {name: array.float() for name, array in random_arrays(sizes, seed=4).items()}
    assert same_bits(summed([arrays], [17.0]).mean(), arrays)


def test_whole_numbers_are_rounded_to_the_nearest():
    large = 2**39 + 1  # more digits than float32 has
    arrays = [
        {"steps": torch.tensor([1, 10, -4, large])},
        {"steps": torch.tensor([2, 40, -7, large])},
    ]
    mean = summed(arrays, [1.0, 3.0]).mean()["steps"]
    assert mean.tolist() == [2, 32, -6, large]  # 1.75, 32.5 (to even), -6.25
    assert mean.dtype == torch.int64


def test_values_at_the_limit_do_not_overflow_and_nothing_is_modified():
    arrays = [{"w": torch.tensor([1e5, -1e5, 1e-3]), "n": torch.tensor(2**40)}] * 10
    before = arrays[0]["w"].clone()
    mean = summed(arrays, [60.0] * 10, limit=1e5).mean()
    torch.testing.assert_close(mean["w"], before, rtol=1e-7, atol=0)
    assert mean["n"] == 2**40
    assert torch.equal(arrays[0]["w"], before)
