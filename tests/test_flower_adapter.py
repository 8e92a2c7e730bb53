"""Flower's internals that Keel touches are what Keel takes them for, in the installed version."""

import importlib
import inspect
import tomllib
from contextlib import suppress
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.task_identity import TaskIdentity

import flower_adapter
from keel.deployment.superlink import FLOWER_CONNECTIONS

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


def test_the_grid_of_a_deployment_gives_up_on_errors_that_waiting_does_not_mend():
    grid = SimpleNamespace(_retry_invoker=make_simple_http_retry_invoker())
    flowers = grid._retry_invoker.should_giveup
    flower_adapter.bound_superlink_retries(grid, 5.0)
    gives_up = grid._retry_invoker.should_giveup
    hung = httpx.ConnectTimeout("_ssl.c:990: The handshake operation timed out")
    assert flowers(hung)  # why it is replaced
    assert not gives_up(hung)
    assert not gives_up(httpx.ReadTimeout("The read operation timed out"))
    assert not gives_up(httpx.ConnectError("EOF occurred in violation of protocol (_ssl.c:1000)"))
    assert gives_up(httpx.ConnectError("[SSL] certificate verify failed"))
    request = httpx.Request("POST", "https://superlink")
    for status, is_final in ((500, False), (503, False), (404, True)):
        response = httpx.Response(status, request=request)
        assert gives_up(httpx.HTTPStatusError("", request=request, response=response)) == is_final


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


def test_a_message_needs_a_task_and_takes_the_ids_that_it_is_given(monkeypatch):
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    with pytest.raises(RuntimeError, match="is not set"):
        Message(RecordDict(), dst_node_id=2, message_type=MessageType.TRAIN)
    flower_adapter.begin_task(7)
    message = Message(RecordDict(), dst_node_id=2, message_type=MessageType.TRAIN)
    assert message.metadata.run_id == 7
    for name in ("message_id", "src_node_id"):  # without a setter of its own
        with pytest.raises(AttributeError):
            setattr(message.metadata, name, 1)
    flower_adapter.assign_message_id(message, "abc")
    flower_adapter.assign_source_node(message, 9)
    assert (message.metadata.message_id, message.metadata.src_node_id) == ("abc", 9)
    assert Message(RecordDict(), reply_to=message).metadata.reply_to_message_id == "abc"


def test_exit_handlers_run_when_flower_ends_the_process():
    from flwr.supercore.exit import exit_handler

    def note() -> None:
        pass

    flower_adapter.on_process_exit(note)
    registered = exit_handler.registered_exit_handlers
    assert registered[-1].exit_handler is note
    registered.pop()


def test_error_codes_have_the_names_that_are_used():
    codes = (flower_adapter.NO_REPLY, flower_adapter.NODE_UNAVAILABLE, *flower_adapter.CRASHED)
    assert len(set(codes)) == len(codes)
    assert all(isinstance(code, int) for code in codes)


# --- aggregation ---------------------------------------------------------------------------------


def test_the_trimmed_mean_is_without_the_extremes_of_each_coordinate():
    from flower_adapter.aggregation import trim_mean

    values = np.array([[0.0, 9.0], [1.0, -50.0], [2.0, 3.0], [60.0, 3.0]])
    assert trim_mean(values, 0.25).tolist() == [1.5, 3.0]


def test_multi_krum_takes_those_with_the_nearest_neighbours():
    from flower_adapter.aggregation import select_multikrum

    contents = [
        RecordDict(
            {
                "arrays": ArrayRecord([np.array([value])]),
                "config": ConfigRecord({"number": number}),
                "metrics": MetricRecord({"num-examples": 1}),
            }
        )
        for number, value in enumerate((0.0, 1.0, 1.1, 1.3, 99.0))
    ]
    # of 5 with 1 malicious, the sums of squares to the 2 nearest are 2.21, 0.1, 0.05, 0.13, ...
    for count, expected in ((1, {2}), (2, {1, 2}), (4, {0, 1, 2, 3})):
        chosen = select_multikrum(contents, num_malicious_nodes=1, num_nodes_to_select=count)
        assert {content["config"]["number"] for content in chosen} == expected


# --- the command line ----------------------------------------------------------------------------


def test_the_connections_that_flower_makes_are_known():
    from flwr.cli.constant import DEFAULT_FLOWER_CONFIG_TOML

    made = tomllib.loads(DEFAULT_FLOWER_CONFIG_TOML)["superlink"]
    named = {name for name, connection in made.items() if isinstance(connection, dict)}
    assert named == set(FLOWER_CONNECTIONS)


def test_of_a_reply_beyond_its_bound_nothing_more_is_fetched():
    fetched = []

    def pull(object_ids, fetch, **options):  # as Flower's, which fetches several at once
        for object_id in object_ids:
            with suppress(ObjectPullError):
                fetch(object_id)
        return {}

    bounded = flower_adapter.BoundedPull(pull)
    bounded.max_bytes = 10
    bounded(["a", "b", "c", "d"], lambda object_id: fetched.append(object_id) or b"12345678")
    assert fetched == ["a", "b"]
