"""What a SuperLink accepts from a SuperNode: bounded replies, in its own name.

Public way for any of these: none.

`BoundedReplies` replaces parts of `SqlLinkState`. Why: Flower stores whatever a SuperNode sends, on
disk, before the ServerApp can look at it. Here a reply has at most the bytes that its message
allows (`bound_reply`), a node has at most `MAX_REPLIES` replies to a run in the store, and one that
it has sent in part is deleted when it begins another, with those to runs that have ended: Flower
keeps what a ServerApp that was killed did not take. A reply beyond its bound is deleted while it
arrives, and an error that names the bound takes its place. Requests store one after the other, so
that none is overlooked, and the write-ahead log, which grows while they overlap, is emptied on the
way.

`accept_reply` replaces `message_handler.push_messages`. Why: Flower compares the node of a request
with its key, but stores the message in it under any other node's name, and as a message *to* a node
if it replies to none. It also stores times that are NaN, as NULL, on which every request for the
replies of that round then fails. And it stores objects under a root that is not the message, which
nothing deletes before the run ends.

`FlatObjectStore` replaces `preregister` of `SqlObjectStore`. Why: before objects arrive,
Flower believes the first sender about which objects contain which, and refuses anyone who states
otherwise. Small records can be predicted ("round 3 of site-a"), so one client could block the
updates of another and all messages of the server. Here only messages contain objects.

`confirm_own` replaces `message_handler.confirm_message_received`. Why: Flower deletes any message
or reply that a SuperNode confirms, even that of another node.

`SpokenErrors` completes `SqlMixin.session`. Why: with a full disk Flower's SuperLink answers with
errors that a SuperNode takes for final, so that replies are lost, and that tell a ServerApp no
reason. Here it is unavailable and says why, and whoever asks tries again.
"""

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice

from flwr.app import Error, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode, Status
from flwr.common.serde import message_to_proto
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
)
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP, ApiErrorSpec
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_body,
    get_object_id,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.object_store import NoObjectInStoreError, ObjectStore
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.corestate_models import (
    ObjectPushSession,
    ObjectPushSessionPending,
    ObjectPushSessionRoot,
)
from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
from flwr.supercore.utils import int64_to_uint64, uint64_to_int64
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from grpc import StatusCode
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from flower_adapter import MAX_OBJECT_BYTES, TOO_LARGE, reply_bound

log = logging.getLogger("keel.superlink")
MAX_REPLIES = 4  # of one node to one run, complete and not yet taken by their ServerApp
MAX_OBJECTS = 1000  # of a reply, and one more for each MiB: Keel packs arrays into few
MAX_LOG_BYTES = 2**25  # of objects in the database's write-ahead log, before it is emptied
LOG_WAIT_S = 0.2  # for its readers
MAX_SECONDS = 2.0**40  # of any time in a reply
push_messages = message_handler.push_messages
confirm_message = message_handler.confirm_message_received
CANNOT_WRITE = 39_001  # an error code of ours
API_ERROR_MAP[CANNOT_WRITE] = ApiErrorSpec(
    StatusCode.UNAVAILABLE, 503, "the SuperLink cannot use its database"
)


class Writing:
    """Held by the request that stores; num_bytes: stored since the write-ahead log was emptied.

    What a node has stored is counted before its next request is looked at, however many it sends
    at once.
    """

    def __init__(self) -> None:
        self.lock, self.num_bytes = threading.Lock(), 0


writing = Writing()  # of the process: Flower makes a state for each of its APIs


class SpokenErrors(SqlMixin):
    """A database whose failures are errors of Flower's, which tell the asker why to try again."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        """As Flower's."""
        try:
            with super().session() as session:
                yield session
        except OperationalError as error:
            raise FlowerError(CANNOT_WRITE, str(error), str(error.orig)) from error


def empty_log(state: SqlMixin) -> bool:
    """Copy the write-ahead log into the database and empty it; whether no reader was in the way.

    Over a connection of its own, which waits for readers only briefly: writers wait meanwhile, and
    would fail after SQLite's 5 seconds.
    """
    assert state._engine is not None
    path = str(state._engine.url.database)
    try:
        with closing(sqlite3.connect(path, timeout=LOG_WAIT_S)) as connection:
            [is_busy, *_] = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError:  # a full disk, which the next write finds too
        return False
    return not is_busy


