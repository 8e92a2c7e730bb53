"""`flower-superlink` that loses no message and no run to a lost answer or its own absence.

Each function and class that replaces one of Flower's says which, and why; `main` puts them in
place. Public way for any of them: none. They need `--database`: with any other state, this is
Flower's SuperLink.
"""

import logging
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from flwr.app import Message
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    HEARTBEAT_PATIENCE,
    SUPERLINK_NODE_ID,
    Status,
)
from flwr.proto.fleet_pb2 import (
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ConfirmMessageReceivedResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.grpc_rere import fleet_servicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkState, linkstate_factory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.server.utils.validator import validate_message
from flwr.supercore.constant import NodeStatus
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.date import now
from flwr.supercore.grpc import GRPC_MAX_MESSAGE_LENGTH
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.state.schema.corestate_models import Task as TaskRow
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Node
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from flwr.superlink.cli.flower_superlink import flower_superlink
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import exists, select, update

from flower_adapter import MAX_OBJECT_BYTES, FlowerChanged, replace
from flower_adapter.objects import is_complete

log = logging.getLogger("keel.superlink")
max_redeliveries = 3  # of one message: one that never arrives whole must not block its node
patience_s = float(HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL)
# Replaces `HEARTBEAT_PATIENCE` of tasks: heartbeats that a ServerApp may miss. Why: Flower ends the
# run of a ServerApp that was stopped for a minute. Here it has three.
task_patience = 3 * HEARTBEAT_PATIENCE
# Replaces `GRPC_MAX_MESSAGE_LENGTH` of the Fleet API, 2 GiB. Why: the SuperLink holds a request in
# memory before it checks the key. No object of Flower's is larger than `MAX_OBJECT_BYTES`.
max_request_bytes = 2 * MAX_OBJECT_BYTES
min_absence_s = 10.0  # without a request: SuperNodes ask every few seconds
pull_messages = message_handler.pull_messages
push_messages = message_handler.push_messages
pull_replies = runtime_handlers.pull_messages
confirm_reply = runtime_handlers.confirm_message_received


class Redelivery:
    """Delivers a message again that did not reach its node.

    `pull_messages` replaces that of `message_handler`. Why: Flower 1.39 counts a message as
    delivered when it answers the SuperNode's request. If that answer is lost (a cut cable, a killed
    SuperLink), the round waits for its whole timeout.

    A SuperNode handles one message at a time and confirms it on arrival, which removes the message
    from the object store. A SuperNode that asks for messages while one delivered to it is still in
    the store has therefore not received that one: it is delivered again, at most three times (and
    again after a restart), while its run is running and all its arrays are in the store.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pull_messages(
        self, request: PullMessagesRequest, state: LinkState, store: ObjectStore
    ) -> PullMessagesResponse:
        """Return the node's messages, among them those that were sent before and did not arrive."""
        if isinstance(state, SqlLinkState):
            self.renew(request.node.node_id, state, store)
        return pull_messages(request=request, state=state, store=store)

    def renew(self, node: int, state: SqlLinkState, store: ObjectStore) -> None:
        """Mark as undelivered what was sent to this node and has not arrived."""
        for message, run in unanswered(node, state).items():
            is_running = state.get_run_status({run})[run].status == Status.RUNNING
            is_spent = self.counts[message] == max_redeliveries
            if not is_running or is_spent or not is_complete(message, store):
                continue
            log.warning("message %s did not reach node %d: delivering it again", message, node)
            self.counts[message] += 1
            with state.session() as session:
                is_this = MessageIns.message_id == message
                session.execute(update(MessageIns).where(is_this).values(delivered_at=""))


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


def push_own(request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
    """Store the node's own replies. ValueError for a message of another node.

    Replaces `message_handler.push_messages`. Why: Flower compares the node of a request with its
    key, but stores the message in it under any other node's name.
    """
    if any(m.metadata.src_node_id != request.node.node_id for m in request.messages_list):
        log.warning("node %d sent a message of another node: refused", request.node.node_id)
        raise ValueError("a SuperNode sends its own replies")
    return push_messages(request, state)


class ReplyState:
    """A state as `runtime_handlers.pull_messages` sees it: complete replies, none deleted.

    A ServerApp asks for a reply until it has confirmed it, so that one marked as delivered which it
    asks for again did not arrive. Errors that the SuperLink makes in a node's place are deleted at
    once, as in Flower, with the message: its node must not work on it any more.
    """

    def __init__(self, state: SqlLinkState) -> None:
        self._state = state
        self._replies: set[str] = set()  # the messages that they reply to

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        """Return complete replies, also those delivered before; none that is still being sent."""
        is_asked = MessageRes.reply_to_message_id.in_(message_ids)
        with self._state.session() as session:
            rows = session.execute(
                select(MessageRes.reply_to_message_id, MessageRes.message_id).where(is_asked)
            ).all()
            store = self._state.object_store
            partial = {asked for asked, reply in rows if not is_complete(str(reply), store)}
            if rows:
                is_lost = is_asked & (MessageRes.delivered_at != "")
                session.execute(update(MessageRes).where(is_lost).values(delivered_at=""))
        found = self._state.get_message_res(message_ids=message_ids - partial, run_id=run_id)
        self._replies = {
            reply.metadata.reply_to_message_id
            for reply in found
            if reply.metadata.src_node_id != SUPERLINK_NODE_ID
        }
        return found

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Delete what will not be confirmed."""
        self._state.delete_messages(message_ins_ids=message_ins_ids - self._replies)


def pull_complete_replies(
    request: PullAppMessagesRequest, state: LinkState, task: Task
) -> PullAppMessagesResponse:
    """Return the replies that a `ReplyState` shows.

    Replaces `runtime_handlers.pull_messages`. Why: Flower deletes a reply when it answers the
    ServerApp's request, and delivers one whose arrays are still being sent, for which the ServerApp
    then waits. Here a reply is delivered once it is complete, and again until it is confirmed.
    """
    seen: Any = ReplyState(state) if isinstance(state, SqlLinkState) else state
    return pull_replies(request, seen, task)


def confirm_and_delete(
    request: ConfirmMessageReceivedRequest, state: LinkState, task: Task
) -> ConfirmMessageReceivedResponse:
    """Delete the reply and its message, which `ReplyState` has kept, and confirm the reply.

    Replaces `runtime_handlers.confirm_message_received`, for `pull_complete_replies`.
    """
    if isinstance(state, SqlLinkState):
        is_this = MessageRes.message_id == request.message_object_id
        with state.session() as session:
            answered = session.scalar(select(MessageRes.reply_to_message_id).where(is_this))
        if answered:
            state.delete_messages(message_ins_ids={answered})
    return confirm_reply(request, state, task)


def errors_but_expiry(message: Message, is_reply_message: bool) -> list[str]:
    """Return the message's errors but its expiry, for which the state then refuses it.

    Replaces it in `runtime_handlers`. Why: if messages have expired while the SuperLink was away,
    Flower answers the ServerApp with an error that looks like one of the SuperLink's own, and the
    ServerApp sends them again and again. Refused, they are made anew.
    """
    errors = validate_message(message, is_reply_message)
    return [error for error in errors if error != "Message TTL has expired"]


class PatientLinkState(SqlLinkState):
    """Flower's state, in which nothing expires because of the SuperLink's own absence.

    Replaces `SqlLinkState`. Why: a SuperLink that was stopped, or away, for more than a minute
    fails every run and regards every node as gone. Here both have another minute to be heard.

    The methods below are those in which Flower lets tasks and nodes expire, and the one that a
    connected SuperNode calls all the time. seen_at: when this process was last seen at work.
    """

    seen_at = float("-inf")

    def renew(self) -> None:
        """After an absence, give every task that runs and every node another minute."""
        absence_s = time.time() - PatientLinkState.seen_at
        PatientLinkState.seen_at = time.time()
        if absence_s < min_absence_s:
            return
        until = now() + timedelta(seconds=patience_s)
        is_running = TaskRow.active_until.is_not(None) & TaskRow.finished_at.is_(None)
        is_online = (Node.status == NodeStatus.ONLINE) & (Node.online_until < until.timestamp())
        with self.session() as session:
            stale = is_running & (TaskRow.active_until < until)
            session.execute(update(TaskRow).where(stale).values(active_until=until))
            session.execute(update(Node).where(is_online).values(online_until=until.timestamp()))

    def _cleanup_expired_task_tokens(self) -> None:
        self.renew()
        super()._cleanup_expired_task_tokens()

    def _check_and_tag_offline_nodes(self, node_ids: list[int] | None = None) -> None:
        self.renew()
        super()._check_and_tag_offline_nodes(node_ids)

    def get_task_by_token(self, token: str) -> Task | None:
        """Give tasks and nodes their minute, then look the token up."""
        self.renew()
        return super().get_task_by_token(token)

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[Message]:
        """Give tasks and nodes their minute, then return the node's messages."""
        self.renew()
        return super().get_message_ins(node_id, limit, run_id=run_id)

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Message]:
        """Give tasks and nodes their minute, then return the replies."""
        self.renew()
        return super().get_message_res(message_ids, run_id)


def main() -> None:
    """Run `flower-superlink` with its options, and with what this file replaces."""
    if vars(fleet_servicer).get("message_handler") is not message_handler:
        sys.exit(f"error: {FlowerChanged('fleet_servicer.message_handler')}")
    replace(message_handler, "pull_messages", Redelivery().pull_messages, pull_messages)
    replace(message_handler, "push_messages", push_own, push_messages)
    replace(runtime_handlers, "pull_messages", pull_complete_replies, pull_replies)
    replace(runtime_handlers, "confirm_message_received", confirm_and_delete, confirm_reply)
    replace(runtime_handlers, "validate_message", errors_but_expiry, validate_message)
    replace(linkstate_factory, "SqlLinkState", PatientLinkState, SqlLinkState)
    replace(sql_corestate, "HEARTBEAT_PATIENCE", task_patience, HEARTBEAT_PATIENCE)
    cli = sys.modules[flower_superlink.__module__]
    replace(cli, "GRPC_MAX_MESSAGE_LENGTH", max_request_bytes, GRPC_MAX_MESSAGE_LENGTH)
    flower_superlink()
