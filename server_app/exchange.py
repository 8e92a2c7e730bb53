"""Sends messages and collects replies until a deadline, polling faster than Flower does.

Flower's own `send_and_receive` polls every 3 seconds in deployment, gives up on a restarted
SuperNode, and loses track of who was asked when the SuperLink replies in a client's place.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.serverapp import Grid

from protocol.flower_compat import NO_REPLY, NODE_UNAVAILABLE, UNDELIVERED, assign_source_node

log = logging.getLogger("keel.server")
MIN_POLL_S, MAX_POLL_S, POLL_GROWTH = 0.02, 0.5, 1.2
RETURN_TIMEOUT_S = 30.0  # for a SuperNode that went away to return
LOOK_EVERY_S = 1.0  # interval of looking for it
MAX_LATE_ASKS = 5  # a reply that never came is forgotten after this many further asks

# node: the node that its client, which went away, is connected as now
Returned = Callable[[list[int]], Mapping[int, int]]


@dataclass
class Exchange:
    """Asks the nodes of one grid, one round after the other.

    name: the client behind a node, for the log. returned: finds the nodes of clients that are
    connected again; None: a node that is gone stays away (simulation). resent: is told of a node
    whose message is about to be sent again.
    """

    grid: Grid
    name: Callable[[int], str] = "on node {}".format
    returned: Returned | None = None
    late: dict[str, tuple[str, int]] = field(default_factory=dict)  # id: description, asks since
    arrived_late: list[str] = field(default_factory=list)  # descriptions, see `take_late`
    resent: Callable[[int], None] | None = None

    def ask(
        self, messages: Iterable[Message], timeout_s: float, what: str, key: str = "round-timeout"
    ) -> list[Message]:
        """One reply for each message, in their order; an error where none came in time.

        Each reply's source is the current node of its client, whoever replied in its place. A
        message to a node that goes away is sent again if its client returns within 30 seconds, or
        later while others are still awaited.
        what: description for the log. key: the config key that `timeout_s` comes from.
        """
        deadline = time.monotonic() + timeout_s
        self.drain()
        asked = {message.metadata.dst_node_id: message for message in messages}
        replies: dict[int, Message] = {}
        away: dict[int, tuple[float, Message]] = {}  # node: (when to give up, the error then)
        waiting: dict[str, int] = {}  # message id: the node whose reply it is
        node_now = {node: node for node in asked}  # a restarted SuperNode may have another

        def note_gone(node: int, error: Message) -> None:
            if self.returned is None:
                replies[node] = error
                return
            away.setdefault(node, (time.monotonic() + RETURN_TIMEOUT_S, error))
            log.warning("%s: client %s is not connected", what, self.name(node))

        for message in self.push(list(asked.values()), waiting):
            node = message.metadata.dst_node_id
            note_gone(node, failure(message, "its SuperNode is not connected"))
        poll_s, looked_at = MIN_POLL_S, 0.0
        while (waiting or away) and time.monotonic() < deadline:
            arrived = list(self.grid.pull_messages(list(waiting))) if waiting else []
            for reply in arrived:
                source = waiting.pop(reply.metadata.reply_to_message_id, None)
                if source is None or source in replies:
                    continue  # a second reply, to a message that was sent twice
                if reply.has_error() and reply.error.code == NODE_UNAVAILABLE:
                    reason = reply.error.reason or "its SuperNode went away"
                    note_gone(source, failure(asked[source], reason, reply.error.code))
                else:
                    replies[source] = reply
            if away and time.monotonic() - looked_at >= LOOK_EVERY_S:
                looked_at = time.monotonic()
                node_now |= self.send_again(asked, away, waiting, deadline, what)
            for node, (until, error) in list(away.items()):
                if time.monotonic() > until and not waiting:
                    replies[node] = error
                    del away[node]
            if waiting or away:
                poll_s = MIN_POLL_S if arrived else min(poll_s * POLL_GROWTH, MAX_POLL_S)
                time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        for message_id, node in waiting.items():
            self.late[message_id] = (f"client {self.name(node)}'s reply to {what}", 0)
        silence = f"no answer within {key} = {timeout_s:g} seconds"
        for node, message in asked.items():
            if node not in replies:
                replies[node] = away[node][1] if node in away else failure(message, silence)
            assign_source_node(replies[node], node_now[node])
        return [replies[node] for node in asked]

    def push(self, messages: list[Message], waiting: dict[str, int]) -> list[Message]:
        """Send messages and note their nodes in `waiting`; returns those that the grid refused."""
        sent_ids = set(self.grid.push_messages(messages)) if messages else set()
        sent = [m for m in messages if m.metadata.message_id in sent_ids]
        waiting.update({m.metadata.message_id: m.metadata.dst_node_id for m in sent})
        return [m for m in messages if m.metadata.message_id not in sent_ids]

    def send_again(
        self,
        asked: Mapping[int, Message],
        away: dict[int, tuple[float, Message]],
        waiting: dict[str, int],
        deadline: float,
        what: str,
    ) -> dict[int, int]:
        """Send to clients that are connected again; the current node of each."""
        assert self.returned is not None
        back: dict[int, int] = {}
        for node, new in self.returned(list(away)).items():
            message = asked[node]
            again = Message(
                message.content,
                dst_node_id=new,
                message_type=message.metadata.message_type,
                ttl=max(1.0, deadline - time.monotonic()),
            )
            sent: dict[str, int] = {}
            if self.resent:
                self.resent(node)
            if not self.push([again], sent):
                log.info("%s: client %s is connected again and asked again", what, self.name(node))
                waiting.update(dict.fromkeys(sent, node))
                del away[node]
                back[node] = new
        return back

    def drain(self) -> None:
        """Discard replies that came after their deadline, and log whose they were."""
        self.late = {i: (text, n + 1) for i, (text, n) in self.late.items() if n < MAX_LATE_ASKS}
        for reply in self.grid.pull_messages(list(self.late)) if self.late else []:
            text, _ = self.late.pop(reply.metadata.reply_to_message_id, ("", 0))
            if text and not (reply.has_error() and reply.error.code in UNDELIVERED):
                log.warning("%s came too late and is not used", text)
                self.arrived_late.append(text)

    def take_late(self) -> list[str]:
        """Descriptions of the replies that came too late since the last call."""
        texts, self.arrived_late = self.arrived_late, []
        return texts


def failure(message: Message, reason: str, code: int = NO_REPLY) -> Message:
    """An error reply to `message`."""
    return Message(Error(code, reason), reply_to=message)
