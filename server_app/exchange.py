"""Messages to some nodes and their replies, until a deadline; each message is sent again once.

Flower's own `send_and_receive` polls every 3 seconds, gives up on a restarted SuperNode, and loses
track of who was asked when the SuperLink replies in a client's place.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.serverapp import Grid

from flower_adapter import (
    CRASHED,
    NO_REPLY,
    NODE_UNAVAILABLE,
    SUPERLINK_NODE,
    NotPushedError,
    assign_source_node,
    is_too_large,
)
from protocol.messages import error_reason
from protocol.text import num_of

log = logging.getLogger("keel.server")
POLL_S, MAX_POLL_S, POLL_GROWTH = 0.1, 0.5, 1.2
SILENCE_S = 5.0  # the SuperLink was away if it took longer to answer
RETURN_S = 30.0  # for a client that went away to return
LOOK_EVERY_S = 1.0  # between two looks for it
NOT_CONNECTED = "its SuperNode is not connected"


@dataclass
class Exchange:
    """Messages under way: whose replies are awaited, and what is to be sent again, once.

    messages: by the node that is asked. connected: of these nodes, those whose client is connected,
    with its current node. name: the client behind a node, for the log.
    waiting: message id to the node asked. again: nodes asked whose message is sent again once their
    client is connected, with the time at which it is given up and the reason.
    """

    grid: Grid
    what: str
    messages: Mapping[int, Message]
    on_reply: Callable[[Message], None]
    connected: Callable[[list[int]], Mapping[int, int]]
    name: Callable[[int], str]
    before_resend: Callable[[int], None] = lambda node: None
    waiting: dict[str, int] = field(default_factory=dict)
    again: dict[int, tuple[float, str]] = field(default_factory=dict)
    resent: set[int] = field(default_factory=set)
    looked_at: float = -math.inf

    def run(self, timeout_s: float, key: str) -> set[int]:
        """Ask, and wait for the replies; returns the nodes that gave none in time.

        The time in which the SuperLink is away does not count. key: the name of the limit.
        """
        self.push(self.messages)
        deadline, poll_s = time.monotonic() + timeout_s, POLL_S
        while (self.waiting or self.again) and time.monotonic() < deadline:
            started = time.monotonic()
            replies = list(self.grid.pull_messages([*self.waiting])) if self.waiting else []
            if (taken_s := time.monotonic() - started) > SILENCE_S:
                deadline += taken_s
            for reply in replies:
                self.take(reply)
            self.look()
            poll_s = POLL_S if replies else min(poll_s * POLL_GROWTH, MAX_POLL_S)
            if self.waiting or self.again:
                time.sleep(max(0.0, min(poll_s, deadline - time.monotonic())))
        silent = set(self.waiting.values())
        for node in silent:
            self.fail(node, f"no answer within {key} = {num_of('second', timeout_s)}")
        for node, (_, reason) in self.again.items():
            self.fail(node, reason)
        return silent

    def push(self, messages: Mapping[int, Message]) -> None:
        """Send messages, by the node that was asked first."""
        try:
            sent = set(self.grid.push_messages(list(messages.values()))) if messages else set()
        except NotPushedError as error:  # the SuperLink was away for too long meanwhile
            log.warning("%s: messages were not sent: %s", self.what, error)
            sent = set()
        for node, message in messages.items():
            if message.metadata.message_id in sent:
                self.waiting[message.metadata.message_id] = node
            else:
                self.send_again(node, NOT_CONNECTED)

    def take(self, reply: Message) -> None:
        """Hand on a reply, or note that its message is to be sent again."""
        node = self.waiting.pop(reply.metadata.reply_to_message_id, None)
        if node is None:
            return
        code = reply.error.code if reply.has_error() else None
        if is_too_large(reply):
            self.fail(node, "the reply has more bytes than its bound")
        elif code == NODE_UNAVAILABLE and reply.metadata.src_node_id == SUPERLINK_NODE:
            self.send_again(node, NOT_CONNECTED)
        elif code in CRASHED and node not in self.resent:
            self.send_again(node, error_reason(reply.error))
        else:
            self.settle(node, reply)

    def send_again(self, node: int, reason: str) -> None:
        """Let `look` send a message again; one that was is given up."""
        if node in self.resent:
            self.fail(node, reason)
            return
        log.warning("%s: client %s: %s", self.what, self.name(node), reason)
        self.again[node] = time.monotonic() + RETURN_S, reason

    def look(self) -> None:
        """Send messages again to clients that are connected; give up those that stay away.

        While other clients are awaited, none is given up.
        """
        if not self.again or time.monotonic() < self.looked_at + LOOK_EVERY_S:
            return
        self.looked_at = time.monotonic()
        to_send: dict[int, Message] = {}
        for node, current in self.connected(list(self.again)).items():
            del self.again[node]
            self.resent.add(node)
            self.before_resend(node)
            log.info("%s: client %s is asked again", self.what, self.name(node))
            content, about = self.messages[node].content, self.messages[node].metadata
            to_send[node] = Message(content, current, about.message_type, ttl=about.ttl)
        self.push(to_send)
        for node, (until, reason) in list(self.again.items()):
            if time.monotonic() > until and not self.waiting:
                del self.again[node]
                self.fail(node, reason)

    def fail(self, node: int, reason: str) -> None:
        """Give an error in place of a reply."""
        self.settle(node, Message(Error(NO_REPLY, reason), reply_to=self.messages[node]))

    def settle(self, node: int, reply: Message) -> None:
        """Hand on the reply of the node that was asked, whoever gave it."""
        assign_source_node(reply, node)
        self.on_reply(reply)
