"""`flower-superlink`, with the same options, that gives a message again which did not arrive.

Flower 1.39 counts a message as delivered when it answers the SuperNode's question. An answer that
a cut cable or a killed SuperNode swallows is not given again: the round waits for its whole
timeout. But a SuperNode takes one message after the other and confirms each once it has it. One
that asks again without that has not got what it was given; here it is given it again, three times
at most.
"""

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ConfirmMessageReceivedResponse
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store.object_store import ObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns
from flwr.superlink.cli.flower_superlink import flower_superlink
from sqlalchemy import update

from deployment.flower import replace

log = logging.getLogger("keel.superlink")
most = 3  # times that a message is given again; one that never arrives whole would block its node
pull, confirm = message_handler.pull_messages, message_handler.confirm_message_received


@dataclass
class Deliveries:
    """What each node was given and has not confirmed yet."""

    given: dict[int, str] = field(default_factory=dict)  # node: id of its message
    times: Counter[str] = field(default_factory=Counter)  # id: how often it was given again
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pull_messages(
        self, request: PullMessagesRequest, state: LinkState, store: ObjectStore
    ) -> PullMessagesResponse:
        """As Flower's, after what the node has not got was made new again."""
        node = request.node.node_id
        with self.lock:
            lost = self.given.pop(node, "")
            is_given_again = bool(lost) and self.times[lost] < most
            if is_given_again:
                self.times[lost] += 1
        if is_given_again and isinstance(state, SqlLinkState):
            log.warning("node %d has not got message %s: it is given it again", node, lost)
            with state.session() as session:
                is_it = MessageIns.message_id == lost
                session.execute(update(MessageIns).where(is_it).values(delivered_at=""))
        response = pull(request, state, store)
        with self.lock:
            for message in response.messages_list:
                self.given[node] = message.metadata.message_id
        return response

    def confirm_message_received(
        self, request: ConfirmMessageReceivedRequest, state: LinkState, store: ObjectStore
    ) -> ConfirmMessageReceivedResponse:
        """As Flower's; the message has arrived."""
        with self.lock:
            if self.given.get(request.node.node_id) == request.message_object_id:
                del self.given[request.node.node_id]
            self.times.pop(request.message_object_id, None)
        return confirm(request, state, store)


def main() -> None:
    """As `flower-superlink`."""
    deliveries = Deliveries()
    replace(message_handler, "pull_messages", deliveries.pull_messages, pull)
    replace(
        message_handler, "confirm_message_received", deliveries.confirm_message_received, confirm
    )
    flower_superlink()


if __name__ == "__main__":
    main()
