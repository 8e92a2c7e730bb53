"""Exact sampling of the discrete Gaussian, with integers from a source of random words.

P(k) is proportional to exp(-k^2 / (2 s^2)) over all integers k (Canonne, Kamath, Steinke, "The
Discrete Gaussian for Differential Privacy", NeurIPS 2020). Noise of this kind on integers has the
Renyi divergence bound of the continuous Gaussian, and no low bits that could tell data apart.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Words = Callable[[int], npt.NDArray[np.uint64]]  # that many uniform 64-bit words

TAIL = 9.5  # deviations: beyond lies less than 2^-68
BINS_PER_DEVIATION = 2**10
CHUNK = 2**20  # values drawn at a time
# Statistical distance between a sampled value and the exact distribution, at most: 20,000 table
# entries rounded to 2^-64, weights and acceptance in double precision, the tail.
SAMPLER_DISTANCE = 2.0**-48


@lru_cache(maxsize=8)
def bins_of(s: float) -> tuple[npt.NDArray[np.uint64], int, int]:
    """(cumulative probabilities in units of 2^-64, first bin, integers in a bin).

    A bin's probability is that of its likeliest integer times its width: `discrete_gaussian` then
    rejects. With one integer in a bin this is plain inversion.
    """
    width = 2 ** max(0, math.floor(math.log2(s / BINS_PER_DEVIATION)))
    half = math.ceil(TAIL * s / width) + 1
    bins = np.arange(-half, half, dtype=np.int64)
    likeliest = np.where(bins >= 0, bins * width, (bins + 1) * width - 1) / s
    weights = np.ldexp(np.exp(-np.square(likeliest) / 2), 100)
    sums = list(accumulate(int(weight) for weight in weights))
    return np.array([(n << 64) // sums[-1] for n in sums[:-1]], np.uint64), -half, width


def discrete_gaussian(s: float, num: int, words: Words) -> npt.NDArray[np.int64]:
    """`num` independent values of parameter s, which is the standard deviation for s > 1."""
    table, first, width = bins_of(s)
    values = np.empty(num, np.int64)
    for start in range(0, num, CHUNK):
        missing = np.arange(start, min(start + CHUNK, num))
        while missing.size:
            bins = np.searchsorted(table, words(missing.size), side="right") + first
            drawn = bins * width
            accepted = np.ones(missing.size, bool)
            if width > 1:
                drawn += (words(missing.size) & np.uint64(width - 1)).astype(np.int64)
                likeliest = np.where(bins >= 0, bins * width, (bins + 1) * width - 1)
                distance = (drawn - likeliest) / s * ((drawn + likeliest) / s)  # >= 0
                uniform = (words(missing.size) >> np.uint64(11)).astype(np.float64) * 2.0**-53
                accepted = uniform < np.exp(-distance / 2)
            values[missing[accepted]] = drawn[accepted]
            missing = missing[~accepted]
    return values
