"""What leaves a client under differential privacy: the clip, the noise, its source, its cost."""

import math
import re
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from client_fixtures import (
    NUM_CLASSES,
    SHAPE,
    assert_same_bits,
    differ,
    make_config,
    make_round,
)
from hypothesis import given
from hypothesis import strategies as st

from client_app.privacy import clip_to_grid, privatise
from client_app.setup import build_network
from protocol.discrete_gaussian import SAMPLER_DISTANCE
from protocol.privacy import (
    composed_budget,
    granularity,
    noise_multiplier,
    noise_sigma,
    privacy_statement,
)
from strategies import strategy_for

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 1, 3, 3), "d": ()}


def arrays_from(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}


def joint_norm(arrays):
    """The 2-norm of all entries of all arrays, one by one."""
    return math.sqrt(sum(v * v for a in arrays.values() for v in a.flatten().tolist()))


def private_round(epsilon=0.5, number=1, partition=0, seed=0, is_simulated=True, **keys):
    config = make_config(
        method="fedreco", privacy__epsilon=epsilon, seed=seed,
        **{f"privacy__{key}": value for key, value in keys.items()},
    )  # fmt: skip
    now = make_round(config, number=number, partition=partition, received={})
    object.__setattr__(now, "is_simulated", is_simulated)
    return now


# --- the clip -------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20),
    st.floats(0.01, 100),
    st.integers(0, 20),
)
def test_a_longer_release_is_scaled_to_the_norm_in_its_own_direction(values, max_norm, exponent):
    """In whole numbers of steps, of which the norm is computed exactly."""
    step, values = 2.0**-exponent, np.array(values)
    steps = clip_to_grid(values, max_norm, step)
    assert sum(int(k) ** 2 for k in steps) <= Fraction(max_norm / step) ** 2
    norm = float(np.linalg.norm(values))
    exact = values * min(1.0, max_norm / norm) if norm else values
    # towards zero: the norm cannot grow
    assert (abs(steps * step) <= abs(exact) * (1 + 1e-9)).all()
    np.testing.assert_allclose(steps * step, exact, rtol=1e-9, atol=step)


@pytest.mark.parametrize(
    ("direction", "max_norm"),  # the largest double below the direction's norm
    [([1, 1], 1.414213562373095), ([2, 3], 3.605551275463989), ([1, 2, 2], 2.9999999999999996)],
)
def test_the_norm_holds_in_whole_numbers_where_doubles_round(direction, max_norm):
    """In doubles, many of these are scaled to the direction itself, which is longer."""
    for scale in np.linspace(1, 3, 401):
        steps = clip_to_grid(np.array(direction) * scale, max_norm, 1.0)
        assert sum(int(k) ** 2 for k in steps) <= Fraction(max_norm) ** 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_release_that_is_not_finite_becomes_zeros(bad):
    assert clip_to_grid(np.array([bad, 0.0, bad / 2]), 1.0, 0.125).tolist() == [0, 0, 0]


# --- the noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "multiplier"), [(0.2, 0.1, 11.237724), (0.05, 0.05, 50.745450)]
)
def test_the_multiplier_of_one_release(epsilon, delta, multiplier):
    """sqrt(2 ln(1.25 / delta)) / epsilon, worked out outside of this code."""
    assert noise_multiplier(epsilon, delta) == pytest.approx(multiplier, abs=5e-7)
    privacy = private_round(epsilon, delta=delta, clip_norm=3.0).config.privacy
    # any two clipped releases are 2 C apart at most
    assert noise_sigma(privacy) == pytest.approx(2 * 3.0 * multiplier, rel=1e-7)


def test_the_noise_is_added_to_the_clipped_release_where_there_is_an_epsilon():
    now = private_round(clip_norm=0.5)
    arrays = arrays_from(3, scale=10)
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    noise, private = privatise(zeros, now), privatise(arrays, now)
    scale = 0.5 / joint_norm(arrays)
    step = granularity(now.config.privacy, sum(a.numel() for a in arrays.values()))
    for name, array in arrays.items():
        torch.testing.assert_close(private[name] - noise[name], array * scale, rtol=0, atol=step)
        assert private[name].dtype == torch.float32
        assert private[name].shape == array.shape
    assert_same_bits(privatise(arrays, private_round(epsilon=0.0)), arrays)


@pytest.mark.parametrize("num", [3, 200_000])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.3, 1e-5), (0.99, 0.5)])  # the noise's bound, too
def test_every_released_value_is_a_multiple_of_the_stated_granularity(num, epsilon, delta):
    now = private_round(epsilon, clip_norm=0.7, delta=delta)
    (values,) = privatise({"a": torch.randn(num)}, now).values()
    step = granularity(now.config.privacy, num)
    assert math.log2(step).is_integer()
    assert step <= noise_sigma(now.config.privacy) / 1024
    assert step * math.sqrt(num) <= 0.7 / 256
    steps = values.double() / step
    assert torch.equal(steps, steps.round())
    assert steps.remainder(2).unique().numel() == 2 or num == 3  # and of no coarser one


def test_simulated_noise_repeats_and_is_another_for_another_client_round_or_seed():
    arrays = arrays_from(5)
    assert_same_bits(privatise(arrays, private_round()), privatise(arrays, private_round()))
    others = [{}, {"number": 2}, {"partition": 1}, {"seed": 1}]
    seen = {privatise(arrays, private_round(**about))["a"].sum().item() for about in others}
    assert len(seen) == len(others)


