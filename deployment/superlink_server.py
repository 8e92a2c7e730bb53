"""`flower-superlink`, with the same options, that gives a message again which did not arrive.

Flower 1.39 counts a message as delivered when it answers the SuperNode's question. An answer that
a cut cable or a killed SuperNode swallows is not given again: the round waits for its whole
timeout. But a SuperNode takes one message after the other and confirms each once it has it. One
that asks again without that has not got what it was given; here it is given it again, three times
at most, as long as its run goes on and all its arrays are there.
"""

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field

from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ConfirmMessageReceivedResponse
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
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

    given: dict[int, tuple[str, int]] = field(default_factory=dict)  # node: its message, the run
    times: Counter[str] = field(default_factory=Counter)  # message: how often it was given again
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pull_messages(
        self, request: PullMessagesRequest, state: LinkState, store: ObjectStore
    ) -> PullMessagesResponse:
        """As Flower's, after what the node has not got was made new again."""
        node = request.node.node_id
        with self.lock:
            message, run = self.given.pop(node, ("", 0))
            wants_it = bool(message) and self.times[message] < most
        if wants_it and isinstance(state, SqlLinkState) and is_of_use(message, run, state, store):
            log.warning("node %d has not got message %s: it is given it again", node, message)
            self.times[message] += 1
            with state.session() as session:
                is_it = MessageIns.message_id == message
                session.execute(update(MessageIns).where(is_it).values(delivered_at=""))
        response = pull(request, state, store)
        with self.lock:
            for each in response.messages_list:
                self.given[node] = each.metadata.message_id, each.metadata.run_id
        return response

    def confirm_message_received(
        self, request: ConfirmMessageReceivedRequest, state: LinkState, store: ObjectStore
    ) -> ConfirmMessageReceivedResponse:
        """As Flower's; the message has arrived."""
        with self.lock:
            if self.given.get(request.node.node_id, ("", 0))[0] == request.message_object_id:
                del self.given[request.node.node_id]
            self.times.pop(request.message_object_id, None)
        return confirm(request, state, store)


def is_of_use(message: str, run: int, state: LinkState, store: ObjectStore) -> bool:
    """Whether the run waits for an answer, and the message is whole.

    A ServerApp that is killed as it sends leaves one that is not: nobody can fetch it.
    """
    if state.get_run_status({run})[run].status != Status.RUNNING:
        return False
    try:
        tree = store.get_object_tree(message)
    except NoObjectInStoreError:
        return False
    return all(store.get(each.object_id) for each in iterate_object_tree(tree))


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
