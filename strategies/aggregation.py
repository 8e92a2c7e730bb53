"""The clients' arrays combined: their exact sum, robust aggregations, and the cap on weights.

Floating-point addition is not associative, and replies arrive in any order. So that the bits of a
sum do not depend on the order, each term is cut to a multiple of a small step, and the multiples
are added as integers.

median and trimmed-mean: per coordinate (Yin et al. 2018, arXiv 1803.01498). krum, multi-krum:
Blanchard et al. 2017, arXiv 1703.02757: of n updates, those with the smallest sum of squared
distances to their n - f - 2 nearest; Krum takes one, Multi-Krum the weighted mean of n - f. Both
use Flower's functions.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from flower_adapter.aggregation import select_multikrum, trim_mean
from protocol.arrays import Arrays, limit_of
from protocol.config_keys import RoundsConfig
from protocol.messages import TrainReply
from protocol.text import num_of

SUM_BITS = 62  # of an int64; the other two are its sign and one bit of headroom
PIECE = 2**15  # values that are added at a time; they fit into the cache
log = logging.getLogger("keel.server")


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


def capped_counts(counts: Sequence[float], is_checked: Sequence[bool], share: float) -> list[float]:
    """The counts, with unchecked ones capped so that none is more than `share` of their sum.

    All capped counts are equal. A share of 1 / len(counts) is always allowed. If no unchecked count
    exceeds its share, the counts are returned unchanged.
    """
    share = max(share, 1 / len(counts))
    descending = sorted(
        (n for n, known in zip(counts, is_checked, strict=True) if not known), reverse=True
    )
    rest = float(sum(counts))
    for num_cut in range(len(descending) + 1):
        # the `num_cut` largest are cut to cap = share * (num_cut * cap + rest)
        room = 1 - num_cut * share
        cap = share * rest / room if room > 0 else math.inf
        if num_cut == len(descending) or descending[num_cut] <= cap * (1 + 1e-9):
            break
        rest -= descending[num_cut]
    if not num_cut:
        return list(counts)
    return [n if known else min(n, cap) for n, known in zip(counts, is_checked, strict=True)]


def with_enough_replies(rounds: RoundsConfig, num_replies: int) -> RoundsConfig:
    """The config with `aggregation` = median where another robust one has too few replies."""
    if not rounds.aggregation_problem(num_replies):
        return rounds
    log.warning(
        "only %s: %s needs more; this round uses their coordinate-wise median",
        num_of("reply", num_replies, "replies"),
        rounds.aggregation,
    )
    return replace(rounds, aggregation="median")


def coordinate_wise(replies: Sequence[TrainReply], rounds: RoundsConfig) -> Arrays:
    """The median or trimmed mean of every coordinate; integers are rounded."""
    found: Arrays = {}
    for name, like in replies[0].arrays.items():
        arrays = [reply.arrays[name] for reply in replies]
        if like.dtype is torch.bfloat16:  # NumPy has no such type
            arrays = [array.float() for array in arrays]
        stacked = np.stack([array.numpy() for array in arrays])
        if rounds.aggregation == "median":  # as in Flower's FedMedian, which has no function for it
            value = np.median(stacked, axis=0)
        else:
            value = trim_mean(stacked, rounds.trim_fraction)
        combined = torch.from_numpy(np.asarray(value))
        if not like.is_floating_point():
            combined = combined.round()
        found[name] = combined.to(like.dtype)
    return found


def selected(
    replies: Sequence[TrainReply],
    rounds: RoundsConfig,
    update_of: Callable[[TrainReply], Arrays],
) -> list[TrainReply]:
    """The replies that Krum (one) or Multi-Krum (all but `num-malicious`) selects, in order.

    update_of: new minus old arrays.
    """
    # double precision, because distances come from differences of squares
    contents = [
        RecordDict(
            {
                "arrays": ArrayRecord({k: a.double() for k, a in update_of(reply).items()}),
                "which": ConfigRecord({"which": i}),
            }
        )
        for i, reply in enumerate(replies)
    ]
    f = rounds.num_malicious
    count = 1 if rounds.aggregation == "krum" else max(1, len(replies) - f)
    chosen = select_multikrum(contents, num_malicious_nodes=f, num_nodes_to_select=count)
    found = sorted(int(c.config_records["which"]["which"]) for c in chosen)  # type: ignore[arg-type]
    log.info("%s selects %s", rounds.aggregation, ", ".join(replies[i].client for i in found))
    return [replies[i] for i in found]