def objects_of(root: str, store: ObjectStore) -> set[str]:
    """The ids of an object and of everything in it; empty if it is not registered."""
    try:
        tree = store.get_object_tree(root)
    except NoObjectInStoreError:
        return set()
    return {each.object_id for each in iterate_object_tree(tree)}


def is_complete(root: str, store: ObjectStore) -> bool:
    """Whether the object with this id and everything in it are in the store.

    A message still being sent, or whose sender was killed, is incomplete; one that its receiver has
    confirmed is gone.
    """
    objects = objects_of(root, store)
    if not isinstance(store, SqlObjectStore):
        return bool(objects) and all(map(store.get, objects))
    is_here = StoredObject.object_id.in_(objects) & (StoredObject.is_available == 1)
    with store.session() as session:  # without reading the arrays
        count = select(func.count()).select_from(StoredObject).where(is_here)
        return bool(objects) and session.scalar(count) == len(objects)


class FlatObjectStore(SpokenErrors, SqlObjectStore):
    """Flower's object store with these errors, in which only messages contain objects."""

    def preregister(self, run_id: int, object_tree: ObjectTree) -> list[str]:
        """As Flower's, with all objects of a message directly in it.

        An object that is registered with others in it loses them: a sender passed it off as a
        message, or an earlier version of Keel stored it.
        """
        root = object_tree.object_id
        found = dict.fromkeys(each.object_id for each in iterate_object_tree(object_tree))
        parts = [each for each in found if each != root]
        with self._mutation_session() as session:
            is_in_part = ObjectChild.parent_id.in_(parts)
            children = session.scalars(select(ObjectChild.child_id).where(is_in_part)).all()
            session.execute(delete(ObjectChild).where(is_in_part))
            for child in children:
                is_this = StoredObject.object_id == child
                count = StoredObject.ref_count - 1
                session.execute(update(StoredObject).where(is_this).values(ref_count=count))
                self.delete(child)
            flat = ObjectTree(object_id=root, children=[ObjectTree(object_id=p) for p in parts])
            return super().preregister(run_id, flat)


def is_message(content: bytes, reply: MessageRes) -> bool:
    """Whether an object is the message that its node announced.

    A ServerApp reads the object, not the announcement.
    """
    try:
        proto = MessageProto.FromString(get_object_body(content, Message))
    except (ValueError, DecodeError):
        return False
    about = metadata_from_proto(proto.metadata)
    return (about.run_id, about.src_node_id, about.dst_node_id, about.reply_to_message_id) == (
        *map(int64_to_uint64, (reply.run_id or 0, reply.src_node_id or 0, reply.dst_node_id or 0)),
        reply.reply_to_message_id,
    )


