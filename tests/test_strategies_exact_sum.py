"""The exact sum: the formula, and bits that do not depend on the order."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_fixtures import same_bits

from strategies.aggregation import PIECE, ExactSum


def summed(arrays, weights, limit=1e4, order=None, max_weight=None):
    limits = {name: limit for name, a in arrays[0].items() if a.is_floating_point()}
    total = ExactSum(arrays[0], limits, max_weight or sum(weights))
    for i in order or range(len(arrays)):
        total.add(arrays[i], weights[i])
    return total


def arrays_of(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"conv": (2, 3, 1), "fc": (5,), "large": (PIECE + 3,), "scalar": ()}
    arrays = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()}
    return arrays | {"steps": torch.tensor(7 * seed)}


def test_the_mean_equals_the_formula_in_loops():
    arrays, counts = [arrays_of(seed) for seed in (1, 2, 3)], [1.0, 100.0, 17.0]
    mean = summed(arrays, counts).mean()
    assert mean.keys() == arrays[0].keys()
    for name in ("conv", "fc", "scalar"):
        for at in np.ndindex(arrays[0][name].shape):
            expected = 0.0
            for n, each in zip(counts, arrays, strict=True):
                expected += n / 118 * float(each[name][at])
            assert abs(float(mean[name][at]) - expected) < 1e-13
    large = sum(n * each["large"] for n, each in zip(counts, arrays, strict=True)) / 118
    torch.testing.assert_close(mean["large"], large, rtol=0, atol=1e-13)


@given(st.permutations(range(6)), st.sets(st.integers(0, 5), max_size=5))
def test_the_bits_do_not_depend_on_the_order_of_the_clients(order, missing):
    arrays = [{"w": torch.randn(50, generator=torch.manual_seed(i)) * 3**i} for i in range(6)]
    weights = [10.0 ** (i % 4) / 3 for i in range(6)]  # as cut by max-weight-share: no integers
    kept = [i for i in order if i not in missing]
    means = [
        summed(arrays, weights, order=each, max_weight=sum(weights)).mean()
        for each in (kept, sorted(kept))
    ]
    assert same_bits(*means)


def test_float32_is_as_exact_as_that_and_one_client_gives_its_own_arrays():
    arrays = [arrays_of(seed, torch.float32) for seed in range(20)]
    mean = summed(arrays, [1.0 + i for i in range(20)]).mean()["fc"]
    exact = sum(a["fc"].double() * (1 + i) for i, a in enumerate(arrays)) / 210
    assert mean.dtype == torch.float32
    assert torch.equal(mean, exact.float())
    assert same_bits(summed(arrays[:1], [17.0]).mean(), arrays[0])


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
