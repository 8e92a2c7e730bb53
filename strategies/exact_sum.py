"""The weighted sum of clients' arrays, whose bits do not depend on the order of the clients.

Floating-point addition is not associative, and replies arrive in any order. Here each term is cut
to a multiple of a small step, and the multiples are added as integers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from protocol.arrays import Arrays, limit_of

SUM_BITS = 62  # of an int64; the other two are its sign and one bit of headroom
PIECE = 2**15  # values that are added at a time; they fit into the cache


class ExactSum:
    """sum_i n_i w_i over the arrays w_i of clients with weights n_i >= 0, added one by one.

    like: arrays with the names, shapes and dtypes of each w_i. limits: the largest magnitude of a
    value in each floating array; an integer array has values up to MAX_INTEGER. max_weight: an
    upper bound of sum_i n_i.

    An array's step is its limit times max_weight / 2^62, rounded up to a power of two. In the mean
    that is 2e-15 for a limit of 1e4; for comparison, float32 values near 0.05 are 4e-9 apart.
    """

    def __init__(self, like: Arrays, limits: Mapping[str, float], max_weight: float) -> None:
        self.like = like
        self.weights: list[float] = []  # of the clients, in the order in which they were added
        # arrays of one dtype and step are added together: small ones would cost a call each
        self.groups: dict[tuple[torch.dtype, int], list[str]] = {}
        for name, array in like.items():
            largest = limit_of(name, array, limits) * max_weight
            exponent = math.ceil(math.log2(largest)) - SUM_BITS  # of the step
            self.groups.setdefault((array.dtype, exponent), []).append(name)
        self.sums = {  # in steps, the arrays of a group one after the other
            group: torch.zeros(sum(like[name].numel() for name in names), dtype=torch.int64)
            for group, names in self.groups.items()
        }

    def add(self, arrays: Arrays, weight: float) -> None:
        """Add weight * arrays, which are within their limits and are not modified."""
        self.weights.append(weight)
        for group, names in self.groups.items():
            _, exponent = group
            start, total = 0, self.sums[group]
            for piece in pieces(arrays[name] for name in names):
                # scaling by a power of two is exact; `long` cuts to a whole number of steps
                term = piece.to(torch.float64, copy=True).mul_(weight * 2.0**-exponent).long()
                total[start : start + len(term)] += term
                start += len(term)

    def total(self, divisor: float = 1.0) -> Arrays:
        """The sum over a divisor, in the dtypes of `like`; integers are rounded."""
        found: Arrays = {}
        for group, names in self.groups.items():
            dtype, exponent = group
            sizes = [self.like[name].numel() for name in names]
            for name, steps in zip(names, torch.split(self.sums[group], sizes), strict=True):
                value = steps.double().mul_(2.0**exponent).div_(divisor)
                value = value if dtype.is_floating_point else value.round_()
                found[name] = value.to(dtype).reshape(self.like[name].shape)
        return {name: found[name] for name in self.like}

    def mean(self) -> Arrays:
        """sum_i n_i w_i / sum_i n_i, in the dtypes of `like`; integers are rounded."""
        return self.total(math.fsum(self.weights))  # fsum: in any order the same


def pieces(arrays: Iterable[Tensor]) -> Iterator[Tensor]:
    """The values of these arrays in order, in flat pieces of at most about PIECE values."""
    small: list[Tensor] = []
    for array in arrays:
        if array.numel() >= PIECE:
            if small:
                yield torch.cat(small)
                small = []
            yield from torch.split(array.reshape(-1), PIECE)
            continue
        small.append(array.reshape(-1))
        if sum(len(each) for each in small) >= PIECE:
            yield torch.cat(small)
            small = []
    if small:
        yield torch.cat(small)


__all__ = ["ExactSum"]
