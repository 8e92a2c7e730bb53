"""Update validation: which replies are aggregated. One bad update must not spoil the model.

Rejects what is broken or grossly out of line. `strategies.aggregation` tolerates malicious clients
that stay within these bounds. A reply is rejected, with the reason, by the first rule that it
breaks:

    round        the one that was asked
    arrays       names, shapes and dtypes as expected; all values finite
    extra        the same, alongside the model, and what the server half itself checks
    num-examples the client's roster entry's
    metrics      finite, at most float32's largest; accuracies from 0 to 1, seconds at least 0
    values       at most 10,000 times the largest that was sent in this array, or 10,000; no
                 negative variances or counts; integers within 2^40, and 2^24 of what was sent
    norm-bound   the update's norm within `norm-bound`; with it, the norm of what is alongside the
                 model within 10 times the round's median

`rejection_reason` has all but the last: it judges a reply alone, `beyond_norms` a round's replies.
`RoundReplies` applies them to one round, as replies come, and reports who was left out and why.
"""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from flwr.app import Message

from flower_adapter import NO_REPLY
from protocol.arrays import Arrays, extremes, mismatch, out_of_range
from protocol.config_keys import PrivacyConfig, RoundsConfig
from protocol.messages import (
    RESET_NEEDED,
    RosterEntry,
    TrainReply,
    error_reason,
    payload_bytes,
    read_reply,
)
from protocol.privacy import noise_sigma
from protocol.text import in_one_line, num_of, shortened

log = logging.getLogger("keel.server")
MIN_REPLIES_FOR_MEDIAN = 3  # with an update that is not 0
EXTRA_FACTOR = 10.0  # times the cohort's median norm of the arrays alongside the model
MAX_VALUE_RATIO = 1e4  # an array's largest value in a reply over what was sent, or over 1
MAX_COUNTER_CHANGE = 2**24  # of an integer array from what was sent: more steps than any round has
# the largest float32 loss; means of such values stay finite
MAX_METRIC = torch.finfo(torch.float32).max
RECORD_BYTES, ARRAY_BYTES = 2**20, 2**10  # allowed on top of the arrays' data: in all, per array
MAX_REASONS = 5  # in the error of a round with too few replies


@dataclass(frozen=True)
class ExpectedReply:
    """What a valid reply contains.

    arrays, extra: arrays with the expected names, shapes and dtypes. num_examples: by client of the
    cohort, as in the roster. limits: the largest magnitude of a value, by array. sent: the arrays
    that the clients start from. checked_extra: the server half's function.
    """

    round: int
    arrays: Arrays
    extra: Arrays
    num_examples: Mapping[str, int]
    limits: Mapping[str, float] = field(default_factory=dict)
    sent: Arrays = field(default_factory=dict)
    checked_extra: Callable[[TrainReply], Arrays] = lambda reply: reply.extra

    @property
    def largest(self) -> float:
        """The largest magnitude of a value alongside the model: that of any array."""
        return max(self.limits.values(), default=MAX_VALUE_RATIO)

    @property
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


def rejection_reason(reply: TrainReply, expected: ExpectedReply) -> str:
    """Why this reply is rejected, by the rules above, with the values found; "" for a valid one."""
    if reply.round != expected.round:
        return f"it answers round {reply.round}"
    if reason := mismatch(reply.arrays, expected.arrays):
        return reason
    if reason := mismatch(reply.extra, expected.extra):
        return f"alongside the model, {reason}"
    if reason := metrics_reason(reply, expected.num_examples[reply.client]):
        return reason
    try:
        extra = expected.checked_extra(reply) if expected.extra else {}
    except ValueError as error:
        return str(error)
    return (
        out_of_range(reply.arrays, expected.limits)
        or out_of_range(extra, dict.fromkeys(extra, expected.largest))
        or far_counter(reply.arrays, expected.sent)
    )


