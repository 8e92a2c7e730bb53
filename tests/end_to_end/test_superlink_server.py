"""What an answer lost on its way, or an absence of the SuperLink, may not cost.

A message that did not arrive is delivered again, a few times; a reply until it is confirmed.

Uses Flower's own state in a file, its object store and its handlers.
"""

import contextlib
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import (
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    SUPERLINK_NODE_ID,
    TIMESTAMP_HEADER,
    ErrorCode,
    SubStatus,
)
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
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
from flwr.supercore.date import now
from flwr.supercore.error import FlowerError
from flwr.supercore.error.catalog import API_ERROR_MAP
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory, object_store_factory
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from flwr.supercore.state.schema.corestate_models import ObjectPushSession, ObjectPushSessionRoot
from flwr.supercore.state.schema.objectstore_models import StoredObject
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.runtime import runtime_handlers
from grpc import StatusCode
from sqlalchemy import event, func, select
from sqlalchemy.exc import OperationalError

from flower_adapter import TOO_LARGE, assign_message_id, bound_reply, reply_bounds
from flower_adapter import superlink as superlink_server
from flower_adapter.reply_bounds import FlatObjectStore, accept_reply, confirm_own
from flower_adapter.superlink import (
    OwnKeyInterceptor,
    PatientLinkState,
    Presence,
    Redelivery,
    confirm_and_delete,
    errors_but_expiry,
    max_redeliveries,
    pull_complete_replies,
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
        monkeypatch.setattr(object_store_factory, "SqlObjectStore", FlatObjectStore)
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
        self.patch.setattr(PatientLinkState, "presence", Presence())
        database = str(self.folder / "superlink.db")
        stores = ObjectStoreFactory(database)
        manager = NoOpFederationManager()
        self.state = LinkStateFactory(database, manager, stores).state()
        self.store = stores.store()
        self.redelivery = Redelivery()

    def send(self, name, is_whole=True, ttl=3600.0, bound=None):
        """A message to the node, by the name that stands in it; bound: of its reply's bytes."""
        content = RecordDict({"config": ConfigRecord({"name": name})})
        now = time.time()
        about = Metadata(self.run, "", SUPERLINK_NODE_ID, self.node, "", "", now, ttl, "train")
        message = Message(content=content, metadata=about)
        if bound:
            bound_reply(message, bound)
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


def test_a_message_of_a_run_that_has_ended_is_not_delivered_again(link):
    one = link.send("one")
    assert link.ask() == ids(one)
    link.state.finish_task(link.task, SubStatus.COMPLETED, "")
    assert link.ask() == []


def test_an_incomplete_message_is_delivered_again_once_it_is_complete(link):
    one = link.send("one", is_whole=False)
    assert link.ask() == ids(one)  # as Flower does: the node waits for the rest, and gives up
    assert link.ask() == []
    link.finish(one)
    assert link.ask() == ids(one)


def test_an_expired_message_is_not_delivered_again(link, monkeypatch):
    one = link.send("one", ttl=60.0)
    assert link.ask() == ids(one)
    later = time.time() + 61
    monkeypatch.setattr(superlink_server.time, "time", lambda: later)
    assert link.ask() == []
    assert not link.redelivery.counts


def test_a_message_that_was_answered_without_a_confirmation_is_not_delivered_again(link):
    one = link.send("one")  # as one is whose app the node does not trust
    assert link.ask() == ids(one)
    reply = Message(RecordDict(), reply_to=one)
    assign_message_id(reply, reply.object_id)
    assert link.state.store_message_res(reply)
    assert link.ask() == []


def test_a_database_that_is_busy_costs_nothing(link, monkeypatch):
    one = link.send("one")
    assert link.ask() == ids(one)

    def locked(node, state):
        raise OperationalError("select", {}, Exception("database is locked"))

    with monkeypatch.context() as patch:
        patch.setattr(superlink_server, "unanswered", locked)
        assert link.ask() == []
    assert link.ask() == ids(one)


def test_a_database_that_is_busy_after_the_claim_costs_nothing(link, monkeypatch):
    assert link.ask() == []
    one = link.send("one")

    def locked(*arguments, **options):
        raise OperationalError("update", {}, Exception("database is locked"))

    with monkeypatch.context() as patch:
        patch.setattr(link.state, "store_traffic", locked)
        with pytest.raises(OperationalError):
            link.ask()
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


def clocks_at(monkeypatch, seconds, absent, is_set=False):
    """All clocks this much later; absent: without a tick on the way. is_set: not the monotonic."""
    later, real = time.time() + seconds, time.monotonic() + (0 if is_set else seconds)
    now = superlink_server.now() + superlink_server.timedelta(seconds=seconds)
    if not absent:
        monkeypatch.setattr(PatientLinkState.presence, "_seen", real)
    monkeypatch.setattr(superlink_server.time, "time", lambda: later)
    monkeypatch.setattr(superlink_server.time, "monotonic", lambda: real)
    for module in (superlink_server, sql_linkstate, sql_corestate):
        monkeypatch.setattr(module, "now", lambda: now)


@pytest.mark.parametrize("absence_s", [90, 600])
def test_runs_and_nodes_outlive_an_absence_of_the_superlink(link, monkeypatch, absence_s):
    """Stopped, or away for the promised ten minutes: neither could have sent a heartbeat."""
    one = link.send("one", ttl=3600.0)
    link.state.renew()
    clocks_at(monkeypatch, absence_s, absent=True)
    assert link.state.acknowledge_task_heartbeat(link.task)
    assert link.pull(one) == []
    assert link.state.get_nodes(link.run) == {link.node, link.other}


def test_runs_and_nodes_outlive_a_clock_that_is_set_forward(link, monkeypatch):
    """The SuperLink has run all the time: only the clock, which says when they expire, has not."""
    one = link.send("one", ttl=3600.0)
    link.state.renew()
    assert link.state.acknowledge_task_heartbeat(link.task)
    clocks_at(monkeypatch, 600, absent=False, is_set=True)
    assert link.state.acknowledge_task_heartbeat(link.task)
    assert link.pull(one) == []
    assert link.state.get_nodes(link.run) == {link.node, link.other}


@pytest.mark.parametrize(("stopped_s", "lives"), [(95, True), (170, True), (190, False)])
def test_a_serverapp_that_is_stopped_keeps_its_run_for_three_minutes(
    link, monkeypatch, stopped_s, lives
):
    monkeypatch.setattr(sql_corestate, "HEARTBEAT_PATIENCE", superlink_server.task_patience)
    link.state.renew()
    link.state.presence.was_away = False
    assert link.state.acknowledge_task_heartbeat(link.task)
    clocks_at(monkeypatch, stopped_s, absent=False)
    assert link.state.acknowledge_task_heartbeat(link.task) == lives


@pytest.mark.parametrize(("beats", "lives"), [(True, True), (False, False)])
def test_a_serverapp_that_starts_has_three_minutes_after_a_first_heartbeat(
    link, monkeypatch, beats, lives
):
    """Which its executor sends; without, it is started again after 30 seconds."""
    monkeypatch.setattr(sql_corestate, "HEARTBEAT_PATIENCE", superlink_server.task_patience)
    run = link.state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, None, TaskType.SERVER_APP
    )
    [about] = link.state.get_run_info(run_ids=[run])
    token = link.state.claim_task(about.primary_task_id)
    assert not beats or link.state.acknowledge_task_heartbeat(about.primary_task_id)
    link.state.presence.was_away = False
    clocks_at(monkeypatch, 170, absent=False)
    assert bool(link.state.get_task_by_token(token)) == lives


