"""Aggregations that a minority of clients cannot move at will, by Flower's own functions.

median and trimmed-mean: per coordinate (Yin et al. 2018, arXiv 1803.01498). krum, multi-krum:
Blanchard et al. 2017, arXiv 1703.02757: of n updates, those with the least sum of squared distances
to their n - f - 2 nearest; Krum takes one, Multi-Krum the weighted mean of several.
"""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.serverapp.strategy.fedtrimmedavg import trim_mean
from flwr.serverapp.strategy.multikrum import select_multikrum

from protocol.config import RoundsConfig
from protocol.messages import Arrays, TrainReply


def check_aggregation(rounds: RoundsConfig, cohort: int) -> None:
    """ValueError, one line, where the aggregation makes no sense for so many clients a round."""
    if rounds.aggregation == "trimmed-mean" and int(rounds.trim_fraction * cohort) == 0:
        raise ValueError(
            f"trim-fraction = {rounds.trim_fraction:g}: of {cohort} clients a round it trims none; "
            f"it has to be at least {1 / cohort:.2g} with them"
        )
    least = 2 * rounds.num_malicious + 3
    if rounds.aggregation in ("krum", "multi-krum") and cohort < least:
        raise ValueError(
            f"num-malicious = {rounds.num_malicious}: {rounds.aggregation} needs "
            f"2 * {rounds.num_malicious} + 3 = {least} clients a round, there are {cohort}"
        )


def coordinate_wise(replies: list[TrainReply], rounds: RoundsConfig) -> Arrays:
    """The median or trimmed mean of every coordinate; whole numbers are rounded."""
    found: Arrays = {}
    for name, like in replies[0].arrays.items():
        stacked = np.stack([reply.arrays[name].numpy() for reply in replies])
        if rounds.aggregation == "median":  # as in Flower's FedMedian, which has no function for it
            value = np.median(stacked, axis=0)
        else:
            value = trim_mean(stacked, rounds.trim_fraction)
        combined = torch.from_numpy(np.asarray(value))
        if not like.is_floating_point():
            combined = combined.round()
        found[name] = combined.to(like.dtype)
    return found


def krum_selection(updates: list[Arrays], rounds: RoundsConfig) -> list[int]:
    """Which of the updates Krum (one) or Multi-Krum (`num-selected`) takes, in ascending order.

    num-selected = 0: all but the `num-malicious`.
    """
    # distances come from differences of squares: of small updates, in double precision
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
        count = rounds.num_selected or max(1, len(updates) - f)
    chosen = select_multikrum(contents, num_malicious_nodes=f, num_nodes_to_select=count)
    return sorted(int(c.config_records["which"]["which"]) for c in chosen)  # type: ignore[arg-type]