def metrics_reason(reply: TrainReply, num_examples: int) -> str:
    """Why the reply's metrics are rejected; "" if they are not."""
    count = reply.metrics.get("num-examples")
    if count != num_examples:
        shown = "missing" if count is None else f"{count:.15g}"
        return (
            f"num-examples is {shown}, the roster says {num_examples}: if its data has changed, "
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


# --- norm-bound -------------------------------------------------------------------------------


class NormReference:
    """The norm that `norm-bound = "median"` multiplies: the median of the round's norms above 0.

    It falls by at most half per round, so that no cohort can bring it near 0 at once.
    """

    def __init__(self) -> None:
        self.value = 0.0  # of the last round
        self.has_warned = False

    def of_round(self, norms: Iterable[float]) -> float | None:
        """This round's reference; None, with a warning once a run, for fewer than three norms."""
        median = median_above_zero(norms)
        if median is None:
            if not self.has_warned:
                log.warning(
                    "norm-bound = 'median' is not applied: it needs at least %d replies that "
                    "change something",
                    MIN_REPLIES_FOR_MEDIAN,
                )
            self.has_warned = True
            return None
        self.value = max(median, self.value / 2)
        return self.value


def median_above_zero(norms: Iterable[float]) -> float | None:
    """The median of the norms above 0; None for fewer than three.

    Of two middle values the lower one: their mean would follow the larger one.
    """
    lengths = [length for length in norms if length > 0]
    return statistics.median_low(lengths) if len(lengths) >= MIN_REPLIES_FOR_MEDIAN else None


def norm(update: Arrays) -> float:
    """The Euclidean norm over all of these arrays, summed in double precision."""
    return math.sqrt(sum(float(array.double().square().sum()) for array in update.values()))


def beyond_norms(
    replies: Mapping[str, TrainReply],
    update_of: Callable[[TrainReply], Arrays],
    checked_extra: Callable[[TrainReply], Arrays],
    rounds: RoundsConfig,
    reference: NormReference,
) -> dict[str, str]:
    """The clients that the rules of `norm-bound` reject, each with the reason.

    What is alongside the model is judged first: the bound on updates and its reference are of the
    replies that are valid otherwise.
    """
    if rounds.norm_bound == "off":
        return {}
    beyond = beyond_median({c: norm(checked_extra(reply)) for c, reply in replies.items()})
    norms = {c: norm(update_of(reply)) for c, reply in replies.items() if c not in beyond}
    return beyond | beyond_bound(norms, rounds, reference)


def beyond_bound(
    norms: Mapping[str, float], rounds: RoundsConfig, reference: NormReference
) -> dict[str, str]:
    """The clients whose update has a larger norm than `norm-bound` allows, each with the reason."""
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


def beyond_median(norms: Mapping[str, float]) -> dict[str, str]:
    """Clients whose arrays alongside the model have more than 10 times the cohort's median norm.

    Empty with fewer than three norms above 0, as for `norm-bound`.
    """
    median = median_above_zero(norms.values())
    if median is None:
        return {}
    bound = EXTRA_FACTOR * median
    return {
        client: f"the norm of its arrays alongside the model is {length:.4g}, more than "
        f"{bound:.4g} ({EXTRA_FACTOR:g} times the round's median)"
        for client, length in norms.items()
        if length > bound
    }


class TooFewRepliesError(RuntimeError):
    """A round had fewer accepted replies than `min-replies`."""


@dataclass
class RoundReport:
    """The replies to one round's messages, sorted into accepted ones and others.

    accepted: replies, in the order of the clients' names. left_out: client to reason, for errors,
    clients that did not reply, and rejected replies; rejected: the number of the latter.
    silent: clients that gave no answer. reset_needed: clients whose state is lost, or ahead of the
    server. directions: of each accepted update, where measured, as `Directions.of` returns.
    """

    accepted: list[TrainReply] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    rejected: int = 0
    silent: set[str] = field(default_factory=set)
    reset_needed: list[str] = field(default_factory=list)
    bytes_up: int = 0
    directions: dict[str, dict[str, float]] = field(default_factory=dict)

    def check_enough(self, server_round: int, rounds: RoundsConfig) -> None:
        """TooFewRepliesError with the reasons if fewer replies are accepted than the run needs."""
        if len(self.accepted) >= rounds.fewest_replies:
            return
        reasons = left_out_lines(self.left_out)
        if len(reasons) > MAX_REASONS:
            reasons[MAX_REASONS:] = [f"and {len(reasons) - MAX_REASONS} more: see run.log"]
        raise TooFewRepliesError(
            f"round {server_round}: "
            f"{num_of('accepted reply', self.accepted, 'accepted replies')}, "
            f"{rounds.fewest_replies_text}. {'; '.join(reasons)}"
        )


@dataclass
class RoundReplies:
    """Validates the replies of one round, each as it comes; a client gives one.

    asked: the clients, by the node that was asked; replies carry that node.
    """

    asked: Mapping[int, RosterEntry]
    expected: ExpectedReply
    accepted: dict[str, TrainReply] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    reset_needed: set[str] = field(default_factory=set)
    bytes_up: int = 0

    def add(self, message: Message) -> TrainReply | None:
        """The reply in this message if it is accepted; else its reason is noted."""
        client = self.asked[message.metadata.src_node_id].client
        if message.has_error():
            self.failed[client] = error_reason(message.error)
            if message.error.code == NO_REPLY:
                self.silent.add(client)
            if message.error.code == RESET_NEEDED:
                self.reset_needed.add(client)
            return None
        try:
            self.bytes_up += payload_bytes(message)
            reply = replace(read_reply(message, self.expected.max_bytes), client=client)
        except Exception as error:  # a client's bytes may raise anything
            self.rejected[client] = in_one_line(error)
            return None
        if reason := rejection_reason(reply, self.expected):
            self.rejected[client] = in_one_line(reason)
            return None
        # in the order of the arrays sent: Krum compares by position
        arrays = {name: reply.arrays[name] for name in self.expected.arrays}
        self.accepted[client] = replace(reply, arrays=arrays)
        return self.accepted[client]

    def reject(self, reasons: Mapping[str, str]) -> None:
        """Reject replies that were accepted, by client."""
        for client, reason in reasons.items():
            del self.accepted[client]
            self.rejected[client] = reason

    def report(self) -> RoundReport:
        """All replies, sorted. The log names the first five clients left out for each reason."""
        left_out = dict(sorted((self.failed | self.rejected).items()))
        for line in left_out_lines(left_out):
            log.warning("round %d: left out %s", self.expected.round, line)
        return RoundReport(
            accepted=[self.accepted[client] for client in sorted(self.accepted)],
            left_out=left_out,
            rejected=len(self.rejected),
            silent=self.silent,
            reset_needed=sorted(self.reset_needed),
            bytes_up=self.bytes_up,
        )


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """For each reason, the clients that were left out for it and the reason."""
    clients: dict[str, list[str]] = {}
    for client, reason in left_out.items():
        clients.setdefault(reason, []).append(client)
    return [f"{shortened(names)}: {reason}" for reason, names in clients.items()]
