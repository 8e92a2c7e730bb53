"""The workers of a simulation: this process, or the nodes of Flower's simulation."""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from client_app.handlers import answer
from flower_adapter import assign_message_id, begin_task

POLL_S, SETTLE_S = 0.02, 0.5
TTL_S = 30 * 86400.0  # a message that expires is lost with its reply


class InlineWorkers:
    """One worker, which is this process: clients train one after the other.

    Messages are Flower's records, which pass tensors without a copy.
    """

    num, parts = 1, 0

    def __init__(self) -> None:
        self.run_id = secrets.randbits(62)
        begin_task(self.run_id)

    def answers(
        self, contents: Sequence[RecordDict], kind: str, seconds: float
    ) -> Iterator[tuple[int, RecordDict | Error]]:
        """Implements `Workers.answers`; nothing is late."""
        for k, content in enumerate(contents):
            message = Message(content, dst_node_id=1, message_type=kind)
            assign_message_id(message, secrets.token_hex(8))
            yield k, answer(message, Context(self.run_id, 1, {}, RecordDict(), {}))


class FlowerWorkers:
    """The nodes of Flower's simulation. check: raises the error that has ended it."""

    parts = 4

    def __init__(self, grid: Grid, check: Callable[[], None] = lambda: None) -> None:
        self.grid, self.check = grid, check
        self.nodes = registered_nodes(grid, check)
        self.num = len(self.nodes)

    def answers(
        self, contents: Sequence[RecordDict], kind: str, seconds: float
    ) -> Iterator[tuple[int, RecordDict | Error]]:
        """Implements `Workers.answers`."""
        deadline = time.monotonic() + seconds
        messages = [
            Message(content, dst_node_id=self.nodes[k % self.num], message_type=kind, ttl=TTL_S)
            for k, content in enumerate(contents)
        ]
        self.grid.push_messages(messages)
        places = {message.metadata.message_id: k for k, message in enumerate(messages)}
        del messages
        while places and time.monotonic() < deadline:
            arrived = deque(self.grid.pull_messages(list(places)))
            if not arrived:
                self.check()
                time.sleep(POLL_S)
            while arrived:
                reply = arrived.popleft()
                place = places.pop(reply.metadata.reply_to_message_id)
                yield place, reply.error if reply.has_error() else reply.content


def registered_nodes(grid: Grid, check: Callable[[], None]) -> list[int]:
    """The nodes of Flower's simulation once their number does not change any more."""
    nodes: list[int] = []
    while not nodes or sorted(grid.get_node_ids()) != nodes:
        check()
        nodes = sorted(grid.get_node_ids())
        time.sleep(SETTLE_S)
    return nodes
