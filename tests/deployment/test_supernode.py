"""The SuperNode's state: no message is left without an answer once its ClientApp has ended."""

import pytest
from flwr.app import Message, Metadata, RecordDict
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
    for each in (message("a"), message("b", run=8)):
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


def test_a_reply_left_over_from_another_run_does_not_go_in_the_place_of_the_one_waited_for():
    state = AnsweringNodeState(InMemoryObjectStore())
    state.set_node_id(2)
    state.store_message(message("old", run=6))
    state._store_error_replies({6}, CLIENT_APP_CRASHED_ERROR)
    state.delete_messages(message_ids=["old"])  # and its reply stays
    state.store_message(message("new"))
    assert not state.get_messages(is_reply=True)  # Flower's: the old one, and the turn is over
    state._store_error_replies({run_id}, CLIENT_APP_CRASHED_ERROR)
    answered = [each.metadata.reply_to_message_id for each in state.get_messages(is_reply=True)]
    assert answered == ["old", "new"]


def test_what_is_left_over_is_sent_when_no_message_waits_for_a_reply():
    state = AnsweringNodeState(InMemoryObjectStore())
    state.set_node_id(2)
    state.store_message(message("old", run=6))
    state.store_message(message("refused"))
    state._store_error_replies({6}, CLIENT_APP_CRASHED_ERROR)
    state.delete_messages(message_ids=["refused"])
    answered = [each.metadata.reply_to_message_id for each in state.get_messages(is_reply=True)]
    assert answered == ["old"]
