"""The update firewall: which replies may be averaged. One bad update must not spoil a model.

Every strategy's replies pass here before they are added up (`Average.screened`). It protects
against what is broken and what is grossly out of line; a client that lies within the bounds is what
strategies/robust.py is for.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from protocol.config import RoundsConfig
from protocol.messages import Arrays, TrainReply


@dataclass(frozen=True)
class ExpectedReply:
    """What a good reply has.

    arrays, extra: arrays with the names, shapes and dtypes that it has. num_examples: what each
    client said before round 1 that it would train on; these are the clients that were asked.
    """

    round: int
    arrays: Arrays
    extra: Arrays
    num_examples: Mapping[str, int]


def rejection_reason(reply: TrainReply, want: ExpectedReply) -> str:
    """Why this reply must be left out, in words with the figures; "" for a good one."""
    if reply.client not in want.num_examples:
        return f"it was not asked in round {want.round}"
    if reply.round != want.round:
        return f"it answers round {reply.round}"
    reason = mismatch(reply.arrays, want.arrays) or mismatch(reply.extra, want.extra)
    if reason:
        return reason
    count, declared = reply.metrics.get("num-examples"), want.num_examples[reply.client]
    if count != declared:
        shown = "missing" if count is None else f"{count:g}"
        return f"num-examples is {shown}, the roster says {declared}"
    for name, value in sorted(reply.metrics.items()):
        if name.endswith("-accuracy") and not 0 <= value <= 1:
            return f"{name} is {value:g}, not from 0 to 1"
    return ""


def mismatch(arrays: Arrays, expected: Arrays) -> str:
    """What is wrong with these arrays, in words; "" if names, shapes and dtypes fit, all finite."""
    missing = sorted(expected.keys() - arrays.keys())
    if missing:
        return f"array {missing[0]!r} is missing ({len(missing)} of {len(expected)})"
    unknown = sorted(arrays.keys() - expected.keys())
    if unknown:
        return f"array {unknown[0]!r} is unknown ({len(unknown)} too many)"
    for name, want in expected.items():
        got = arrays[name]
        if got.shape != want.shape:
            return f"array {name!r} is {list(got.shape)}, the global model's is {list(want.shape)}"
        if got.dtype != want.dtype:
            return f"array {name!r} is {got.dtype}, the global model's is {want.dtype}"
        if got.is_floating_point() and not got.isfinite().all():
            return f"array {name!r} holds {int((~got.isfinite()).sum())} values that are not finite"
        if name.endswith("running_var") and (got < 0).any():
            return f"array {name!r} holds negative variances"
    return ""


def norm(update: Arrays) -> float:
    """The Euclidean norm over all of these arrays, summed in double precision."""
    return math.sqrt(sum(float(array.double().square().sum()) for array in update.values()))


def beyond_bound(norms: Mapping[str, float], rounds: RoundsConfig) -> dict[str, str]:
    """The clients whose update is longer than `norm-bound` allows, and why, with the figures.

    norms: of the round's updates that are good otherwise, by client.
    """
    if rounds.norm_bound == "off" or not norms:
        return {}
    bound, words = rounds.norm_bound_value, "norm-bound-value"
    if rounds.norm_bound == "median":
        median = statistics.median_low(norms.values())  # of two: a mean would follow the longer
        words = f"{bound:g} times the round's median of {median:.4g}"
        bound *= median
    return {
        client: f"its update's norm is {length:.4g}, more than {bound:.4g} ({words})"
        for client, length in norms.items()
        if length > bound
    }
