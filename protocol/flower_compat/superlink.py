"""`flower-superlink` that delivers a message again if it did not arrive.

Replaces: `message_handler.pull_messages`. Why: Flower 1.39 counts a message as delivered when it
answers the SuperNode's request. If that answer is lost (a cut cable, a killed SuperLink), the round
waits for its whole timeout. Public way: none.

A SuperNode handles one message at a time and confirms it on arrival, which removes the message from
the object store. A SuperNode that asks for messages while one delivered to it is still in the store
has therefore not received that one: it is delivered again, at most three times (and again after a
restart), while its run is running and all its arrays are in the store. Needs `--database`: with any
other state, this is Flower's SuperLink.
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
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from flwr.superlink.cli.flower_superlink import flower_superlink
from sqlalchemy import exists, select, update
from sqlalchemy.exc import SQLAlchemyError

from protocol.flower_compat import FlowerChanged, replace

log = logging.getLogger("keel.superlink")
max_redeliveries = 3  # of one message: one that never arrives whole must not block its node
pull_messages = message_handler.pull_messages


@dataclass
class Redelivery:
    """Makes undelivered messages new again. All of its memory could be read from the database.

    idle: nodes that have answered everything and were sent nothing since; most requests are theirs.
    counts: redeliveries of each message that its node has not answered yet, by node.
    """

    idle: set[int] = field(default_factory=set)
    counts: dict[int, dict[str, int]] = field(default_factory=dict)

    def pull_messages(
        self, request: PullMessagesRequest, state: LinkState, store: ObjectStore
    ) -> PullMessagesResponse:
        """As Flower's, after messages that did not reach this node were made new again."""
        node = request.node.node_id
        if isinstance(state, SqlLinkState) and node not in self.idle:
            self.idle.add(node)  # first: the same node's next request may already be under way
            try:
                self.renew(node, state, store)
            except SQLAlchemyError as error:  # the node's next request tries again
                self.idle.discard(node)
                log.warning("looking for undelivered messages failed: %s", error)
        try:
            response = pull_messages(request=request, state=state, store=store)
        except BaseException:  # it may have marked a message as delivered already
            self.idle.discard(node)
            raise
        if response.messages_list:
            self.idle.discard(node)
        return response

    def renew(self, node: int, state: SqlLinkState, store: ObjectStore) -> None:
        """Mark as undelivered what was sent to this node and has not arrived."""
        runs = unanswered(node, state)
        if runs:
            self.idle.discard(node)
        before = self.counts.pop(node, {})
        counts = {message: before[message] for message in runs if message in before}
        for message, run in runs.items():
            is_running = state.get_run_status({run})[run].status == Status.RUNNING
            is_spent = counts.get(message, 0) == max_redeliveries
            if not is_running or is_spent or not is_complete(message, store):
                continue
            log.warning("message %s did not reach node %d: delivering it again", message, node)
            counts[message] = counts.get(message, 0) + 1
            with state.session() as session:
                is_this = MessageIns.message_id == message
                session.execute(update(MessageIns).where(is_this).values(delivered_at=""))
        if counts:
            self.counts[node] = counts


def unanswered(node: int, state: SqlLinkState) -> dict[str, int]:
    """Messages delivered to this node, not expired and not answered: message id to run id."""
    is_answered = exists().where(MessageRes.reply_to_message_id == MessageIns.message_id)
    query = select(MessageIns.message_id, MessageIns.run_id).where(
        MessageIns.dst_node_id == uint64_to_int64(node),
        MessageIns.delivered_at != "",
        MessageIns.created_at + MessageIns.ttl > time.time(),
        ~is_answered,
    )
    with state.session() as session:
        rows = session.execute(query).all()
    return {message: int64_to_uint64(run) for message, run in rows if message and run}


def is_complete(message: str, store: ObjectStore) -> bool:
    """Whether the message with this id and everything in it are in the store.

    A message still being sent, or whose sender was killed, is incomplete; one that its receiver has
    confirmed is gone.
    """
    try:
        tree = store.get_object_tree(message)
    except NoObjectInStoreError:
        return False
    return all(store.get(each.object_id) for each in iterate_object_tree(tree))


def main() -> None:
    """As `flower-superlink`, with the same options."""
    if vars(fleet_servicer).get("message_handler") is not message_handler:
        sys.exit(f"error: {FlowerChanged('fleet_servicer.message_handler')}")
    replace(message_handler, "pull_messages", Redelivery().pull_messages, pull_messages)
    flower_superlink()
