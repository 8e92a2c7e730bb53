"""Update validation: which replies are aggregated. One bad update must not spoil the model.

Rejects what is broken or grossly out of line; `strategies.aggregation` tolerates malicious clients
that stay within these bounds.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Message

from protocol.config import RoundsConfig
from protocol.messages import (
    Arrays,
    RosterEntry,
    TrainReply,
    in_one_line,
    payload_bytes,
    read_reply,
)

log = logging.getLogger("keel.server")


@dataclass
class RoundReport:
    """The replies to one round's messages, sorted into accepted ones and others.

    kept: accepted, in the order of the clients' names. left_out: client to reason, for errors,
    clients that did not reply, and rejected replies; rejected: the number of the latter.
    """

    kept: list[TrainReply] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rejected: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class ExpectedReply:
    """What a valid reply contains.

    arrays, extra: arrays with the expected names, shapes and dtypes. num_examples: the training
    samples that each client of the cohort declared before round 1.
    """

    round: int
    arrays: Arrays
    extra: Arrays
    num_examples: Mapping[str, int]


def validate_replies(
    messages: Iterable[Message],
    roster: Mapping[int, RosterEntry],
    expected: ExpectedReply,
    rounds: RoundsConfig,
    update_of: Callable[[TrainReply], Arrays],
) -> RoundReport:
    """The replies in these messages, validated; those that are left out are named in the log.

    update_of: the new minus the old arrays of a reply, which `norm-bound` applies to.
    """
    report = RoundReport()
    rejected: dict[str, str] = {}
    accepted: dict[str, TrainReply] = {}
    for message in messages:
        node = message.metadata.src_node_id
        client = roster[node].client if node in roster else f"node {node}"
        if message.has_error():
            reason = message.error.reason or f"error {message.error.code}"
            report.left_out[client] = in_one_line(reason)
            continue
        try:
            report.bytes_up += payload_bytes(message)
            reply = replace(read_reply(message), client=client)
        except Exception as error:  # a client's bytes may raise anything
            rejected[client] = in_one_line(f"unreadable: {type(error).__name__}: {error}")
            continue
        if client in accepted:
            log.warning("round %d: client %s: a second reply", expected.round, client)
            report.rejected += 1
            continue
        reason = rejection_reason(reply, expected)
        if reason:
            rejected[client] = reason
        else:
            accepted[client] = reply
    if rounds.norm_bound != "off" and expected.arrays:
        norms = {client: norm(update_of(reply)) for client, reply in accepted.items()}
        rejected |= beyond_bound(norms, rounds)
    report.rejected += len(rejected)
    report.left_out |= rejected
    report.kept = [accepted[client] for client in sorted(accepted.keys() - rejected.keys())]
    for client, reason in sorted(report.left_out.items()):
        log.warning("round %d: left out client %s: %s", expected.round, client, reason)
    return report


def rejection_reason(reply: TrainReply, expected: ExpectedReply) -> str:
    """Why this reply is rejected, with the values found; "" for a valid one."""
    if reply.client not in expected.num_examples:
        return f"it was not asked in round {expected.round}"
    if reply.round != expected.round:
        return f"it answers round {reply.round}"
    reason = mismatch(reply.arrays, expected.arrays) or mismatch(reply.extra, expected.extra)
    if reason:
        return reason
    count, declared = reply.metrics.get("num-examples"), expected.num_examples[reply.client]
    if count != declared:
        shown = "missing" if count is None else f"{count:g}"
        return f"num-examples is {shown}, the roster says {declared}"
    for name, value in sorted(reply.metrics.items()):
        if name.endswith("-accuracy") and not 0 <= value <= 1:
            return f"{name} is {value:g}, not from 0 to 1"
    return ""


def mismatch(arrays: Arrays, expected: Arrays) -> str:
    """What is wrong with these arrays; "" if names, shapes and dtypes agree and all are finite."""
    missing = sorted(expected.keys() - arrays.keys())
    if missing:
        return f"array {missing[0]!r} is missing ({len(missing)} of {len(expected)})"
    unknown = sorted(arrays.keys() - expected.keys())
    if unknown:
        return f"array {unknown[0]!r} is unknown ({len(unknown)} too many)"
    for name, like in expected.items():
        got = arrays[name]
        if got.shape != like.shape:
            return f"array {name!r} is {list(got.shape)}, the global model's is {list(like.shape)}"
        if got.dtype != like.dtype:
            return f"array {name!r} is {got.dtype}, the global model's is {like.dtype}"
        if got.is_floating_point() and not got.isfinite().all():
            return f"array {name!r} holds {int((~got.isfinite()).sum())} values that are not finite"
        if name.endswith("running_var") and (got < 0).any():
            return f"array {name!r} holds negative variances"
    return ""


def norm(update: Arrays) -> float:
    """The Euclidean norm over all of these arrays, summed in double precision."""
    return math.sqrt(sum(float(array.double().square().sum()) for array in update.values()))


def beyond_bound(norms: Mapping[str, float], rounds: RoundsConfig) -> dict[str, str]:
    """The clients whose update has a larger norm than `norm-bound` allows, each with the reason.

    norms: of the round's updates that are valid otherwise, by client.
    """
    if rounds.norm_bound == "off" or not norms:
        return {}
    bound, source = rounds.norm_bound_value, "norm-bound-value"
    if rounds.norm_bound == "median":
        median = statistics.median_low(norms.values())  # of two, their mean would follow the larger
        source = f"{bound:g} times the round's median of {median:.4g}"
        bound *= median
    return {
        client: f"its update's norm is {length:.4g}, more than {bound:.4g} ({source})"
        for client, length in norms.items()
        if length > bound
    }
