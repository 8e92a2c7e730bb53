"""Update validation: which replies are aggregated. One bad update must not spoil the model.

Rejects what is broken or grossly out of line; `strategies.aggregation` tolerates malicious clients
that stay within these bounds.
"""

import logging
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from flwr.app import Message

from protocol.config import PrivacyConfig, RoundsConfig
from protocol.messages import (
    RESET_NEEDED,
    Arrays,
    RosterEntry,
    TrainReply,
    error_reason,
    extremes,
    mismatch,
    out_of_range,
    payload_bytes,
    read_reply,
)
from protocol.privacy import noise_sigma
from protocol.text import in_one_line, shortened

log = logging.getLogger("keel.server")
MIN_REPLIES_FOR_MEDIAN = 3  # with an update that is not 0; of two, neither is an outlier
EXTRA_FACTOR = 10.0  # times the cohort's median norm of the arrays alongside the model
OUTLIER = 10  # times the median of the sites' numbers of samples
MAX_VALUE_RATIO = 1e4  # an array's largest value in a reply over what was sent, or over 1
MAX_COUNTER_CHANGE = 2**24  # of an integer array from what was sent: more steps than any round has
# the largest float32 loss; means of such values stay finite
MAX_METRIC = torch.finfo(torch.float32).max
MAX_REASONS = 5  # of clients that were left out, as the error and the log show them
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
RECORD_BYTES, ARRAY_BYTES = 2**20, 2**10  # allowed on top of the arrays' data: in all, per array


class Half(Protocol):
    """The part of a method's server half that validation calls."""

    def update_of(self, reply: TrainReply) -> Arrays:
        """The new minus the old arrays, which `norm-bound` applies to."""

    def beside_model(self, reply: TrainReply) -> Arrays:
        """The reply's `extra`, on a scale that does not grow with the client's samples."""

    def extra_reason(self, reply: TrainReply) -> str:
        """Why the reply's `extra` is rejected, beyond names, shapes and sizes; "": it is not."""


class NormReference:
    """The norm that `norm-bound = "median"` multiplies: the median of the round's norms above 0.

    It falls by at most half per round, so that no cohort can bring it near 0 at once.
    """

    def __init__(self) -> None:
        self.value = 0.0  # of the last round
        self.has_warned = False

    def of_round(self, norms: Iterable[float]) -> float | None:
        """This round's reference; None, with a warning once a run, for fewer than three norms."""
        changes = [length for length in norms if length > 0]
        if len(changes) < MIN_REPLIES_FOR_MEDIAN:
            if not self.has_warned:
                log.warning(
                    "norm-bound = 'median' is not applied: it needs at least %d replies that "
                    "change something, this round has %d",
                    MIN_REPLIES_FOR_MEDIAN,
                    len(changes),
                )
            self.has_warned = True
            return None
        # the lower middle value: the mean of both would follow the larger one
        self.value = max(statistics.median_low(changes), self.value / 2)
        return self.value

    def state(self) -> Arrays:
        """For a checkpoint; empty where no round has set the reference."""
        if not self.value:
            return {}
        return {"norm-reference": torch.tensor(self.value, dtype=torch.float64)}

    def load(self, state: Arrays) -> None:
        """Restore what `state` returned."""
        self.value = float(state["norm-reference"]) if "norm-reference" in state else 0.0


@dataclass
class RoundReport:
    """The replies to one round's messages, sorted into accepted ones and others.

    accepted: replies, in the order of the clients' names. left_out: client to reason, for errors,
    clients that did not reply, and rejected replies; rejected: the number of the latter.
    reset_needed: clients whose state is lost, or ahead of the server.
    """

    accepted: list[TrainReply] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rejected: int = 0
    reset_needed: list[str] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(frozen=True)
class ExpectedReply:
    """What a valid reply contains.

    arrays, extra: arrays with the expected names, shapes and dtypes. num_examples: the training
    samples that each client of the cohort declared before round 1. limits: the largest magnitude of
    a value, by array. outliers: clients that declared far more samples than the others, without
    evidence. sent: the arrays that the clients start from.
    """

    round: int
    arrays: Arrays
    extra: Arrays
    num_examples: Mapping[str, int]
    limits: Mapping[str, float] = field(default_factory=dict)
    outliers: frozenset[str] = frozenset()
    sent: Arrays = field(default_factory=dict)

    @cached_property
    def max_bytes(self) -> int:
        """The largest size of a valid reply."""
        arrays = [*self.arrays.values(), *self.extra.values()]
        return RECORD_BYTES + sum(a.numel() * a.element_size() + ARRAY_BYTES for a in arrays)


