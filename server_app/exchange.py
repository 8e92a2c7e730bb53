"""Messages out, replies in: with a deadline, and polled often enough that nobody waits for us.

Flower's own `send_and_receive` polls every 3 seconds in deployment, takes a SuperNode that was
restarted for lost, and forgets who was asked when the SuperLink answers in a client's place.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

log = logging.getLogger("keel.server")
fastest_poll_s, slowest_poll_s, poll_growth = 0.02, 0.5, 1.2  # a fifth of the wait so far
return_s = 30.0  # how long a SuperNode that went away may take to come back
look_s = 1.0  # how often one looks for it
remembered = 5  # asks after which a reply that never came is forgotten
no_answer = ErrorCode.UNKNOWN  # of a reply that never came
never_delivered = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)

# the nodes that clients which went away are connected by again, by the node they had
Returned = Callable[[list[int]], Mapping[int, int]]


@dataclass
class Exchange:
    """Asks the nodes of one grid, one round after the other.

    name: of the client behind a node, for the log. returned: tells which nodes came back, and
    as which; None: a node that is gone stays so (simulation).
    """

    grid: Grid
    name: Callable[[int], str] = "on node {}".format
    returned: Returned | None = None
    late: dict[str, tuple[str, int]] = field(default_factory=dict)  # id: words, asks since then
    came_late: list[str] = field(default_factory=list)  # words, see `take_late`

    def ask(
        self, messages: Iterable[Message], timeout_s: float, what: str, key: str = "round-timeout"
    ) -> list[Message]:
        """One reply for each message, in their order: an error where none came in time.

        Each reply's source is the node that the client has now, whoever answered in its place. A
        message to a node that goes away is sent again when its client is back within 30 seconds.
        what: is being asked, for the log; key: whose value `timeout_s` is.
        """
        deadline = time.monotonic() + timeout_s
        self.drain()
        asked = {message.metadata.dst_node_id: message for message in messages}
        replies: dict[int, Message] = {}
        away: dict[int, tuple[float, Message]] = {}  # node: until when to wait, the error if not
        waiting: dict[str, int] = {}  # message id: the node whose answer it is
        now_at = {node: node for node in asked}  # after a restart it may be another

        def gone(node: int, error: Message) -> None:
            if self.returned is None:
                replies[node] = error
                return
            away.setdefault(node, (time.monotonic() + return_s, error))
            log.warning("%s: client %s is not connected", what, self.name(node))

        for message in self.push(list(asked.values()), waiting):
            node = message.metadata.dst_node_id
            gone(node, failure(message, "its SuperNode is not connected"))
        poll_s, looked = fastest_poll_s, 0.0
        while (waiting or away) and time.monotonic() < deadline:
            arrived = list(self.grid.pull_messages(list(waiting))) if waiting else []
            for reply in arrived:
                node_ = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node_ is None or node_ in replies:
                    continue  # the answer to the message that was sent a second time
                if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                    gone(
                        node_,
                        failure(
                            asked[node_], reply.error.reason or "it went away", reply.error.code
                        ),
                    )
                else:
                    replies[node_] = reply
            if away and time.monotonic() - looked >= look_s:
                looked = time.monotonic()
                for node, new in self.send_again(asked, away, waiting, deadline, what).items():
                    now_at[node] = new
            for node, (until, error) in list(away.items()):
                if time.monotonic() > until and not waiting:  # as long as others take, it may too
                    replies[node] = error
                    del away[node]
            if waiting or away:
                poll_s = fastest_poll_s if arrived else min(poll_s * poll_growth, slowest_poll_s)
                time.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
        for message_id, node in waiting.items():
            words = f"client {self.name(node)}'s reply to {what}"
            self.late[message_id] = (words, 0)
        silence = f"no answer within {key} = {timeout_s:g} seconds"
        for node, message in asked.items():
            if node not in replies:
                replies[node] = away[node][1] if node in away else failure(message, silence)
            replies[node].metadata.__dict__["_src_node_id"] = now_at[node]
        return [replies[node] for node in asked]

    def push(self, messages: list[Message], waiting: dict[str, int]) -> list[Message]:
        """Send; note who is waited for. The messages that the grid did not take."""
        taken = set(self.grid.push_messages(messages)) if messages else set()
        sent = [m for m in messages if m.metadata.message_id in taken]
        waiting.update({m.metadata.message_id: m.metadata.dst_node_id for m in sent})
        return [m for m in messages if m.metadata.message_id not in taken]

    def send_again(
        self,
        asked: Mapping[int, Message],
        away: dict[int, tuple[float, Message]],
        waiting: dict[str, int],
        deadline: float,
        what: str,
    ) -> dict[int, int]:
        """Ask the clients that are connected again anew; the node that each has now."""
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
            if not self.push([again], sent):
                log.info("%s: client %s is back and asked again", what, self.name(node))
                waiting.update(dict.fromkeys(sent, node))
                del away[node]
                back[node] = new
        return back

    def drain(self) -> None:
        """Take what came after its deadline out of the way, and say whose it was."""
        self.late = {i: (words, n + 1) for i, (words, n) in self.late.items() if n < remembered}
        for reply in self.grid.pull_messages(list(self.late)) if self.late else []:
            words, _ = self.late.pop(reply.metadata.reply_to_message_id, ("", 0))
            if words and not (reply.has_error() and reply.error.code in never_delivered):
                log.warning("%s came too late and is not used", words)
                self.came_late.append(words)

    def take_late(self) -> list[str]:
        """The replies that came too late since this was asked last: whose, and to what."""
        words, self.came_late = self.came_late, []
        return words


def failure(message: Message, reason: str, code: int = no_answer) -> Message:
    """The reply to `message` that says why there is none."""
    return Message(Error(code, reason), reply_to=message)
