"""A message that did not arrive is given again, a few times; any other never is."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import NoObjectInStoreError

from deployment import superlink_server
from deployment.superlink_server import Deliveries, most


class State:
    """Messages of one node, first in first out; Flower's answer takes the first that is new."""

    def __init__(self, ids):
        self.new = list(ids)
        self.made_new = []
        self.status = Status.RUNNING

    def get_run_status(self, runs):
        assert runs == {3}
        return {3: SimpleNamespace(status=self.status)}

    @contextmanager
    def session(self):
        yield SimpleNamespace(execute=self.execute)

    def execute(self, statement):
        compiled = statement.compile()
        assert "UPDATE message_ins SET delivered_at" in str(compiled)
        assert compiled.params["delivered_at"] == ""
        self.made_new.append(compiled.params["message_id_1"])
        self.new.insert(0, compiled.params["message_id_1"])


class Store:
    """Every message is two objects, its arrays and itself."""

    def __init__(self, missing=()):
        self.missing = missing

    def get_object_tree(self, message):
        if message in self.missing:
            raise NoObjectInStoreError(message)
        return ObjectTree(object_id=message, children=[ObjectTree(object_id=f"{message}'s")])

    def get(self, name):
        return b"" if name in self.missing else b"..."


@pytest.fixture
def deliveries(monkeypatch):
    def pull(request, state, store):
        ids = [state.new.pop(0)] if state.new else []
        messages = [SimpleNamespace(metadata=SimpleNamespace(message_id=i, run_id=3)) for i in ids]
        return SimpleNamespace(messages_list=messages)

    monkeypatch.setattr(superlink_server, "SqlLinkState", State)
    monkeypatch.setattr(superlink_server, "pull", pull)
    monkeypatch.setattr(superlink_server, "confirm", lambda request, state, store: "confirmed")
    return Deliveries()


def given(deliveries, state, node=7, store=None):
    request = SimpleNamespace(node=SimpleNamespace(node_id=node))
    answer = deliveries.pull_messages(request=request, state=state, store=store or Store())
    return [message.metadata.message_id for message in answer.messages_list]


def confirm(deliveries, state, message, node=7):
    request = SimpleNamespace(node=SimpleNamespace(node_id=node), message_object_id=message)
    assert deliveries.confirm_message_received(request, state, None) == "confirmed"


def test_what_was_confirmed_is_not_given_again(deliveries):
    state = State(["one", "two"])
    assert given(deliveries, state) == ["one"]
    confirm(deliveries, state, "one")
    assert given(deliveries, state) == ["two"]
    confirm(deliveries, state, "two")
    assert given(deliveries, state) == []
    assert state.made_new == []


def test_who_asks_again_without_having_confirmed_gets_it_again(deliveries):
    state = State(["one", "two"])
    assert given(deliveries, state) == ["one"]
    assert given(deliveries, state) == ["one"]  # the answer before was lost
    confirm(deliveries, state, "one")
    assert given(deliveries, state) == ["two"]
    assert state.made_new == ["one"]


def test_another_nodes_question_says_nothing_of_it(deliveries):
    state = State(["one"])
    assert given(deliveries, state, node=7) == ["one"]
    assert given(deliveries, state, node=8) == []
    assert state.made_new == []


def test_a_message_that_never_arrives_does_not_block_its_node(deliveries):
    state = State(["broken", "next"])
    assert [given(deliveries, state) for _ in range(most + 2)] == [["broken"]] * (most + 1) + [
        ["next"]
    ]


def test_a_message_of_a_run_that_has_ended_is_not_given_again(deliveries):
    state = State(["one", "two"])
    assert given(deliveries, state) == ["one"]
    state.status = Status.FINISHED
    assert given(deliveries, state) == ["two"]
    assert state.made_new == []


@pytest.mark.parametrize("missing", ["one", "one's"])
def test_a_message_that_is_not_whole_is_not_given_again(deliveries, missing):
    state, store = State(["one", "two"]), Store([missing])
    assert given(deliveries, state, store=store) == ["one"]
    assert given(deliveries, state, store=store) == ["two"]
    assert state.made_new == []
