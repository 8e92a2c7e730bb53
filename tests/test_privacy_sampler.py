"""The discrete Gaussian: its moments and its distribution against the exact one, and its speed."""

import itertools
import math
import os

import numpy as np
import pytest
import scipy  # loads submodules on first use

from client_app.privacy import random_words, seeded_words
from protocol.discrete_gaussian import SAMPLER_DISTANCE, bins_of, discrete_gaussian

NUM = 400_000


def exact_pmf(s, low, high):
    """P(k) of k = low .. high, summed over everything that double precision can see."""
    everything = np.arange(-math.ceil(12 * s), math.ceil(12 * s) + 1)
    total = np.exp(-np.square(everything / s) / 2).sum()
    return np.exp(-np.square(np.arange(low, high + 1) / s) / 2) / total


@pytest.mark.parametrize("s", [1.3, 40.0, 1024.0, 5000.5, 2.0**21 + 0.3])
def test_moments(s):
    values = discrete_gaussian(s, NUM, seeded_words(1)).astype(float)
    assert abs(values.mean()) < 4 * s / math.sqrt(NUM)
    assert values.std() == pytest.approx(s, rel=4 / math.sqrt(2 * NUM))
    assert scipy.stats.kurtosis(values) == pytest.approx(0, abs=4 * math.sqrt(24 / NUM))


@pytest.mark.parametrize("s", [1.3, 7.0, 40.0])
def test_each_integer_is_as_frequent_as_the_exact_distribution_says(s):
    values = discrete_gaussian(s, NUM, seeded_words(2))
    reach = int(3.5 * s)
    counts = np.bincount(np.clip(values, -reach - 1, reach + 1) + reach + 1)
    inner = exact_pmf(s, -reach, reach)
    tail = (1 - inner.sum()) / 2
    assert scipy.stats.chisquare(counts, NUM * np.array([tail, *inner, tail])).pvalue > 1e-3


def test_the_table_is_inverted_exactly_at_its_thresholds():
    table, first, width = bins_of(40.0)
    assert width == 1
    words = np.array([table[500] - np.uint64(1), table[500], np.uint64(2**64 - 1)])
    found = discrete_gaussian(40.0, 3, lambda num: words[:num]).tolist()
    assert found == [first + 500, first + 501, first + len(table)]


@pytest.mark.parametrize("s", [1024.0, 2.0**21 + 0.3])
def test_the_stated_distance_covers_the_table(s):
    """In exact arithmetic: table probabilities against weights of 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 50
    table, first, width = bins_of(s)
    bins = range(first, first + len(table) + 1)
    edges = [b * width if b >= 0 else (b + 1) * width - 1 for b in bins]
    weights = [mpmath.exp(-((mpmath.mpf(e) / mpmath.mpf(s)) ** 2) / 2) for e in edges]
    total = mpmath.fsum(weights)
    cuts = [0, *map(int, table), 2**64]
    found = [mpmath.mpf(b - a) / 2**64 for a, b in itertools.pairwise(cuts)]
    distance = sum(abs(f - w / total) for f, w in zip(found, weights, strict=True)) / 2
    assert distance < SAMPLER_DISTANCE / 4  # acceptance and tail take the rest


def test_words_of_a_site_come_from_the_operating_system(monkeypatch):
    asked = []
    monkeypatch.setattr(os, "urandom", lambda num: asked.append(num) or bytes(range(num)))
    assert random_words(2).tolist() == [0x0706050403020100, 0x0F0E0D0C0B0A0908]
    assert asked == [16]
