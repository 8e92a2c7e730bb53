"""The SuperNode's state: no message is left without an answer once its ClientApp has ended."""

import pytest
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
)

from deployment.supernode import AnsweringNodeState

run_id = 7


def message(name: str, run: int = run_id) -> Message:
    about = Metadata(run, name, 1, 2, "", "", 0.0, 3600.0, "train")
    return Message(content=RecordDict(), metadata=about)


@pytest.mark.parametrize("fetched", [True, False])
@pytest.mark.parametrize("kind", [AnsweringNodeState, InMemoryNodeState])
def test_a_message_that_was_never_fetched_is_answered_too(kind, fetched):
    state = kind(InMemoryObjectStore())
    state.set_node_id(2)
    for each in (message("b", run=8), message("a")):
        state.store_message(each)
    if fetched:
        state.get_messages(run_ids=[run_id], is_reply=False)
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    replies = state.get_messages(run_ids=[run_id, 8], is_reply=True)
    answered = [reply.metadata.reply_to_message_id for reply in replies]
    # Flower's own says nothing of a message that was not fetched: what the other is there for
    assert answered == (["a"] if fetched or kind is AnsweringNodeState else [])
    assert all(reply.has_error() for reply in replies)
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    assert not state.get_messages(run_ids=[run_id], is_reply=True)  # once


@pytest.fixture
def state():
    state = AnsweringNodeState(InMemoryObjectStore())
    state.set_node_id(2)
    return state


def answered(state):
    """The messages whose replies the SuperNode would send now."""
    return [each.metadata.reply_to_message_id for each in state.get_messages(is_reply=True)]


def begin_reply(state, to, run=run_id):
    """A ClientApp's reply of which nothing has come but its name."""
    metadata = Metadata(run, "", 2, 1, to, "", 1.0, 3600.0, "train")
    reply = Message(content=RecordDict({"config": ConfigRecord({"to": to})}), metadata=metadata)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    tree = get_object_tree(reply)
    assert state.store_message_and_object_tree(reply, tree, state.start_session(run))[0]
    return reply


@pytest.mark.parametrize("run", [6, run_id])
def test_a_reply_that_is_left_over_does_not_go_in_the_place_of_the_one_waited_for(state, run):
    state.store_message(message("old", run=run))
    state._store_error_replies({run}, CLIENT_APP_CRASHED_ERROR)
    state.delete_messages(message_ids=["old"])  # and its reply stays
    state.store_message(message("new"))
    assert answered(state) == []  # Flower's: the old one, and the turn is over
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    assert answered(state) == ["old", "new"]


def test_what_is_left_over_is_sent_when_no_message_waits_for_a_reply(state):
    state.store_message(message("old", run=6))
    state.store_message(message("refused"))
    state._store_error_replies({6}, CLIENT_APP_CRASHED_ERROR)
    state.delete_messages(message_ids=["refused"])
    assert answered(state) == ["old"]


def test_a_message_that_is_taken_again_begins_anew(state):
    state.store_message(message("a"))
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    state.delete_messages(message_ids=["a"])  # its arrays did not come; it is given again
    state.store_message(message("a"))
    assert answered(state) == []
    assert not state.object_store.store  # nor does the old reply take room
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    assert answered(state) == ["a"]


def test_a_reply_is_sent_once_it_is_whole(state):
    state.store_message(message("a"))
    reply = begin_reply(state, "a")
    assert answered(state) == []  # Flower's: it would wait for the rest of it
    for name, item in get_all_nested_objects(reply).items():
        state.object_store.put(name, item.deflate())
    assert answered(state) == ["a"]


def test_a_reply_whose_clientapp_died_on_the_way_becomes_an_error(state):
    state.store_message(message("a"))
    begin_reply(state, "a")
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    [reply] = state.get_messages(is_reply=True)
    assert reply.has_error()
    assert reply.metadata.reply_to_message_id == "a"
