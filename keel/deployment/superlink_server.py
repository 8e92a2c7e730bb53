"""`flower-superlink`, with the same options, that gives a message again which did not arrive.

Flower 1.39 counts a message as delivered when it answers the SuperNode's question. An answer that
a cut cable swallows, or a kill of the SuperLink, is not given again: the round waits for its whole
timeout. But a SuperNode takes one message after the other and confirms each once it has it, which
takes the message out of the object store. One that asks again while a message for it was delivered
and is still there has not got it. It is given it again, three times at most (and again after a
restart), as long as its run goes on and all its arrays are there. Only with `--database`: other
state is left as it is.
"""

import logging
import sys
import time
from dataclasses import dataclass, field

from flwr.common.constant import Status
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse
from flwr.server.superlink.fleet.grpc_rere import fleet_servicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from flwr.superlink.cli.flower_superlink import flower_superlink
from sqlalchemy import exists, select, update
from sqlalchemy.exc import SQLAlchemyError

from keel.deployment.flower import is_whole, replace

log = logging.getLogger("keel.superlink")
most = 3  # times that a message is given again; one that never arrives whole would block its node
pull = message_handler.pull_messages


@dataclass
class Deliveries:
    """What is known of the nodes' messages, all of which the database could say again.

    clear: nodes that were given nothing since they had answered everything; most questions are
    theirs. times: how often a node was given a message again that it has not answered yet.
    """

    clear: set[int] = field(default_factory=set)
    times: dict[int, dict[str, int]] = field(default_factory=dict)

    def pull_messages(
        self, request: PullMessagesRequest, state: LinkState, store: ObjectStore
    ) -> PullMessagesResponse:
        """As Flower's, after what the node has not got was made new again."""
        node = request.node.node_id
        if isinstance(state, SqlLinkState) and node not in self.clear:
            self.clear.add(node)  # before it is looked: another question may be under way
            try:
                self.renew(node, state, store)
            except SQLAlchemyError as error:  # it is looked for again with the next question
                self.clear.discard(node)
                log.warning("messages that did not arrive: %s", error)
        try:
            response = pull(request=request, state=state, store=store)
        except BaseException:  # it may have taken a message for delivered already
            self.clear.discard(node)
            raise
        if response.messages_list:
            self.clear.discard(node)
        return response

    def renew(self, node: int, state: SqlLinkState, store: ObjectStore) -> None:
        """Make those new again that the node was given and has not got."""
        runs = unanswered(node, state)
        if runs:
            self.clear.discard(node)
        before = self.times.pop(node, {})
        times = {message: before[message] for message in runs if message in before}
        for message, run in runs.items():
            is_running = state.get_run_status({run})[run].status == Status.RUNNING
            if not is_running or times.get(message, 0) == most or not is_whole(message, store):
                continue
            log.warning("node %d has not got message %s: it is given it again", node, message)
            times[message] = times.get(message, 0) + 1
            with state.session() as session:
                is_it = MessageIns.message_id == message
                session.execute(update(MessageIns).where(is_it).values(delivered_at=""))
        if times:
            self.times[node] = times


def unanswered(node: int, state: SqlLinkState) -> dict[str, int]:
    """Messages that the node was given, in time still, and has not answered; with their runs."""
    is_answered = exists().where(MessageRes.reply_to_message_id == MessageIns.message_id)
    wanted = select(MessageIns.message_id, MessageIns.run_id).where(
        MessageIns.dst_node_id == uint64_to_int64(node),
        MessageIns.delivered_at != "",
        MessageIns.created_at + MessageIns.ttl > time.time(),
        ~is_answered,
    )
    with state.session() as session:
        rows = session.execute(wanted).all()
    return {message: int64_to_uint64(run) for message, run in rows if message and run}


def main() -> None:
    """As `flower-superlink`."""
    if vars(fleet_servicer).get("message_handler") is not message_handler:
        sys.exit("error: flwr's fleet_servicer is not as in Flower 1.39: install that version")
    replace(message_handler, "pull_messages", Deliveries().pull_messages, pull)
    flower_superlink()


if __name__ == "__main__":
    main()