def test_a_run_and_a_node_that_fall_silent_still_expire(link, monkeypatch):
    one = link.send("one", ttl=3600.0)
    link.state.renew()
    clocks_at(monkeypatch, 90, absent=False)
    assert not link.state.acknowledge_task_heartbeat(link.task)
    assert [code for _, code in link.pull(one)] == [ErrorCode.NODE_UNAVAILABLE]
    assert link.state.get_nodes(link.run) == set()


# --- what a SuperNode may store -----------------------------------------------------------------


def pushed(link, asked, arrays, bound, src=None, but=0, threads=1, names_session=True):
    """Send a reply with these arrays, all but the last `but` objects; the answers of the store.

    threads: that send at once. names_session: as all SuperNodes do but old ones.
    """
    about = asked.metadata
    own = Metadata(
        *(link.run, "", src or link.node, SUPERLINK_NODE_ID, about.message_id, ""),
        *(time.time(), about.created_at + about.ttl - time.time(), "train"),
    )
    reply = Message(content=RecordDict({"arrays": ArrayRecord(arrays)}), metadata=own)
    assign_message_id(reply, reply.object_id)
    session = link.state.start_session(link.run)
    tree = get_object_tree(reply)
    bare = remove_content_from_message(reply)  # as a SuperNode sends it
    stored, _ = link.state.store_message_and_object_tree(bare, tree, session)
    if not stored:
        return reply, [False]
    objects = list(get_all_nested_objects(reply).items())
    objects = objects[: len(objects) - but]

    def is_stored(pair):
        named = session if names_session else ""
        return link.state.store_object(link.run, named, pair[0], pair[1].deflate())

    with ThreadPoolExecutor(threads) as pool:
        return reply, list(pool.map(is_stored, objects))


