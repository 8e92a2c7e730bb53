"""What Keel's SuperLink adds: lost messages and replies are delivered again, absences cost no run.

Uses Flower's own state in a file, its object store and its handlers.
"""

import contextlib
import shutil
import sqlite3
import time
from types import SimpleNamespace

import grpc
import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate import LinkStateFactory, linkstate_factory, sql_linkstate
from flwr.supercore import sql_mixin
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.corestate import sql_corestate
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers

from flower_adapter import assign_message_id
from flower_adapter import superlink as superlink_server
from flower_adapter.superlink import (
    PatientLinkState,
    Redelivery,
    confirm_and_delete,
    max_redeliveries,
    pull_complete_replies,
    push_own,
)


class Link:
    """A SuperLink with a running run, and a node that asks."""

    def __init__(self, folder, monkeypatch, tables):
        """tables: a database that has them; to make them, or to look for them, takes long."""
        shutil.copy(tables, folder / "superlink.db")
        monkeypatch.setattr(sql_mixin, "run_migrations", lambda engine: None)
        self.folder = folder
        self.patch = monkeypatch
        monkeypatch.setattr(linkstate_factory, "SqlLinkState", PatientLinkState)
        self.start()
        keys = (b"one", b"two")
        self.node, self.other = (self.state.create_node("", "", key, 30.0) for key in keys)
        for node in (self.node, self.other):
            assert self.state.activate_node(node, 30.0)
        self.begin_run()

    def begin_run(self):
        """A run whose ServerApp has started."""
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
        )
        [run] = self.state.get_run_info(run_ids=[self.run])
        self.task = run.primary_task_id
        assert self.state.claim_task(self.task)
        assert self.state.activate_task(self.task)

    def start(self):
        """Begin, or begin again on the same file."""
        self.patch.setattr(PatientLinkState, "seen_at", float("-inf"))
        database = str(self.folder / "superlink.db")
        stores = ObjectStoreFactory(database)
        manager = NoOpFederationManager()
        self.state = LinkStateFactory(database, manager, stores).state()
        self.store = stores.store()
        self.redelivery = Redelivery()

    def send(self, name, is_whole=True, ttl=3600.0):
        """A message to the node, by the name that stands in it."""
        content = RecordDict({"config": ConfigRecord({"name": name})})
        now = time.time()
        about = Metadata(self.run, "", SUPERLINK_NODE_ID, self.node, "", "", now, ttl, "train")
        message = Message(content=content, metadata=about)
        assign_message_id(message, message.object_id)
        session = self.state.start_session(self.run)
        tree = get_object_tree(message)
        assert self.state.store_message_and_object_tree(message, tree, session)[0]
        if is_whole:
            self.finish(message)
        return message

    def finish(self, message):
        """What the message holds arrives too."""
        for name, item in get_all_nested_objects(message).items():
            self.store.put(name, item.deflate())

    def ask(self, node=None):
        """The messages that the node is given."""
        request = PullMessagesRequest(node=Node(node_id=node or self.node))
        answer = self.redelivery.pull_messages(request=request, state=self.state, store=self.store)
        return [each.metadata.message_id for each in answer.messages_list]

    def reply(self, message, is_whole=True):
        """The node's reply to a message."""
        about = message.metadata
        now, ttl = time.time(), about.created_at + about.ttl - time.time()
        about = Metadata(
            *(self.run, "", self.node, SUPERLINK_NODE_ID, about.message_id, "", now, ttl, "train")
        )
        content = RecordDict({"config": ConfigRecord({"is": "a reply"})})
        reply = Message(content=content, metadata=about)
        assign_message_id(reply, reply.object_id)
        session = self.state.start_session(self.run)
        tree = get_object_tree(reply)
        assert self.state.store_message_and_object_tree(reply, tree, session)[0]
        if is_whole:
            self.finish(reply)
        return reply

    def given(self, *messages):
        """What the ServerApp is given for these messages."""
        request = PullAppMessagesRequest(message_ids=ids(*messages))
        return pull_complete_replies(request, self.state, Task(run_id=self.run)).messages_list

    def pull(self, *messages):
        """(id, error code or 0) of what the ServerApp is given for these messages."""
        return [(m.metadata.message_id, m.error.code) for m in self.given(*messages)]

    def confirm_reply(self, reply):
        request = ConfirmMessageReceivedRequest(message_object_id=reply.metadata.message_id)
        confirm_and_delete(request, self.state, Task(run_id=self.run))

    def confirm(self, message):
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=self.node),
            run_id=self.run,
            message_object_id=message.metadata.message_id,
        )
        message_handler.confirm_message_received(request, self.state, self.store)


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("superlink") / "superlink.db"
    LinkStateFactory(str(path), NoOpFederationManager(), ObjectStoreFactory(str(path))).state()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # into the file itself
    return path