def largest_values(sent: Arrays, privacy: PrivacyConfig) -> dict[str, float]:
    """The largest magnitude of a value in a reply, for each floating array; with room for noise."""
    noise = 0.0
    if privacy.epsilon:  # with a delta below 4e-9, 8 standard deviations are more
        noise = max(100 * privacy.clip_norm / privacy.epsilon, 8 * noise_sigma(privacy))
    return {
        name: max(MAX_VALUE_RATIO * max(1.0, *(abs(end) for end in extremes(array))), noise)
        for name, array in sent.items()
        if array.is_floating_point()
    }


def count_outliers(declared: Mapping[str, int], max_weight_share: float) -> frozenset[str]:
    """The clients that declared more than OUTLIER times the median number of samples.

    None where max-weight-share = 1: counts are trusted.
    """
    if max_weight_share == 1:
        return frozenset()
    median = statistics.median_low(declared.values()) if declared else 0
    return frozenset(client for client, count in declared.items() if count > OUTLIER * median)


@dataclass
class Validation:
    """Validates the replies of one round, each as it comes.

    asked: the clients, by the node that was asked; replies carry that node.
    accepted: by client, as far as one reply alone can tell; `report` compares them.
    """

    asked: Mapping[int, RosterEntry]
    expected: ExpectedReply
    rounds: RoundsConfig
    half: Half
    reference: NormReference
    accepted: dict[str, TrainReply] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}
        self.rejected: dict[str, str] = {}
        self.reset_needed: set[str] = set()
        self.num_second, self.bytes_up = 0, 0

    def add(self, message: Message) -> str:
        """Validate the reply in this message; the client that it is from."""
        node = message.metadata.src_node_id
        client = self.asked[node].client if node in self.asked else f"node {node}"
        if message.has_error():
            self.failed[client] = error_reason(message.error)
            if message.error.code == RESET_NEEDED:
                self.reset_needed.add(client)
            return client
        try:
            self.bytes_up += payload_bytes(message)
            reply = replace(read_reply(message, self.expected.max_bytes), client=client)
        except Exception as error:  # a client's bytes may raise anything
            self.rejected[client] = in_one_line(error)
            return client
        if client in self.accepted:
            log.warning("round %d: client %s: a second reply", self.expected.round, client)
            self.num_second += 1
            return client
        reason = rejection_reason(reply, self.expected)
        reason = reason or implausible(reply, self.expected, self.half)
        if reason:
            self.rejected[client] = in_one_line(reason)
        else:  # in the order of the arrays sent: Krum compares by position
            arrays = {name: reply.arrays[name] for name in self.expected.arrays}
            self.accepted[client] = replace(reply, arrays=arrays)
        return client

    def report(self) -> RoundReport:
        """All replies, sorted. The log names the first five of those left out for each reason."""
        half, accepted, rejected = self.half, self.accepted, self.rejected
        has_arrays = bool(self.expected.arrays)
        if self.rounds.norm_bound != "off" and has_arrays:
            beside = {client: norm(half.beside_model(reply)) for client, reply in accepted.items()}
            beyond = beyond_median(beside)
            # without those that are rejected: the bound and its reference are of valid updates
            valid = {c: reply for c, reply in accepted.items() if c not in beyond}
            norms = {client: norm(half.update_of(reply)) for client, reply in valid.items()}
            rejected |= beyond | beyond_bound(norms, self.rounds, self.reference)
        if has_arrays and self.expected.outliers & accepted.keys() - rejected.keys():
            updates = {c: half.update_of(r) for c, r in accepted.items() if c not in rejected}
            rejected |= opposed(updates, self.expected.outliers)
        left_out = dict(sorted((self.failed | rejected).items()))
        for reason, clients in by_reason(left_out).items():
            text = f"client {clients[0]}" if len(clients) == 1 else f"clients {shortened(clients)}"
            log.warning("round %d: left out %s: %s", self.expected.round, text, reason)
        return RoundReport(
            accepted=[accepted[client] for client in sorted(accepted.keys() - rejected.keys())],
            left_out=left_out,
            rejected=self.num_second + len(rejected),
            reset_needed=sorted(self.reset_needed),
            bytes_up=self.bytes_up,
        )


def by_reason(left_out: Mapping[str, str]) -> dict[str, list[str]]:
    """The clients that were left out, by the reason.

    Of more than five reasons, those that differ in numbers alone are one: the first client's.
    """
    is_short = len(set(left_out.values())) <= MAX_REASONS
    first: dict[str, str] = {}
    clients: dict[str, list[str]] = {}
    for client, reason in left_out.items():
        kind = reason if is_short else NUMBER.sub("", reason)
        clients.setdefault(first.setdefault(kind, reason), []).append(client)
    return clients


