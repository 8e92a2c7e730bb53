"""A grid of Flower's whose nodes are ClientApps in this process, and runs of a deployment on it."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

import client_app.app
from flower_adapter import assign_message_id, begin_task
from protocol.options import OptionValue
from server_app.app import sites_of
from server_app.observers import RunObserver
from server_app.run import run_federation

NodeConfig = dict[str, OptionValue]


class InlineGrid(Grid):
    """Nodes 2, 3, ... in the order of their configs; each answers when its reply is pulled."""

    def __init__(self, node_configs: Sequence[NodeConfig]) -> None:
        run_id = secrets.randbits(62)
        begin_task(run_id)
        self.contexts = {
            node: Context(run_id, node, config, RecordDict(), {})
            for node, config in enumerate(node_configs, start=2)
        }
        self.waiting: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """There is one run."""

    @property
    def run(self) -> Any:
        return SimpleNamespace(override_config={})

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(secrets.token_hex(8))
            assign_message_id(message, ids[-1])
            self.waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        asked = set(message_ids)
        due = [message_id for message_id in self.waiting if message_id in asked]
        return [self.answer(self.waiting.pop(each)) for each in due[:1]]

    def answer(self, message: Message) -> Message:
        """The client's reply to one message."""
        return client_app.app.app(message, self.contexts[message.metadata.dst_node_id])


def simulated_nodes(num_clients: int) -> list[NodeConfig]:
    """Sites whose data are partitions of the run's source, as in a trial on one machine."""
    return [{"partition-id": i, "num-partitions": num_clients} for i in range(num_clients)]


def run_on(
    grid: Grid, overrides: Mapping[str, OptionValue], observers: Sequence[RunObserver] = ()
) -> Path:
    """The directory of a run of a deployment whose clients are the nodes of this grid."""
    with patch("server_app.exchange.POLL_S", 0.0), patch("server_app.exchange.MAX_POLL_S", 0.01):
        make_pool = lambda experiment, resumed: sites_of(grid, experiment, resumed)  # noqa: E731
        return run_federation(make_pool, overrides, observers=observers).path
