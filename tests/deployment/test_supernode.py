"""The SuperNode's state: each message has one answer, its own, once its ClientApp has ended."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.common.constant import SubStatus
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import TaskType
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

import flower_adapter.supernode
from flower_adapter import assign_message_id
from flower_adapter.supernode import AnsweringNodeState, longest_wait_s
from keel.deployment.__main__ import main

run_id = 7


def with_id(message: Message) -> Message:
    assign_message_id(message, message.object_id)
    return message


class Node:
    """The state as the SuperNode's loop and a ClientApp use it."""

    def __init__(self, kind=AnsweringNodeState):
        self.state = kind(InMemoryObjectStore())
        self.state.set_node_id(2)

    def take(self, name, run=run_id):
        """A message arrives; its task is begun. (message, task)"""
        about = Metadata(run, "", 1, 2, "", "", 0.0, 3600.0, "train")
        content = RecordDict({"config": ConfigRecord({"name": name})})
        message = with_id(Message(content=content, metadata=about))
        task = self.state.create_task(TaskType.CLIENT_APP, run)
        self.state.store_message(message)
        self.state._store_generated_message(message)
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)
        return message, task

    def begin_reply(self, message):
        """Of the ClientApp's reply nothing has come but its name."""
        content = RecordDict({"config": ConfigRecord({"to": message.metadata.message_id})})
        reply = with_id(Message(content, reply_to=message))
        session = self.state.start_session(message.metadata.run_id)
        self.state.record_message_processing_start(message.metadata.message_id)
        assert self.state.store_message_and_object_tree(reply, get_object_tree(reply), session)[0]
        return reply

    def finish_reply(self, reply):
        for name, item in get_all_nested_objects(reply).items():
            self.state.object_store.put(name, item.deflate())

    def end(self, task, sub_status=SubStatus.FAILED):
        assert self.state.finish_task(task, sub_status, "")

    def sent(self):
        """(message answered, whether by an error) of each reply that the loop would send now."""
        replies = self.state.get_messages(is_reply=True)
        return [(each.metadata.reply_to_message_id, each.has_error()) for each in replies]

    def forget(self, message):
        """The SuperNode could not take the message whole."""
        self.state.delete_messages(message_ids=[message.metadata.message_id])
        self.state.object_store.delete(message.metadata.message_id)


@pytest.fixture
def node():
    return Node()


def error_to(message):
    return [(message.metadata.message_id, True)]


def reply_to(message):
    return [(message.metadata.message_id, False)]


@pytest.mark.parametrize("sub_status", [SubStatus.FAILED, SubStatus.COMPLETED])
@pytest.mark.parametrize("was_fetched", [True, False])
def test_a_message_whose_task_ends_without_a_reply_is_answered_with_an_error(
    node, sub_status, was_fetched
):
    message, task = node.take("a")
    node.state.object_store.preregister(run_id, get_object_tree(message))
    node.finish_reply(message)
    if was_fetched:
        assert len(node.state.get_messages(run_ids=[run_id], is_reply=False)) == 1
    assert node.sent() == []
    node.end(task, sub_status)
    assert node.sent() == error_to(message)
    assert node.sent() == []  # once
    assert node.state.object_store.get(message.metadata.message_id) is None


def test_flowers_own_state_does_not_answer():
    """What this class is there for: when Flower answers too, it can go."""
    node = Node(InMemoryNodeState)
    node.end(node.take("a")[1])
    assert node.sent() == []


def test_a_clientapp_without_heartbeats_is_answered_for(node, monkeypatch):
    message, _ = node.take("a")
    later = datetime.now(UTC) + timedelta(hours=1)
    monkeypatch.setattr(in_memory_corestate, "now", lambda: later)
    assert (node.sent() or node.sent()) == error_to(message)


def test_a_reply_is_sent_once_it_is_whole(node):
    message, task = node.take("a")
    reply = node.begin_reply(message)
    assert node.sent() == []  # Flower's: it would wait for the rest of it
    node.finish_reply(reply)
    node.end(task, SubStatus.COMPLETED)
    assert node.sent() == reply_to(message)


