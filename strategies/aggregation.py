"""Robust aggregations of the clients' arrays, and the cap on their weights.

median and trimmed-mean: per coordinate (Yin et al. 2018, arXiv 1803.01498). krum, multi-krum:
Blanchard et al. 2017, arXiv 1703.02757: of n updates, those with the smallest sum of squared
distances to their n - f - 2 nearest; Krum takes one, Multi-Krum the weighted mean of n - f. Both
use Flower's functions.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from flower_adapter.aggregation import select_multikrum, trim_mean
from protocol.arrays import Arrays
from protocol.config_keys import RoundsConfig
from protocol.messages import TrainReply
from protocol.text import num_of

log = logging.getLogger("keel.server")


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