def stored_bytes(link):
    """Of all objects in the database."""
    with link.store.session() as session:
        return session.scalar(select(func.sum(func.length(StoredObject.content)))) or 0


def bounded(link, name, bound):
    """A message whose reply may have so many bytes."""
    message = link.send(name, bound=bound)
    link.ask()
    link.confirm(message)
    return message


def random_arrays(number, size):
    generator = np.random.default_rng(number)
    return {str(i): Array(generator.random(size // 8)) for i in range(number)}


@pytest.mark.parametrize("threads", [1, 16])
def test_a_reply_is_deleted_where_it_exceeds_its_bound_and_its_client_is_named(
    link, threads, monkeypatch
):
    stored = PatientLinkState.stored_bytes

    def stored_slowly(self, root):  # requests at once would all see what was there before
        found = stored(self, root)
        time.sleep(0.02 * (threads > 1))
        return found

    monkeypatch.setattr(PatientLinkState, "stored_bytes", stored_slowly)
    asked = bounded(link, "one", 2**20)
    before = stored_bytes(link)
    reply, answers = pushed(link, asked, random_arrays(40, 2**18), 2**20, threads=threads)
    sizes = [len(item.deflate()) for item in get_all_nested_objects(reply).values()]
    assert sum(size for size, ok in zip(sizes, answers, strict=True) if ok) <= 2**20
    assert threads > 1 or not any(answers[answers.index(False) :])
    assert stored_bytes(link) < before + 2000  # of the error in its place
    [answer] = link.given(asked)
    assert answer.error.code == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    assert answer.error.reason == f"the reply has {TOO_LARGE} {2**20} bytes"
    assert answer.metadata.src_node_id == link.node


def test_an_object_without_a_session_is_refused(link):
    """Flower finds the session of an old SuperNode's object by itself: it would have no bound."""
    asked = bounded(link, "one", 2**20)
    before = stored_bytes(link)
    _, answers = pushed(link, asked, random_arrays(40, 2**18), 2**20, names_session=False)
    assert not any(answers)
    assert stored_bytes(link) == before


def test_a_reply_within_its_bound_arrives(link):
    asked = bounded(link, "one", 2**20)
    reply, answers = pushed(link, asked, random_arrays(3, 2**18), 2**20)
    assert all(answers)
    assert link.pull(asked) == whole(reply)


def test_the_write_ahead_log_is_emptied_on_the_way(link, monkeypatch):
    """SQLite alone leaves it at its largest size, and never empties it while requests overlap."""
    monkeypatch.setattr(reply_bounds, "MAX_LOG_BYTES", 2**20)
    sizes = []
    for number in (12, 13):
        _, answers = pushed(
            link, bounded(link, str(number), 2**23), random_arrays(number, 2**18), 0
        )
        assert all(answers)
        sizes.append((link.folder / "superlink.db-wal").stat().st_size)
    assert max(sizes) < 2**21


def test_a_reply_of_too_many_objects_is_refused_before_it_arrives(link):
    asked = bounded(link, "one", 2**20)
    _, answers = pushed(link, asked, random_arrays(600, 8), 2**20)
    assert answers == [False]
    [(_, code)] = link.pull(asked)
    assert code == ErrorCode.REPLY_MESSAGE_UNAVAILABLE


def test_an_object_larger_than_any_of_flowers_is_refused(link, monkeypatch):
    monkeypatch.setattr(reply_bounds, "MAX_OBJECT_BYTES", 2**17)
    asked = bounded(link, "one", 2**20)
    before = stored_bytes(link)
    _, answers = pushed(link, asked, random_arrays(1, 2**18), 2**20)
    assert False in answers
    assert stored_bytes(link) < before + 2000
    [answer] = link.given(asked)
    assert answer.error.reason == f"the reply has {TOO_LARGE} {2**17} bytes in one object"


def test_what_arrives_of_a_reply_after_its_message_was_deleted_is_refused(link):
    """It would have no bound."""
    asked = bounded(link, "one", 2**20)
    reply = own_reply(link, asked)
    session = push_by_fleet(link, link.node, reply).session_id
    link.state.delete_messages(set(ids(asked)))
    for name, each in get_all_nested_objects(reply).items():
        assert not link.state.store_object(link.run, session, name, each.deflate())
    with link.state.session() as database:
        assert database.get(ObjectPushSession, session) is None


def test_partial_replies_do_not_pile_up(link):
    sizes = []
    for number in range(6):
        asked = bounded(link, str(number), 2**20)
        _, answers = pushed(link, asked, random_arrays(number + 1, 2**17), 2**20, but=1)
        assert all(answers)
        sizes.append(stored_bytes(link))
    assert max(sizes) < 2**20
    link.state.delete_messages(set(ids(asked)))  # as for a node that is gone
    assert stored_bytes(link) < 2000


def test_a_node_has_four_replies_stored_at_most(link):
    found = []
    for number in range(6):
        asked = bounded(link, str(number), 2**20)
        found.append(pushed(link, asked, random_arrays(number + 1, 64), 2**20)[1])
    assert [all(answers) for answers in found] == 4 * [True] + 2 * [False]


def test_replies_that_killed_serverapps_left_do_not_silence_their_node(link):
    """Four of them did, for good: the client was left out of each round of each later run."""
    for number in range(4):
        asked = bounded(link, str(number), 2**20)
        pushed(link, asked, random_arrays(number + 1, 64), 2**20)
    killed, task = link.run, link.task
    link.begin_run()  # the resumed run, before Flower notices that the other has ended
    asked = bounded(link, "resumed", 2**20)
    assert all(pushed(link, asked, random_arrays(5, 64), 2**20)[1])
    assert link.state.num_message_res() == 5
    assert link.state.finish_task(task, SubStatus.FAILED, "")
    asked = bounded(link, "round 2", 2**20)
    assert all(pushed(link, asked, random_arrays(6, 64), 2**20)[1])
    assert link.state.num_message_res() == 2
    assert not link.state.get_message_ids_from_run_id(killed)


def push_by_fleet(link, node, reply, tree=None, runtimes=(), **metadata):
    """metadata: fields that are not those of the reply."""
    proto = message_to_proto(reply)
    for field, value in metadata.items():
        setattr(proto.metadata, field, value)
    request = PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[proto],
        message_object_trees=[tree or get_object_tree(reply)],
        clientapp_runtime_list=runtimes,
    )
    return accept_reply(request, link.state)


def own_message(link, src, dst, asked="", record=None):
    about = Metadata(link.run, "", src, dst, asked, "", time.time(), 60.0, "train")
    content = RecordDict({"config": record or ConfigRecord({"is": "odd"})})
    message = Message(content=content, metadata=about)
    assign_message_id(message, message.object_id)
    return message


def own_reply(link, asked, record=None):
    """The node's reply to a message, not sent yet."""
    return own_message(link, link.node, SUPERLINK_NODE_ID, *ids(asked), record)


def test_a_node_cannot_reply_for_another_nor_send_instructions(link):
    asked = link.send("one")
    link.ask()
    forged = own_reply(link, asked)
    instruction = own_message(link, SUPERLINK_NODE_ID, link.node)
    for message in (forged, instruction):
        with pytest.raises(ValueError, match="one reply of its own"):
            push_by_fleet(link, link.other, message)
    assert link.state.num_message_res() == 0
    assert link.state.num_message_ins() == 1
    push_by_fleet(link, link.node, forged)  # its own
    assert link.state.num_message_res() == 1


@pytest.mark.parametrize(
    ("field", "number"),
    [("created_at", np.nan), ("ttl", np.nan), ("runtime", np.nan), ("runtime", np.inf)],
)
def test_a_reply_with_a_time_that_is_no_number_keeps_no_other_from_being_delivered(
    link, field, number
):
    """Every request for the round's replies failed, until the run ended."""
    asked, honest = link.send("one"), link.send("two")
    odd = own_reply(link, asked)
    changed = {"runtimes": [number]} if field == "runtime" else {"runtimes": [1.0], field: number}
    with contextlib.suppress(ValueError):
        push_by_fleet(link, link.node, odd, **changed)
        link.finish(odd)
    reply = link.reply(honest)
    assert link.pull(asked, honest) == whole(reply)
    [run] = link.state.get_run_info(run_ids=[link.run])
    assert run.clientapp_runtime == 0


def test_a_key_announces_no_other_key_s_node(link):
    """A stranger who knew a client's public key kept it connected, so that rounds waited for it."""

    class Context:
        def abort(self, code, details):
            raise PermissionError(details)

    def activate(request, context):
        return message_handler.activate_node(request, link.state)

    def ask(key, announced):
        handler = grpc.unary_unary_rpc_method_handler(activate)
        checked = OwnKeyInterceptor(None)._wrap_method_handler(handler, key)
        request = ActivateNodeRequest(public_key=announced, heartbeat_interval=30.0)
        return checked.unary_unary(request, Context()).node_id

    assert link.state.deactivate_node(link.node)
    for key in (b"two", b"a stranger's"):
        with pytest.raises(PermissionError, match="Not the key of this connection"):
            ask(key, b"one")
    assert link.state.get_nodes(link.run) == {link.other}
    assert ask(b"one", b"one") == link.node
    assert link.state.get_nodes(link.run) == {link.node, link.other}


def test_a_client_that_is_unregistered_is_cut_off_at_once(link):
    """While it is connected: its next request is refused, and nobody waits for it."""

    class Context:
        def abort(self, code, details):
            raise PermissionError(details)

    def ask(request, answer):
        interceptor = OwnKeyInterceptor(SimpleNamespace(state=lambda: link.state))
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
        with pytest.raises(PermissionError, match="Invalid node ID"):
            ask(request, heartbeat)
    with pytest.raises(ValueError, match="No SuperNode found"):
        ask(ActivateNodeRequest(public_key=b"one", heartbeat_interval=30.0), activate)
    link.start()
    assert link.state.get_nodes(link.run) == {link.other}
    [(_, code)] = link.pull(asked)
    assert code == ErrorCode.NODE_UNAVAILABLE


def test_a_late_reply_is_dropped_without_an_error(link):
    """Its SuperNode would take an error for final."""
    asked = link.send("one")
    # made after the message had expired
    assert not push_by_fleet(link, link.node, own_reply(link, asked), ttl=-5.0).objects_to_push
    assert link.state.num_message_res() == 0


def test_replies_that_are_refused_leave_nothing(link):
    """Flower kept a row of each until the run ended, however many a node sent."""
    asked = bounded(link, "one", 2**20)
    large = bounded(link, "two", 10)

    def num_sessions():
        with link.state.session() as session:
            return session.scalar(select(func.count()).select_from(ObjectPushSession))

    before = num_sessions()
    odd = own_message(link, link.node, SUPERLINK_NODE_ID, "no message has this id")
    push_by_fleet(link, link.node, odd)
    push_by_fleet(link, link.node, own_reply(link, large))
    reply = own_reply(link, asked)
    tree = get_object_tree(reply)
    tree.children.append(ObjectTree(object_id="no hash"))
    with pytest.raises(ValueError, match="Invalid object ID"):
        push_by_fleet(link, link.node, reply, tree)
    without_tree = PushMessagesRequest(
        node=Node(node_id=link.node), messages_list=[message_to_proto(reply)]
    )
    with pytest.raises(ValueError, match="the tree of its objects"):
        accept_reply(without_tree, link.state)
    assert num_sessions() == before
    [(_, code)] = link.pull(large)
    assert code == ErrorCode.REPLY_MESSAGE_UNAVAILABLE
    push_by_fleet(link, link.node, reply)
    assert link.state.num_message_res() == 2


def test_objects_registered_under_another_root_do_not_pile_up(link):
    """Nothing deleted them before the run ended."""
    asked = bounded(link, "one", 2**20)
    for number in range(3):
        reply = own_reply(link, asked)
        tree = ObjectTree(object_id=f"{number:064x}", children=[ObjectTree(object_id="f" * 64)])
        with pytest.raises(ValueError, match="the tree of its objects"):
            push_by_fleet(link, link.node, reply, tree)
    assert len(link.store) == 0
    assert link.state.num_message_res() == 0


def test_replies_that_are_never_sent_leave_no_sessions(link):
    sent = []
    for number in range(4):
        asked = bounded(link, str(number), 2**20)
        sent.append(own_reply(link, asked))
        push_by_fleet(link, link.node, sent[-1])
    with link.state.session() as session:
        root = ObjectPushSessionRoot.root_object_id
        kept = session.scalars(select(root).where(root.in_(ids(*sent)))).all()
    assert kept == ids(sent[-1])


@pytest.mark.parametrize("is_root", [False, True])
def test_what_one_node_says_of_an_object_keeps_no_other_from_sending_it(link, is_root):
    """Small records can be foreseen: all messages with them were refused, of the server too."""
    asked, honest = bounded(link, "one", 2**20), link.send("two")
    record = ConfigRecord({"client": "site-a", "round": 3})
    lie = ObjectTree(object_id=record.object_id, children=[ObjectTree(object_id="f" * 64)])
    hostile = own_reply(link, asked)
    tree = get_object_tree(hostile)
    tree.children[0].children.append(lie)
    if is_root:
        assign_message_id(hostile, record.object_id)
        tree = lie
    push_by_fleet(link, link.node, hostile, tree)
    reply = own_reply(link, honest, record)
    link.state.delete_partial_replies = lambda node, but: None  # as if from another node
    answer = push_by_fleet(link, link.node, reply)
    instruction = own_message(link, SUPERLINK_NODE_ID, link.node, record=record)
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(instruction))],
        message_object_trees=[get_object_tree(instruction)],
    )
    sent = runtime_handlers.push_messages(request, link.state, Task(run_id=link.run))
    for message, each in ((reply, answer), (instruction, sent)):
        objects = get_all_nested_objects(message)
        for name in each.objects_to_push:
            assert link.state.store_object(
                link.run, each.session_id, name, objects[name].deflate()
            ), name
    assert link.pull(honest) == whole(reply)
    assert ids(instruction)[0] in {*link.ask(), *link.ask(), *link.ask()}


