"""The replies of one round: accepted, failed or rejected."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flwr.app import Message

from protocol.config_keys import RoundsConfig
from protocol.messages import (
    RESET_NEEDED,
    RosterEntry,
    TrainReply,
    error_reason,
    payload_bytes,
    read_reply,
)
from protocol.text import in_one_line, num_of, shortened
from strategies.validation import ExpectedReply, rejection_reason

log = logging.getLogger("keel.server")
MAX_REASONS = 5  # in the error of a round with too few replies


class TooFewRepliesError(RuntimeError):
    """A round had fewer accepted replies than `min-replies`."""


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
    reset_needed: set[str] = field(default_factory=set)
    bytes_up: int = 0

    def add(self, message: Message) -> TrainReply | None:
        """The reply in this message if it is accepted; else its reason is noted."""
        client = self.asked[message.metadata.src_node_id].client
        if message.has_error():
            self.failed[client] = error_reason(message.error)
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
            reset_needed=sorted(self.reset_needed),
            bytes_up=self.bytes_up,
        )


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """For each reason, the clients that were left out for it and the reason."""
    clients: dict[str, list[str]] = {}
    for client, reason in left_out.items():
        clients.setdefault(reason, []).append(client)
    return [f"{shortened(names)}: {reason}" for reason, names in clients.items()]