@pytest.mark.parametrize("answers_another", [True, False])
def test_a_reply_beside_the_whole_one_is_not_waited_for(node, answers_another):
    """A ClientApp that began one silenced its SuperNode, also in later runs."""
    message, task = node.take("a")
    other = message
    if answers_another:
        about = Metadata(run_id, "", 1, 2, "", "", 0.0, 3600.0, "train")
        other = with_id(Message(content=RecordDict(), metadata=about))
    second = with_id(Message(RecordDict({"b": ConfigRecord({"c": 1})}), reply_to=other))
    session = node.state.start_session(run_id)
    tree = get_object_tree(second)
    assert node.state.store_message_and_object_tree(second, tree, session)[0]
    node.finish_reply(node.begin_reply(message))
    node.end(task, SubStatus.COMPLETED)
    assert node.sent() == reply_to(message)
    assert second.metadata.message_id not in node.state.msg_store
    assert second.metadata.message_id not in node.state.object_store


@pytest.mark.parametrize("sub_status", [SubStatus.FAILED, SubStatus.COMPLETED])
def test_half_a_reply_becomes_an_error(node, sub_status):
    message, task = node.take("a")
    node.begin_reply(message)
    node.end(task, sub_status)
    assert node.sent() == error_to(message)


def test_the_late_end_of_a_task_does_not_touch_the_next_message(node):
    message, task = node.take("a")
    node.finish_reply(node.begin_reply(message))
    assert node.sent() == reply_to(message)
    node.forget(message)  # as after sending
    following, following_task = node.take("b")
    node.end(task)
    node.state._on_task_tokens_expired([Task(task_id=task, type=TaskType.CLIENT_APP)])
    assert node.sent() == []
    node.finish_reply(node.begin_reply(following))
    node.end(following_task, SubStatus.COMPLETED)
    assert node.sent() == reply_to(following)


@pytest.mark.parametrize("run", [6, run_id])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_reply_that_is_left_over_does_not_go_in_the_place_of_the_one_waited_for(
    node, run, is_whole
):
    old, _ = node.take("old", run)
    reply = node.begin_reply(old)
    if is_whole:
        node.finish_reply(reply)
    node.forget(old)
    new, _ = node.take("new")
    assert node.sent() == []
    node.finish_reply(node.begin_reply(new))
    assert node.sent() == reply_to(new)


def test_a_message_delivered_again_starts_over(node):
    message, task = node.take("a")
    node.end(task)
    node.forget(message)  # its arrays did not come; it is given again
    message, task = node.take("a")
    assert node.sent() == []
    node.end(task)
    assert node.sent() == error_to(message)


def test_answered_messages_are_deleted(node):
    for name in "ab":
        message, task = node.take(name)
        node.end(task)
        assert node.sent() == error_to(message)
        node.forget(message)
    replies = list(node.state.msg_store)
    assert len(replies) == 1  # b's, until the next message: the loop takes it out once sent
    node.state._drop(lambda about: True)
    assert not node.state.object_store.store


def test_a_supernode_that_gave_up_ends_although_a_thread_of_it_may_go_on(monkeypatch):
    """The server's certificate has expired: only a new process connects again."""
    monkeypatch.setattr(flower_adapter.supernode, "main", lambda: None)
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        main("supernode", [])
    assert ended.value.code == 1


@pytest.mark.parametrize("text", ["a quarter", "0", "-1", "nan"])
def test_an_interval_that_is_no_number_of_seconds_is_refused_in_one_line(monkeypatch, text):
    monkeypatch.setenv("KEEL_POLL_S", text)
    with pytest.raises(SystemExit, match=f"^error: KEEL_POLL_S = '{text}': expected a number"):
        longest_wait_s()


def test_a_program_sends_flower_no_reports():
    """Flower's own programs report each start and end of a process, also of a ClientApp."""
    names = ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")
    env = {key: value for key, value in os.environ.items() if key not in names}
    code = (
        "import os, keel.deployment.__main__; from flwr.supercore import telemetry; "
        f"print(telemetry.FLWR_TELEMETRY_ENABLED, os.environ[{names[1]!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "1"], done.stderr