@pytest.mark.parametrize("field", ["src_node_id", "reply_to_message_id", "run_id", "is_message"])
def test_a_reply_whose_object_names_another_is_refused(link, field):
    """A ServerApp reads the object, not what was announced: it took the reply for another's."""
    asked, other = bounded(link, "one", 2**20), link.send("two")
    about = own_reply(link, asked).metadata
    forged = {"src_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": ids(other)[0], "run_id": 7}
    inner = own_reply(link, asked)
    inner.metadata.__dict__.update({f"_{k}": v for k, v in forged.items() if k == field})
    item = inner if field != "is_message" else ConfigRecord({"no": "message"})
    announced = Message(content=RecordDict(), metadata=about)
    assign_message_id(announced, item.object_id)
    answer = push_by_fleet(link, link.node, announced, get_object_tree(item))
    objects = get_all_nested_objects(item)
    stored = [
        link.state.store_object(link.run, answer.session_id, name, objects[name].deflate())
        for name in objects
    ]
    assert not stored[-1]
    [found] = link.given(asked, other)
    assert found.error.reason == "the reply has the metadata of another"
    assert found.metadata.reply_to_message_id == ids(asked)[0]


def test_a_node_confirms_neither_another_s_message_nor_a_reply(link):
    """Flower deleted it, so that it never arrived."""
    asked = link.send("one")
    link.ask()
    reply = link.reply(asked)

    def confirm(node, message):
        request = ConfirmMessageReceivedRequest(
            node=Node(node_id=node), run_id=link.run, message_object_id=ids(message)[0]
        )
        confirm_own(request, link.state, link.store)

    for node, message in ((link.other, asked), (link.other, reply), (link.node, reply)):
        with pytest.raises(ValueError, match="messages to itself"):
            confirm(node, message)
    assert ids(asked)[0] in link.store
    assert link.pull(asked) == whole(reply)
    confirm(link.node, asked)
    assert ids(asked)[0] not in link.store