def rejection_reason(reply: TrainReply, expected: ExpectedReply) -> str:
    """Why this reply is rejected, with the values found; "" for a valid one."""
    if reply.client not in expected.num_examples:
        return f"it was sent no message in round {expected.round}"
    if reply.round != expected.round:
        return f"it answers round {reply.round}"
    if reason := mismatch(reply.arrays, expected.arrays):
        return reason
    if reason := mismatch(reply.extra, expected.extra):
        return f"alongside the model, {reason}"
    count, declared = reply.metrics.get("num-examples"), expected.num_examples[reply.client]
    if count != declared:
        shown = "missing" if count is None else f"{count:.15g}"
        return (
            f"num-examples is {shown}, the roster says {declared}: if its data has changed, "
            "restore it or start a new run"
        )
    for name, value in sorted(reply.metrics.items()):
        if name.endswith("-accuracy") and not 0 <= value <= 1:
            return f"{name} is {value:g}, not from 0 to 1"
        if not math.isfinite(value):
            return f"{name} is {value:g}, not finite"
        if abs(value) > MAX_METRIC:
            return f"{name} is {value:g}, beyond {MAX_METRIC:g}"
        if name in ("seconds", "cpu-seconds") and value < 0:
            return f"{name} is {value:g}, less than 0"
    return ""


def implausible(reply: TrainReply, expected: ExpectedReply, half: Half) -> str:
    """Why the values of a well-formed reply are rejected; "" for plausible values."""
    if expected.extra and (reason := half.extra_reason(reply)):
        return reason
    beside = half.beside_model(reply) if expected.extra else {}
    largest = max(expected.limits.values(), default=MAX_VALUE_RATIO)
    for arrays in (reply.arrays, beside):  # may have names in common
        limits = dict.fromkeys(arrays, largest) | dict(expected.limits)
        if reason := out_of_range(arrays, limits):
            return reason
    return far_counter(reply.arrays, expected.sent)


def far_counter(arrays: Arrays, sent: Arrays) -> str:
    """The integer array that is more than MAX_COUNTER_CHANGE away from what was sent; "" for none.

    With a bound on the value alone, one client could raise the average to that bound, and every
    other reply would then exceed it.
    """
    for name, array in arrays.items():
        if name in sent and array.numel() and not array.is_floating_point():
            change = int((array.long() - sent[name].long()).abs().max())
            if change > MAX_COUNTER_CHANGE:
                return (
                    f"array {name!r} differs by {change} from what was sent: the bound on integers "
                    f"is {MAX_COUNTER_CHANGE}"
                )
    return ""


def norm(update: Arrays) -> float:
    """The Euclidean norm over all of these arrays, summed in double precision."""
    return math.sqrt(sum(float(array.double().square().sum()) for array in update.values()))


def beyond_bound(
    norms: Mapping[str, float], rounds: RoundsConfig, reference: NormReference
) -> dict[str, str]:
    """The clients whose update has a larger norm than `norm-bound` allows, each with the reason.

    norms: of the round's updates that are valid otherwise, by client.
    """
    if rounds.norm_bound == "off" or not norms:
        return {}
    bound, source = rounds.norm_bound_value, "norm-bound-value"
    if rounds.norm_bound == "median":
        median = reference.of_round(norms.values())
        if median is None:
            return {}
        source = f"{bound:g} times the round's median of {median:.4g}"
        bound *= median
    return {
        client: f"its update's norm is {length:.4g}, more than {bound:.4g} ({source})"
        for client, length in norms.items()
        if length > bound
    }


def opposed(updates: Mapping[str, Arrays], outliers: Collection[str]) -> dict[str, str]:
    """The outliers whose update points against those of most others, each with the reason.

    That is, the median of the cosines is below 0. Empty if fewer than two clients are not outliers.
    """
    others = {c: u for c, u in updates.items() if c not in outliers}
    if len(others) < MIN_REPLIES_FOR_MEDIAN - 1:
        return {}
    found = {}
    for client in sorted(updates.keys() - others.keys()):
        cosine = statistics.median_high(cosine_of(updates[client], u) for u in others.values())
        if cosine < 0:
            found[client] = (
                f"its update points against the others' (median cosine {cosine:.2g}), and it "
                f"declares more than {OUTLIER} times their samples"
            )
    return found


def cosine_of(a: Arrays, b: Arrays) -> float:
    """The cosine of the angle between two updates, in double precision; 0 if one is 0."""
    dot = sum(float((a[name].double() * b[name].double()).sum()) for name in a)
    return dot / (norm(a) * norm(b) or 1.0)


def beyond_median(norms: Mapping[str, float]) -> dict[str, str]:
    """Clients whose arrays alongside the model have more than 10 times the cohort's median norm.

    Empty with fewer than three norms above 0, as for `norm-bound`.
    """
    lengths = [length for length in norms.values() if length > 0]
    if len(lengths) < MIN_REPLIES_FOR_MEDIAN:
        return {}
    bound = EXTRA_FACTOR * statistics.median_low(lengths)
    return {
        client: f"the norm of its arrays alongside the model is {length:.4g}, more than "
        f"{bound:.4g} ({EXTRA_FACTOR:g} times the round's median)"
        for client, length in norms.items()
        if length > bound
    }
