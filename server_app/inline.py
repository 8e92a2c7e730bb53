"""The inline engine: ServerApp and ClientApp in one process, without Flower's runtime.

For tests, debugging, benchmarks, and machines too small for Ray. Messages are Flower's records,
which pass tensors without a copy. On one CPU the model is bit-identical to that of `flwr run`.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

import client_app.app
from client_app.handlers import forget_data
from flower_adapter import assign_message_id, begin_task
from protocol.options import OptionValue
from server_app.federation import run_federation
from server_app.logical_clients import OwnGrid
from server_app.observers import RunObserver

MAX_NODES = 1000
NodeConfig = dict[str, OptionValue]


class InlineGrid(OwnGrid):
    """Clients in this process, which answer one after the other, in the order of the messages."""

    has_own_clients: ClassVar[bool] = True
    simulates_clients = False  # each node is one client, unless `run_inline` changes this

    def __init__(self, app: ClientApp, node_configs: Sequence[NodeConfig]) -> None:
        self.app = app
        run_id = secrets.randbits(62)
        begin_task(run_id)
        self.contexts = {
            node: Context(run_id, node, config, RecordDict(), {})
            for node, config in enumerate(node_configs, start=2)
        }
        self.waiting: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """2, 3, ... in the order of the node configs."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages; each is answered when its reply is pulled."""
        ids = []
        for message in messages:
            message_id = secrets.token_hex(8)
            assign_message_id(message, message_id)
            self.waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The reply to the first of these messages, made now."""
        asked = set(message_ids)
        due = [message_id for message_id in self.waiting if message_id in asked]
        if not due:
            return []
        return [self.answer(self.waiting.pop(due[0]))]

    def answer(self, message: Message) -> Message:
        """The client's reply to one message."""
        return self.app(message, self.contexts[message.metadata.dst_node_id])


def simulated_nodes(num_clients: int) -> list[NodeConfig]:
    """The node configs that Flower's simulation gives to this number of clients, at least one."""
    if num_clients < 1:
        raise ValueError(f"num-clients = {num_clients}: a run needs at least 1 client")
    return [{"partition-id": i, "num-partitions": num_clients} for i in range(num_clients)]


def simulation(num_clients: int, num_workers: int = 0) -> InlineGrid:
    """The grid of a simulation; its arguments are as those of `run_inline`."""
    is_logical = num_clients > MAX_NODES or num_workers > 0
    nodes = simulated_nodes((num_workers or 1) if is_logical else num_clients)
    grid = InlineGrid(client_app.app.app, nodes)
    grid.simulates_clients = is_logical
    return grid


def run_inline(
    overrides: Mapping[str, OptionValue],
    num_clients: int,
    node_configs: Sequence[NodeConfig] | None = None,
    observers: Sequence[RunObserver] = (),
    num_workers: int = 0,
) -> Path:
    """A run in this process; returns its directory. Raises what `run_federation` raises.

    node_configs: one per client, for clients that are not partitions of the run's source.
    num_workers: nodes that simulate the clients as logical ones; 0: one node for more than
    `MAX_NODES` clients, otherwise one per client.
    """
    forget_data()
    overrides = dict(overrides)
    if node_configs is None:
        grid = simulation(num_clients, num_workers)
    else:
        grid = InlineGrid(client_app.app.app, node_configs)
    if grid.simulates_clients:
        expected = overrides.get("num-clients", num_clients)
        if expected != num_clients:
            raise ValueError(
                f"num-clients = {expected}, but the run is started for {num_clients} clients: "
                "leave out num-clients, or set both to the same number"
            )
        if "resume" not in overrides:
            overrides["num-clients"] = num_clients
    return run_federation(grid, overrides, observers=observers).path