@pytest.mark.parametrize(
    ("method", "size", "is_read"),
    [("PushMessages", 2**20, True), ("PushMessages", 2**21, False), ("PushObject", 2**21, True)],
)
def test_a_large_request_is_refused_before_it_is_read(method, size, is_read, monkeypatch, caplog):
    """By any key: 12 MiB took 600 MiB of memory, and nine seconds in which nothing was stored.

    An exception would put a traceback into the log each time.
    """
    handler = grpc.unary_unary_rpc_method_handler(lambda *_: None, request_deserializer=len)
    monkeypatch.setattr(
        NodeAuthServerInterceptor, "intercept_service", lambda self, proceed, call: proceed(call)
    )
    call = SimpleNamespace(method=f"/flwr.proto.Fleet/{method}")
    checked = OwnKeyInterceptor(None).intercept_service(lambda _: handler, call)
    assert checked.request_deserializer(bytes(size)) == (size if is_read else None)
    assert caplog.messages == [f"a request of {size} bytes: refused"] * (not is_read)


def test_a_call_to_a_service_that_is_not_here_is_left_to_grpc():
    """Which answers that there is none; here it was an error inside the SuperLink."""
    call = SimpleNamespace(method="/grpc.health.v1.Health/Check", invocation_metadata=())
    assert OwnKeyInterceptor(None).intercept_service(lambda _: None, call) is None