@pytest.fixture
def link(tmp_path, monkeypatch, tables):
    return Link(tmp_path, monkeypatch, tables)


def ids(*messages):
    return [each.metadata.message_id for each in messages]


def test_a_confirmed_message_is_not_delivered_again(link):
    one = link.send("one")
    assert link.ask() == ids(one)
    link.confirm(one)
    assert link.ask() == []
    two = link.send("two")
    assert link.ask() == ids(two)


def test_an_unconfirmed_message_is_delivered_again(link):
    one = link.send("one")
    assert link.ask() == ids(one)
    assert link.ask(link.other) == []  # says nothing of it
    assert link.ask() == ids(one)  # the answer before was lost
    link.confirm(one)
    assert link.ask() == []


def test_it_is_delivered_again_after_the_superlink_was_killed(link):
    one = link.send("one")
    assert link.ask() == ids(one)
    link.start()
    assert link.ask() == ids(one)


def test_a_message_that_never_arrives_does_not_block_its_node(link):
    broken = link.send("broken")
    for _ in range(1 + max_redeliveries):
        assert link.ask() == ids(broken)
    assert link.ask() == []
    following = link.send("following")
    assert link.ask() == ids(following)


def test_an_incomplete_message_is_delivered_again_once_it_is_complete(link):
    one = link.send("one", is_whole=False)
    assert link.ask() == ids(one)  # as Flower does: the node waits for the rest, and gives up
    assert link.ask() == []
    link.finish(one)
    assert link.ask() == ids(one)


def whole(reply):
    return [(reply.metadata.message_id, 0)]


def test_a_reply_whose_delivery_was_lost_is_delivered_again_until_it_is_confirmed(link):
    """A pull that timed out while the SuperLink hung has taken the reply from Flower's."""
    one, two = link.send("one"), link.send("two")
    reply = link.reply(one)
    for _ in range(3):
        assert link.pull(one, two) == whole(reply)
    link.start()
    assert link.pull(one) == whole(reply)
    link.confirm_reply(reply)
    link.confirm_reply(reply)  # asked for again after its answer was lost
    assert link.state.num_message_res() == 0
    assert link.state.num_message_ins() == 1
    assert reply.metadata.message_id not in link.store
    assert link.pull(two) == []


def test_a_reply_that_is_still_being_sent_is_not_delivered_and_holds_up_no_other(link):
    """With Flower's, the ServerApp waits for its arrays for up to two hours."""
    one, two = link.send("one"), link.send("two")
    slow, quick = link.reply(one, is_whole=False), link.reply(two)
    assert link.pull(one, two) == whole(quick)
    link.finish(slow)
    assert link.pull(one) == whole(slow)


def test_a_message_to_a_node_that_is_gone_is_answered_once_and_withdrawn(link):
    one = link.send("one")
    link.state.deactivate_node(link.node)
    [(_, code)] = link.pull(one)
    assert code == ErrorCode.NODE_UNAVAILABLE
    assert link.state.num_message_ins() == 0


def later(monkeypatch, seconds, is_absent=False):
    """The clock this much later; is_absent: the SuperLink was not at work on the way."""
    at, now = time.time() + seconds, superlink_server.now()
    now += superlink_server.timedelta(seconds=seconds)
    if not is_absent:
        monkeypatch.setattr(PatientLinkState, "seen_at", at - 1)
    monkeypatch.setattr(superlink_server.time, "time", lambda: at)
    for module in (superlink_server, sql_linkstate, sql_corestate):
        monkeypatch.setattr(module, "now", lambda: now)


