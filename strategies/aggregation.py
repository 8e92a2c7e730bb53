"""Aggregation of the clients' arrays: the weighted mean, and robust aggregations.

median and trimmed-mean: per coordinate (Yin et al. 2018, arXiv 1803.01498). krum, multi-krum:
Blanchard et al. 2017, arXiv 1703.02757: of n updates, those with the smallest sum of squared
distances to their n - f - 2 nearest; Krum takes one, Multi-Krum the weighted mean of several. Both
use Flower's functions.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flower_adapter.aggregation import select_multikrum, trim_mean
from protocol.config import RoundsConfig
from protocol.exact_sum import ExactSum
from protocol.messages import Arrays, TrainReply
from protocol.text import num_of

log = logging.getLogger("keel.server")


class RunningMean:
    """The weighted mean of arrays that are added as they come: sum_i p_i w_i, p_i = n_i / sum(n).

    Uses `ExactSum`: the bits depend on neither the order of the clients nor who sums. If some
    clients send no arrays, the sum is scaled by the total weight over the weight of those that did.

    weights: n_i by client, of all that were asked. limits: as `ExactSum`. extra_shares: by client,
    its weight in the sum of the arrays alongside the model; {}: these are not summed.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        limits: Mapping[str, float],
        extra_shares: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.weights, self.total = weights, math.fsum(weights.values())
        self.extra_shares = extra_shares
        self.sum = ExactSum(limits)
        self.added: set[str] = set()  # clients

    def share(self, client: str) -> float:
        """This client's p_i."""
        return self.weights[client] / self.total

    def add(self, client: str, arrays: Arrays, extra: Arrays) -> None:
        """Add a client's arrays, which are not modified; the names in `extra` are others."""
        self.sum.add(arrays, self.share(client))
        if self.extra_shares:
            self.sum.add(extra, self.extra_shares[client])
        self.added.add(client)

    def mean(self, like: Arrays) -> Arrays:
        """The mean of what was added, in the dtypes of `like`. Call it once."""
        return self.sum.scaled(self.total / math.fsum(self.weights[c] for c in self.added), like)

    def extra_sum(self, like: Arrays) -> Arrays:
        """The sum of the arrays alongside the model, in the dtypes of `like`. Call it once."""
        return self.sum.scaled(1.0, like)


def weighted_mean(replies: Sequence[TrainReply], weights: Sequence[float]) -> Arrays:
    """The weighted mean of the replies' arrays, summed in their order.

    Floating arrays are summed in their own precision; integers (counters) in double precision, then
    rounded.
    """
    total, first = sum(weights), replies[0].arrays
    shares = [weight / total for weight in weights]
    floating = [name for name, like in first.items() if like.is_floating_point()]
    means = {name: first[name] * shares[0] for name in floating}
    for reply, share in zip(replies[1:], shares[1:], strict=True):
        arrays = [reply.arrays[name] for name in floating]
        if arrays:  # torch refuses empty lists
            torch._foreach_add_(list(means.values()), arrays, alpha=share)
    for name in first.keys() - means.keys():
        terms = (r.arrays[name].double() * w for r, w in zip(replies, weights, strict=True))
        means[name] = (sum(terms, torch.zeros(())) / total).round().to(first[name].dtype)
    return {name: means[name] for name in first}


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


def aggregate(
    replies: Sequence[TrainReply],
    weights: Sequence[float],
    rounds: RoundsConfig,
    update_of: Callable[[TrainReply], Arrays],
) -> Arrays:
    """The replies' arrays combined as `aggregation` says. update_of: new minus old arrays.

    With replies missing, trimmed mean and Krum may have too few: then the median is used.
    """
    if rounds.aggregation_problem(len(replies)):
        log.warning(
            "only %s: %s needs more; this round uses their coordinate-wise median",
            num_of("reply", replies, "replies"),
            rounds.aggregation,
        )
        rounds = replace(rounds, aggregation="median")
    if rounds.aggregation in ("median", "trimmed-mean"):
        return coordinate_wise(replies, rounds)
    if rounds.aggregation in ("krum", "multi-krum"):
        chosen = krum_selection([update_of(reply) for reply in replies], rounds)
        log.info("%s selects %s", rounds.aggregation, ", ".join(replies[i].client for i in chosen))
        replies, weights = [replies[i] for i in chosen], [weights[i] for i in chosen]
    return weighted_mean(replies, weights)


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


def krum_selection(updates: Sequence[Arrays], rounds: RoundsConfig) -> list[int]:
    """Indices of the updates that Krum (one) or Multi-Krum (`num-selected`) selects, ascending.

    num-selected = 0, or more than that: all but `num-malicious`.
    """
    # double precision, because distances come from differences of squares
    contents = [
        RecordDict(
            {
                "arrays": ArrayRecord({k: a.double() for k, a in update.items()}),
                "which": ConfigRecord({"which": i}),
            }
        )
        for i, update in enumerate(updates)
    ]
    f, count = rounds.num_malicious, 1
    if rounds.aggregation == "multi-krum":
        count = max(1, len(updates) - f)
        count = min(rounds.num_selected or count, count)
    chosen = select_multikrum(contents, num_malicious_nodes=f, num_nodes_to_select=count)
    return sorted(int(c.config_records["which"]["which"]) for c in chosen)  # type: ignore[arg-type]
