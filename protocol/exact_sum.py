"""Sums of clients' arrays whose bits depend on neither the order nor the grouping of the clients.

Floating-point addition is not associative, so a sum over several workers would depend on how
clients are distributed among them. Here each term is rounded to a multiple of a small step, and the
multiples are added as integers.
"""

import math
from collections.abc import Mapping

import torch

from protocol.messages import Arrays, limit_of, out_of_range

SUM_BITS = 62  # of an int64; the other two are its sign and one bit of headroom
CHUNK = 2**16  # values


class ExactSum:
    """sum_i p_i w_i over the arrays w_i of clients, where p_i >= 0 and sum_i p_i <= 1.

    limits: the largest magnitude of a value in each floating array, above 0. Integer arrays may
    have values up to MAX_INTEGER. An array's step is its limit / 2^62, rounded up to a power of
    two: 3e-14 for a limit of 1e5. For comparison, float32 values near 0.05 are 4e-9 apart.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        self.limits = limits
        self.sums: Arrays = {}  # int64, in steps

    def _step(self, name: str, like: torch.Tensor) -> float:
        return 2.0 ** (math.ceil(math.log2(limit_of(name, like, self.limits))) - SUM_BITS)

    def check(self, arrays: Arrays) -> None:
        """ValueError naming an array with a value beyond its bound."""
        if reason := out_of_range(arrays, self.limits):
            raise ValueError(reason)

    def add(self, arrays: Arrays, share: float) -> None:
        """Add share * arrays, or raise the error of `check` and add nothing.

        The arrays are not modified; each name needs the same shape and dtype in all calls.
        """
        self.check(arrays)
        for name, array in arrays.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(array.shape, dtype=torch.int64)
            factor = share / self._step(name, array)
            # in chunks that fit into the cache: the whole array is never copied in double precision
            flat = array.reshape(-1), self.sums[name].view(-1)
            for chunk, total in zip(*(torch.split(a, CHUNK) for a in flat), strict=True):
                total += chunk.to(torch.float64, copy=True).mul_(factor).round_().long()

    def scaled(self, factor: float, like: Arrays) -> Arrays:
        """The sum times a factor, of the arrays and in the dtypes of `like`; integers are rounded.

        The sum of these arrays is then gone.
        """
        found: Arrays = {}
        for name in [name for name in self.sums if name in like]:
            dtype = like[name].dtype
            value = self.sums.pop(name).double().mul_(factor * self._step(name, like[name]))
            found[name] = (value if dtype.is_floating_point else value.round_()).to(dtype)
        return found