def test_a_real_sites_noise_is_not_the_run_seeds():
    """The server knows the run's seed: it could subtract noise that comes from it."""
    arrays = arrays_from(6)
    releases = [privatise(arrays, private_round(is_simulated=False)) for _ in range(3)]
    assert len({release["a"].sum().item() for release in releases}) == 3
    simulated = privatise(arrays, private_round())
    assert all(differ(release, simulated) == list(arrays) for release in releases)
    # nor does it hang on a global generator that somebody seeded
    again = []
    for _ in range(2):
        torch.manual_seed(1)
        again.append(privatise(arrays, private_round(is_simulated=False))["a"])
    assert not torch.equal(*again)


# --- the cost of many releases --------------------------------------------------------------------


def gaussian_delta(epsilon, sigma):
    """The exact delta of a Gaussian mechanism of sensitivity 1 (Balle and Wang 2018, theorem 8)."""

    def phi(t):
        return 0.5 * math.erfc(-t / math.sqrt(2))

    a, b = 1 / (2 * sigma), epsilon * sigma
    return phi(a - b) - math.exp(epsilon) * phi(-a - b)


def gaussian_epsilon(delta, sigma):
    """The smallest epsilon that holds at delta, by bisection; 0 if any does."""
    if gaussian_delta(0, sigma) <= delta:
        return 0.0
    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, sigma) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-5), (0.5, 1e-5), (0.9, 1e-6)])
@pytest.mark.parametrize("releases", [1, 20, 500])
def test_the_composed_budget_covers_the_exact_one_and_is_near_it(epsilon, delta, releases):
    """`releases` Gaussian releases with multiplier z cost what one with z / sqrt(releases) does."""
    privacy = private_round(epsilon, delta=delta).config.privacy
    composed, _ = composed_budget(privacy, releases)
    z = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    exact = gaussian_epsilon(delta, z / math.sqrt(releases))
    assert exact <= composed <= 1.2 * max(exact, epsilon)
    if releases == 1:
        assert exact <= epsilon  # the classical formula gives away a little
    else:
        assert composed < releases * epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(0.05, 0.05), (0.2, 0.1), (0.5, 1e-5), (0.99, 0.5)])
def test_more_releases_never_cost_less_and_never_less_than_one(epsilon, delta):
    """20 releases of (0.05, 0.05) are not epsilon 0.006: delta alone would hide all of them."""
    privacy = private_round(epsilon, delta=delta).config.privacy
    budgets = {n: composed_budget(privacy, n) for n in (1, 2, 5, 20, 100, 1000)}
    for values in map(list, zip(*budgets.values(), strict=True)):
        assert values == sorted(values)
        assert values[0] >= epsilon
    z = noise_multiplier(epsilon, delta)
    for releases, (_, at_small_delta) in budgets.items():
        assert gaussian_epsilon(min(delta, 1e-5), z / math.sqrt(releases)) <= at_small_delta


def test_the_budgets_of_20_releases_in_the_docs_are_those_that_a_run_states():
    page = Path(__file__).parent.parent / "docs" / "results" / "four-methods.md"
    row = r"\| ([\d.]+), ([\d.]+) \|.* ([\d.]+) at delta \2; ([\d.]+) at delta 1e-5 \|"
    rows = re.findall(row, page.read_text())
    assert len(rows) == 3
    for epsilon, delta, *stated in rows:
        privacy = private_round(float(epsilon), delta=float(delta)).config.privacy
        assert [f"{each:.2f}" for each in composed_budget(privacy, 20)] == stated


@pytest.mark.parametrize(("epsilon", "releases"), [(0.5, 1), (0.5, 100), (0.9, 500)])
def test_what_the_sampler_adds_to_delta_grows_with_the_composed_epsilon(epsilon, releases):
    """P' <= P + g <= e^eps Q + delta + g <= e^eps Q' + delta + (1 + e^eps) g, eps of all releases.

    g: distance of all values of all releases together. With the epsilon of one release it would be
    5 * 10^-7 for 100 releases of 0.5, whose composed epsilon is at least 4.5.
    """
    privacy = private_round(epsilon).config.privacy
    z = noise_multiplier(epsilon, privacy.delta) / math.sqrt(releases)
    composed = max(epsilon, gaussian_epsilon(1e-5, z))
    expected = (1 + math.exp(composed)) * SAMPLER_DISTANCE * 1e6 * releases
    added = privacy_statement(privacy, 10**6, releases)["noise"]["added_to_delta"]
    assert min(1, expected) <= added <= 1
    assert releases > 1 or added == pytest.approx(expected)


@pytest.mark.parametrize(
    ("keys", "is_persistent", "is_refused"),
    [
        ({"privacy__epsilon": 0.5}, True, True),
        ({"privacy__epsilon": 0.5}, False, False),
        ({}, True, False),
        ({"privacy__epsilon": 0.5, "method": "fedreco"}, True, False),  # it sends gradients alone
    ],
)
def test_noise_on_whole_numbers_is_refused_before_round_1(keys, is_persistent, is_refused):
    """Indices in a buffer: with noise they are out of range, or other ones."""
    config = make_config(**{"method": "fedavg"} | keys)
    network = build_network(config, SHAPE, NUM_CLASSES)
    network.register_buffer("order", torch.arange(4), persistent=is_persistent)
    with pytest.raises(ValueError, match="order") if is_refused else nullcontext():
        strategy_for(config, network)