class BoundedReplies(SpokenErrors, SqlLinkState):
    """Flower's state, which stores no more of a node's replies than their messages allow."""

    def store_message_and_object_tree(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        """As Flower's; a reply must be small enough to be stored, as far as can be seen yet.

        The session of a reply that is not stored is deleted, which Flower keeps until the run ends.
        That of a message stays: all messages of a round share it.
        """
        is_stored = False
        try:
            is_stored, missing = self._store_message(message, object_tree, session_id)
            return is_stored, missing
        finally:
            if message.metadata.reply_to_message_id and not is_stored:
                self._cleanup_push_session(session_id, cleanup_messages=False)

    def _store_message(
        self, message: Message, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        about, node = message.metadata, message.metadata.src_node_id
        with writing.lock:
            bound = self.bound_of(about.reply_to_message_id)
            if bound is not None:
                self.delete_partial_replies(node, but=about.message_id)
                if self.num_replies(node, about.run_id) >= MAX_REPLIES:
                    log.warning("node %d has %d replies stored: refused", node, MAX_REPLIES)
                    return False, []
                max_objects = MAX_OBJECTS + bound // 2**20
                if any(islice(iterate_object_tree(object_tree), max_objects, None)):
                    self.answer(about, f"{TOO_LARGE} {max_objects} objects")
                    return False, []
                if message_to_proto(message).ByteSize() > bound:
                    self.answer(about, f"{TOO_LARGE} {bound} bytes")
                    return False, []
            return super().store_message_and_object_tree(message, object_tree, session_id)

    def store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        """As Flower's, while the reply that the object belongs to is within its bound.

        FlowerError if the database cannot be written to, where Flower's only logs it. An object
        without a session is refused: Flower would look for a session that waits for it, which may
        be another node's.
        """
        if not session_id:
            log.warning("an object without a session was sent: refused")
            return False
        with writing.lock:
            try:
                return self._store_object(run_id, session_id, object_id, object_content)
            finally:
                writing.num_bytes += len(object_content)
                if writing.num_bytes >= MAX_LOG_BYTES and empty_log(self):
                    writing.num_bytes = 0

    def _store_object(
        self, run_id: int, session_id: str, object_id: str, object_content: bytes
    ) -> bool:
        with self.session() as session:
            is_root = ObjectPushSessionRoot.session_id == session_id
            roots = session.scalars(
                select(ObjectPushSessionRoot.root_object_id).where(is_root)
            ).all()
            reply = session.scalar(select(MessageRes).where(MessageRes.message_id.in_(roots)))
            about = (reply.reply_to_message_id, reply.message_id) if reply else ("", "")
            is_forged = (
                reply is not None
                and object_id == reply.message_id
                and not is_message(object_content, reply)
            )
            is_known = reply or session.scalar(
                select(MessageIns.message_id).where(MessageIns.message_id.in_(roots))
            )
            availability = select(StoredObject.is_available)
            is_here = session.scalar(availability.where(StoredObject.object_id == object_id)) == 1
        if roots and not is_known:  # its message was deleted meanwhile
            self._cleanup_push_session(session_id, cleanup_messages=True)
            return False
        asked, root = str(about[0]), str(about[1])
        if is_forged:
            self._cleanup_push_session(session_id, cleanup_messages=True)
            self.refuse(asked, "the metadata of another")
            return False
        bound = self.bound_of(asked)
        if bound is not None:
            size, limit = self.stored_bytes(root), f"{bound} bytes"
            size += 0 if is_here else len(object_content)
            if len(object_content) > MAX_OBJECT_BYTES:
                size, limit = bound + 1, f"{MAX_OBJECT_BYTES} bytes in one object"
            if size > bound:
                self._cleanup_push_session(session_id, cleanup_messages=True)
                self.refuse(asked, f"{TOO_LARGE} {limit}")
                return False
        stored = super().store_object(run_id, session_id, object_id, object_content)
        if stored or get_object_id(object_content) != object_id:
            return stored
        if is_here:  # sent again: its answer was lost
            return True
        if self.is_pending(session_id, object_id):
            why = "database or disk is full"  # nothing else keeps a valid object out
            raise FlowerError(CANNOT_WRITE, f"object {object_id}: {why}", why)
        return stored

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """As Flower's; also deletes incomplete replies to these messages."""
        if message_ins_ids:
            with self.session() as session:
                is_reply = MessageRes.reply_to_message_id.in_(message_ins_ids)
                replies = session.scalars(select(MessageRes.message_id).where(is_reply)).all()
            for reply in replies:
                if not is_complete(str(reply), self.object_store):
                    self.object_store.delete(str(reply))
        super().delete_messages(message_ins_ids)

    def bound_of(self, message_id: str) -> int | None:
        """The largest size of a reply to this message; None if it, or the message, is unknown."""
        with self.session() as session:
            is_this = MessageIns.message_id == message_id
            return reply_bound(session.scalar(select(MessageIns.group_id).where(is_this)) or "")

    def num_replies(self, node: int, run: int) -> int:
        """The node's stored replies to this run; deletes those to runs that have ended."""
        with self.session() as session:
            is_its = MessageRes.src_node_id == uint64_to_int64(node)
            count = func.count(MessageRes.message_id)
            rows = session.execute(
                select(MessageRes.run_id, count).where(is_its).group_by(MessageRes.run_id)
            ).all()
        found = {int64_to_uint64(each or 0): int(number) for each, number in rows}
        for each, about in self.get_run_status(found.keys() - {run}).items():
            if about.status == Status.FINISHED:
                self.cleanup_run(each)
        return found.get(run, 0)

    def delete_partial_replies(self, node: int, but: str) -> None:
        """Delete what this node has sent in part, except for one reply.

        A SuperNode sends one after the other.
        """
        with self.session() as session:
            is_its = MessageRes.src_node_id == uint64_to_int64(node)
            replies = {*map(str, session.scalars(select(MessageRes.message_id).where(is_its)))}
        partial = {reply for reply in replies - {but} if not is_complete(reply, self.object_store)}
        with self.session() as session:
            is_root = ObjectPushSessionRoot.root_object_id.in_(partial)
            query = select(ObjectPushSessionRoot.session_id).where(is_root)
            sessions = session.scalars(query).all()
        for each in sessions:
            self._cleanup_push_session(each, cleanup_messages=True)
        for reply in partial:
            self.object_store.delete(reply)
        if partial:
            self._on_push_session_expired(partial)

    def stored_bytes(self, root: str) -> int:
        """How much of an object and of everything in it has arrived."""
        with self.session() as session:
            is_its = StoredObject.object_id.in_(objects_of(root, self.object_store))
            size = func.coalesce(func.sum(func.length(StoredObject.content)), 0)
            return int(session.scalar(select(size).where(is_its)) or 0)

    def is_pending(self, session_id: str, object_id: str) -> bool:
        """Whether a push session still waits for this object."""
        with self.session() as session:
            is_this = (ObjectPushSessionPending.session_id == session_id) & (
                ObjectPushSessionPending.object_id == object_id
            )
            query = select(ObjectPushSessionPending.object_id).where(is_this)
            is_open = session.get(ObjectPushSession, session_id) is not None
            return is_open and session.scalar(query) is not None

    def refuse(self, message_id: str, reason: str) -> None:
        """Answer a message with an error in its node's place."""
        with self.session() as session:
            row = session.scalar(select(MessageIns).where(MessageIns.message_id == message_id))
            if row is None:
                return
            about = Metadata(
                int64_to_uint64(row.run_id or 0),
                "",
                int64_to_uint64(row.dst_node_id or 0),
                int64_to_uint64(row.src_node_id or 0),
                message_id,
                row.group_id or "",
                *(row.created_at or 0.0, row.ttl or 0.0, row.message_type or ""),
            )
        self.answer(about, reason)

    def answer(self, about: Metadata, reason: str) -> None:
        """Store an error as a node's reply; `about`: as of the reply."""
        log.warning("node %d: its reply has %s: refused", about.src_node_id, reason)
        error = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, f"the reply has {reason}")
        message = make_message(metadata=about, error=error)
        about.__dict__["_message_id"] = message.object_id
        session_id, tree = self.start_session(about.run_id), get_object_tree(message)
        stored, missing = super().store_message_and_object_tree(message, tree, session_id)
        if not stored:
            self._cleanup_push_session(session_id, cleanup_messages=False)
        objects = get_all_nested_objects(message)
        for object_id in missing if stored else []:
            super().store_object(about.run_id, session_id, object_id, objects[object_id].deflate())


def accept_reply(request: PushMessagesRequest, state: LinkState) -> PushMessagesResponse:
    """As Flower's, for a reply of the node that sends it. ValueError for any other message."""
    node, found = request.node.node_id, request.messages_list
    about = found[0].metadata if len(found) == 1 else None
    if about is None or about.src_node_id != node or not about.reply_to_message_id:
        log.warning("node %d sent a message that is no reply of its own: refused", node)
        raise ValueError("a SuperNode sends one reply of its own at a time")
    if [tree.object_id for tree in request.message_object_trees] != [about.message_id]:
        log.warning("node %d sent a reply without its own objects: refused", node)
        raise ValueError("a reply comes with the tree of its objects")
    times = (about.created_at, about.ttl, *request.clientapp_runtime_list)
    if not all(abs(seconds) < MAX_SECONDS for seconds in times):  # a late reply's ttl is below 0
        log.warning("node %d sent a reply with a time that is not a number: refused", node)
        raise ValueError("the times of a reply must be numbers of seconds")
    return push_messages(request, state)


def confirm_own(
    request: ConfirmMessageReceivedRequest, state: LinkState, store: ObjectStore
) -> ConfirmMessageReceivedResponse:
    """As Flower's, for a message to the node that confirms it. ValueError for any other."""
    node, message = request.node.node_id, request.message_object_id
    if isinstance(state, SqlLinkState):
        is_anothers = MessageIns.dst_node_id != uint64_to_int64(node)
        with state.session() as session:
            found = session.scalar(
                select(MessageIns.message_id).where(MessageIns.message_id == message, is_anothers)
            ) or session.scalar(
                select(MessageRes.message_id).where(MessageRes.message_id == message)
            )
        if found:
            log.warning("node %d confirmed a message that is not to it: refused", node)
            raise ValueError("a SuperNode confirms messages to itself")
    return confirm_message(request, state, store)