@pytest.mark.parametrize("garbage", ["key", "kind of key", "time", "time without a zone"])
def test_authentication_metadata_that_cannot_be_read_is_refused_in_one_line(garbage, caplog):
    """Each call put a traceback into the SuperLink's log, whoever made it."""
    private, public = generate_key_pairs()
    times = {"time": "yesterday", "time without a zone": "2026-01-01T00:00:00"}
    written = times.get(garbage, now().isoformat())
    pem = b"no key" if garbage == "key" else public_key_to_bytes(public)
    if garbage == "kind of key":
        pem = (
            Ed25519PrivateKey.generate()
            .public_key()
            .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
    signature = sign_message(private, written.encode())
    headers = {PUBLIC_KEY_HEADER: pem, TIMESTAMP_HEADER: written, SIGNATURE_HEADER: signature}
    method = "/flwr.proto.Fleet/PullMessages"
    call = SimpleNamespace(method=method, invocation_metadata=headers.items())
    answer = OwnKeyInterceptor(None).intercept_service(lambda _: None, call)
    said = []
    answer.unary_unary(None, SimpleNamespace(abort=lambda *why: said.append(why)))
    assert said == [(StatusCode.UNAUTHENTICATED, "Invalid authentication metadata")]
    [line] = caplog.records
    assert line.getMessage().startswith("authentication metadata that cannot be read (")
    assert not line.exc_info


def test_a_message_to_a_node_that_has_left_keeps_no_other_of_its_round_from_being_sent(link):
    """All of them are of one session."""
    gone = own_message(link, SUPERLINK_NODE_ID, 12345, "")
    one, two = (own_message(link, SUPERLINK_NODE_ID, n, "") for n in (link.node, link.other))
    sent = [one, gone, two]
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(each)) for each in sent],
        message_object_trees=[get_object_tree(each) for each in sent],
    )
    answer = runtime_handlers.push_messages(request, link.state, Task(run_id=link.run))
    assert answer.message_ids == [*ids(one), "", *ids(two)]
    objects = get_all_nested_objects(one) | get_all_nested_objects(two)
    for each in answer.objects_to_push:
        content = objects[each].deflate()
        assert link.state.store_object(link.run, answer.session_id, each, content)
    assert link.ask() == ids(one)