@pytest.mark.parametrize("absence_s", [90, 600])
def test_runs_and_nodes_outlive_an_absence_of_the_superlink(link, monkeypatch, absence_s):
    """It was stopped, or away for ten minutes: neither could have sent a heartbeat."""
    one = link.send("one")
    link.state.renew()
    later(monkeypatch, absence_s, is_absent=True)
    assert link.state.acknowledge_task_heartbeat(link.task)
    assert link.pull(one) == []
    assert link.state.get_nodes(link.run) == {link.node, link.other}


@pytest.mark.parametrize(("stopped_s", "lives"), [(170, True), (190, False)])
def test_a_serverapp_that_is_stopped_keeps_its_run_for_three_minutes(
    link, monkeypatch, stopped_s, lives
):
    monkeypatch.setattr(sql_corestate, "HEARTBEAT_PATIENCE", superlink_server.task_patience)
    link.state.renew()
    assert link.state.acknowledge_task_heartbeat(link.task)
    later(monkeypatch, stopped_s)
    assert link.state.acknowledge_task_heartbeat(link.task) == lives


def test_a_run_and_a_node_that_fall_silent_still_expire(link, monkeypatch):
    one = link.send("one")
    link.state.renew()
    later(monkeypatch, 90)
    assert not link.state.acknowledge_task_heartbeat(link.task)
    assert [code for _, code in link.pull(one)] == [ErrorCode.NODE_UNAVAILABLE]
    assert link.state.get_nodes(link.run) == set()


def test_a_node_cannot_reply_for_another(link):
    asked = link.send("one")
    link.ask()
    now, ttl = time.time(), 60.0
    about = Metadata(link.run, "", link.node, SUPERLINK_NODE_ID, *ids(asked), "", now, ttl, "train")
    forged = Message(content=RecordDict(), metadata=about)
    assign_message_id(forged, forged.object_id)
    for node, is_refused in ((link.other, True), (link.node, False)):
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(forged)],
            message_object_trees=[get_object_tree(forged)],
        )
        with pytest.raises(ValueError) if is_refused else contextlib.nullcontext():
            push_own(request, link.state)
        assert link.state.num_message_res() == (not is_refused)


def test_a_client_that_is_unregistered_is_cut_off_at_once(link):
    """While it is connected: its next request is refused, and nobody waits for it."""

    class Context:
        def abort(self, code, details):
            raise PermissionError(details)

    def ask(request, answer):
        interceptor = NodeAuthServerInterceptor(SimpleNamespace(state=lambda: link.state))
        handler = grpc.unary_unary_rpc_method_handler(answer)
        return interceptor._wrap_method_handler(handler, b"one").unary_unary(request, Context())

    def heartbeat(request, context):
        return message_handler.send_node_heartbeat(request, link.state)

    def activate(request, context):
        return message_handler.activate_node(request, link.state)

    beat = SendNodeHeartbeatRequest(node=Node(node_id=link.node), heartbeat_interval=30.0)
    assert ask(beat, heartbeat).success
    asked = link.send("one")
    link.state.delete_node("", link.node)
    for request in (beat, PullMessagesRequest(node=Node(node_id=link.node))):
        with pytest.raises(PermissionError):
            ask(request, heartbeat)
    with pytest.raises(ValueError):
        ask(ActivateNodeRequest(public_key=b"one", heartbeat_interval=30.0), activate)
    link.start()
    assert link.state.get_nodes(link.run) == {link.other}
    [(_, code)] = link.pull(asked)
    assert code == ErrorCode.NODE_UNAVAILABLE


def test_messages_that_expired_before_they_were_sent_are_refused_and_no_error(link, monkeypatch):
    """A ServerApp takes an error for a failing SuperLink, and sends the same again."""
    monkeypatch.setattr(runtime_handlers, "validate_message", superlink_server.errors_but_expiry)
    sent = []
    for age_s, node in ((120, link.node), (0, link.other)):
        at = time.time() - age_s
        about = Metadata(link.run, "", SUPERLINK_NODE_ID, node, "", "", at, 60.0, "train")
        sent.append(Message(content=RecordDict(), metadata=about))
        assign_message_id(sent[-1], sent[-1].object_id)
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(each)) for each in sent],
        message_object_trees=[get_object_tree(each) for each in sent],
    )
    answer = runtime_handlers.push_messages(request, link.state, Task(run_id=link.run))
    assert answer.message_ids == ["", *ids(sent[1])]
