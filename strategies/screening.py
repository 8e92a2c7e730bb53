"""Which replies may be averaged: one bad update must not spoil the model or end the run."""

import math

from torch import Tensor

from protocol.messages import TrainReply

Arrays = dict[str, Tensor]


def why_refused(
    reply: TrainReply, expected: Arrays, expected_extra: Arrays, server_round: int
) -> str:
    """Why this reply must be left out, in words; "" for a good one.

    expected, expected_extra: arrays with the names, shapes and dtypes that a good reply has.
    """
    if reply.round != server_round:
        return f"it answers round {reply.round}"
    reason = mismatch(reply.arrays, expected) or mismatch(reply.extra, expected_extra)
    if reason:
        return reason
    if not 0 < reply.metrics.get("num-examples", 0) < math.inf:
        return f"num-examples is {reply.metrics.get('num-examples')}"
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
    return ""