def test_messages_that_expired_before_they_were_sent_are_refused_and_no_error(link):
    """A ServerApp takes an error for a failing SuperLink, and sends the same again."""
    link.patch.setattr(runtime_handlers, "validate_message", errors_but_expiry)
    old, new = (own_message(link, SUPERLINK_NODE_ID, n, "") for n in (link.node, link.other))
    old.metadata.created_at -= 2 * old.metadata.ttl
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(each)) for each in (old, new)],
        message_object_trees=[get_object_tree(each) for each in (old, new)],
    )
    answer = runtime_handlers.push_messages(request, link.state, Task(run_id=link.run))
    assert answer.message_ids == ["", *ids(new)]
    request.messages_list[1].metadata.ttl = 0
    with pytest.raises(ValueError, match="ttl"):
        runtime_handlers.push_messages(request, link.state, Task(run_id=link.run))


# --- a full disk ----------------------------------------------------------------------------------


def test_with_a_full_disk_the_superlink_is_unavailable_says_why_and_loses_no_reply(link):
    asked = bounded(link, "one", 2**22)
    arrays = random_arrays(2, 2**20)
    limit = {"pages": 1}

    def full(connection, *_):
        connection.execute(f"PRAGMA max_page_count = {limit['pages']}")

    event.listen(link.state._engine, "checkout", full)
    with pytest.raises(FlowerError) as found:
        pushed(link, asked, arrays, 2**22)
    spec = API_ERROR_MAP[found.value.code]
    assert spec.status_code == StatusCode.UNAVAILABLE
    assert spec.http_status_code == 503
    assert found.value.public_details == "database or disk is full"
    limit["pages"] = 2**30
    _, answers = pushed(link, asked, arrays, 2**22)
    assert all(answers)


def test_an_object_that_is_sent_again_is_not_counted_twice(link):
    asked = bounded(link, "one", 2**20)
    reply, answers = pushed(link, asked, random_arrays(3, 2**18), 2**20, but=1)
    assert all(answers)
    name, item = max(get_all_nested_objects(reply).items(), key=lambda pair: len(pair[1].deflate()))
    with link.store.session() as session:
        number = session.scalar(
            select(ObjectPushSessionRoot.session_id).where(
                ObjectPushSessionRoot.root_object_id == reply.metadata.message_id
            )
        )
    for _ in range(2):
        assert link.state.store_object(link.run, number, name, item.deflate())
    assert link.state.num_message_res() == 1


def test_an_object_that_is_sent_again_as_its_answer_was_lost_counts_as_stored(link):
    asked = bounded(link, "one", 2**20)
    reply, answers = pushed(link, asked, random_arrays(2, 2**12), 2**20)
    assert all(answers)
    for name, item in get_all_nested_objects(reply).items():  # the session has ended meanwhile
        assert link.state.store_object(link.run, "a session that ended", name, item.deflate())
    assert link.pull(asked) == whole(reply)
