"""Flower's internals that Keel touches are what Keel takes them for, in the installed version."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

import flower_adapter

# --- server and inline engine --------------------------------------------------------------------


def test_flowers_simulation_grid_is_recognised_by_its_name():
    grids = {
        name: importlib.import_module(f"flwr.superlink.grid.{module}")
        for name, module in (("InMemoryGrid", "inmemory_grid"), ("HttpGrid", "http_grid"))
    }
    for name, module in grids.items():
        grid = object.__new__(getattr(module, name))
        assert flower_adapter.is_in_process_grid(grid) == (name == "InMemoryGrid")


def test_the_grid_of_a_deployment_retries_through_an_invoker_with_a_time_limit():
    from flwr.superlink.grid.http_grid import HttpGrid

    assert "self._retry_invoker = " in inspect.getsource(HttpGrid)
    grid = object.__new__(HttpGrid)
    grid._retry_invoker = importlib.import_module(
        "flwr.supercore.retry"
    ).make_simple_http_retry_invoker()
    assert grid._retry_invoker.max_time is None  # for ever
    flower_adapter.bound_superlink_retries(grid, 5.0)
    assert grid._retry_invoker.max_time == 5.0
    flower_adapter.bound_superlink_retries(object(), 5.0)


@pytest.fixture
def http_grid(monkeypatch):
    """(Flower's grid of a deployment, the objects of its one reply, those that it has pulled)."""
    module = importlib.import_module("flwr.superlink.grid.http_grid")
    for name in ("pull_objects", "inflate_object_from_contents"):
        monkeypatch.setattr(module, name, vars(module)[name])  # put back afterwards
    objects, pulled = {}, []

    def pull_object(request):
        pulled.append(request.object_id)
        content = objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    tree = SimpleNamespace(object_id="reply", children=[])
    about = SimpleNamespace(message_id="reply", reply_to_message_id="asked")
    answer = SimpleNamespace(
        messages_list=[SimpleNamespace(metadata=about)], message_object_trees=[tree]
    )
    grid = object.__new__(module.HttpGrid)
    grid.node, grid._run = Node(node_id=1), SimpleNamespace(run_id=1)
    client = SimpleNamespace(
        PullMessages=lambda request: answer,
        PullObject=pull_object,
        ConfirmMessageReceived=lambda request: None,
    )
    monkeypatch.setattr(module.HttpGrid, "_runtime_client", client)
    monkeypatch.setattr(
        module,
        "iterate_object_tree",
        lambda tree: [SimpleNamespace(object_id=name) for name in objects],
    )
    monkeypatch.setattr(module, "PullAppMessagesRequest", SimpleNamespace)
    return grid, objects, pulled


def test_a_reply_beyond_its_bound_is_refused_while_it_arrives(http_grid):
    """By name, and with no more than one object of it too many in memory."""
    grid, objects, pulled = http_grid
    objects |= {f"part-{i}": bytes(1000) for i in range(50)}
    flower_adapter.bound_pulls(grid, 5000)
    flower_adapter.bound_pulls(grid, 10_000)  # of the next round
    [reply] = grid.pull_messages(["asked"])
    assert flower_adapter.is_too_large(reply)
    assert reply.metadata.reply_to_message_id == "asked"
    assert len(pulled) == 11


def test_a_damaged_reply_is_an_error_and_costs_no_other_of_its_request(http_grid, task_identity):
    """Those were confirmed, and lost: their clients were asked again."""
    grid, objects, _ = http_grid
    asked = Message(RecordDict(), dst_node_id=2, message_type=MessageType.TRAIN)
    flower_adapter.assign_message_id(asked, "asked")
    reply = Message(RecordDict({"a": ConfigRecord({"b": 1})}), reply_to=asked)
    objects |= {name: item.deflate() for name, item in get_all_nested_objects(reply).items()}
    objects["reply"] = objects.pop(reply.object_id)
    flower_adapter.bound_pulls(grid, 10_000)
    [whole] = grid.pull_messages(["asked"])
    assert whole.content == reply.content
    del objects[reply.content["a"].object_id]
    [damaged] = grid.pull_messages(["asked"])
    assert damaged.metadata.reply_to_message_id == "asked"
    assert damaged.error.code == flower_adapter.CLIENT_FAILED


def test_error_codes_have_the_names_that_are_used():
    codes = (flower_adapter.NO_REPLY, flower_adapter.NODE_UNAVAILABLE, *flower_adapter.CRASHED)
    assert len(set(codes)) == len(codes)
    assert all(isinstance(code, int) for code in codes)
