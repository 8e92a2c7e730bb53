"""What trains: one interface to the workers of a simulation and to the sites of a deployment.

The workers of a simulation are this process, or the nodes of Flower's simulation.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar, Protocol

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from client_app.handlers import answer
from data.sources import Source
from flower_adapter import NO_REPLY, assign_message_id, begin_task
from protocol.config import RunConfig
from protocol.messages import MachineReport, RosterEntry, error_reason
from protocol.simulated import joined_content, split_reply
from protocol.text import in_one_line
from server_app.roster import check_simulated_roster, save_roster
from server_app.run_reader import ROSTER_FILE
from server_app.simulated_roster import SimulatedRoster
from strategies.cohort import FIRST_NODE

PART_BYTES = 2**27  # of a worker's reply: the server has a few of them in memory
POLL_S, SETTLE_S = 0.02, 0.5
TTL_S = 30 * 86400.0  # a message that expires is lost with its reply


class Pool(Protocol):
    """The clients of a run, and the way to ask them.

    roster: node id to the client that is there. Client n of a simulation has node FIRST_NODE + n; a
    site's node changes when its SuperNode is registered again. stores_state_here: clients store
    their state in the run directory. machines: of a simulation's workers, as they describe them.
    """

    stores_state_here: ClassVar[bool]
    machines: Sequence[MachineReport]

    @property
    def roster(self) -> Mapping[int, RosterEntry]:
        """Node id to client."""

    def ask(
        self,
        messages: Sequence[Message],
        what: str,
        on_reply: Callable[[Message], None],
        *,
        max_bytes: int,
        before_resend: Callable[[int], None],
    ) -> set[int]:
        """Send the messages; returns the nodes that gave no answer within `round-timeout`.

        on_reply: gets exactly one reply to each message, an error where none came, as soon as it is
        there; its source is the node that was asked. what: they ask for, such as "round 3", for the
        log. max_bytes: of a reply; a larger one is an error. before_resend: called with the node
        before its message is sent a second time.
        """

    def absent(self) -> set[str]:
        """Clients that are not connected, and so not asked; also updates `roster`."""

    def returned(self, clients: Set[str]) -> set[str]:
        """Those of these clients, in backoff, that answer again; does not wait for them."""

    def record_in(self, path: Path, note: Callable[..., Any]) -> None:
        """Keep `roster.json` in the run directory, and note who takes part, with the audit log."""


class Workers(Protocol):
    """The workers of a simulation: each plays any client, one after the other.

    num: of them. parts: messages of a round for each; 0: one message a client.
    """

    num: int
    parts: int

    def answers(
        self, contents: Sequence[RecordDict], kind: str, seconds: float
    ) -> Iterator[tuple[int, RecordDict | Error]]:
        """Have messages of this kind answered; yields (place in `contents`, answer) as they come.

        Ends after so many seconds, also if answers are missing.
        """


class WorkerPool:
    """The clients of a simulation, client n with partition n of the run's data, played by workers.

    The result does not depend on the number of workers.
    """

    stores_state_here: ClassVar[bool] = True

    def __init__(
        self,
        workers: Workers,
        config: RunConfig,
        source: Source,
        num_clients: int,
        machines: Sequence[MachineReport] = (),
    ) -> None:
        self.workers, self.config, self.machines = workers, config, machines
        self.roster = SimulatedRoster(config, source, num_clients)
        check_simulated_roster(self.roster)

    def ask(
        self,
        messages: Sequence[Message],
        what: str,
        on_reply: Callable[[Message], None],
        *,
        max_bytes: int,
        before_resend: Callable[[int], None],
    ) -> set[int]:
        """Implements `Pool.ask`. `round-timeout` is for each client that a worker plays in turn.

        RuntimeError if a worker is lost.
        """
        kind = messages[0].metadata.message_type if messages else ""
        waiting = dict(enumerate(self.parts(messages, kind, max_bytes)))
        turns = max(map(len, waiting.values()), default=0) * -(-len(waiting) // self.workers.num)
        timeout_s = self.config.rounds.round_timeout
        contents = [self.content(part) for part in waiting.values()]
        for k, result in self.workers.answers(contents, kind, timeout_s * turns):
            if isinstance(result, Error):
                raise RuntimeError(
                    f"{what}: a worker of the simulation is lost "
                    f"({in_one_line(error_reason(result))}): resume the run"
                )
            part = waiting.pop(k)
            for message, reply in zip(part, split_reply(result, len(part)), strict=True):
                on_reply(Message(reply, reply_to=message))
        silent = [message for part in waiting.values() for message in part]
        for message in silent:
            reason = f"no answer within round-timeout = {timeout_s:g} s"
            on_reply(Message(Error(NO_REPLY, reason), reply_to=message))
        return {message.metadata.dst_node_id for message in silent}

    def parts(self, messages: Sequence[Message], kind: str, max_bytes: int) -> list[list[Message]]:
        """The messages of one kind, grouped into those that a worker gets at once, largest first.

        To train there are several for each worker, and an idle worker takes the next. A worker's
        reply has at most PART_BYTES, or one client's `max_bytes`.
        """
        if not self.workers.parts:
            return [[message] for message in messages]
        num = self.workers.num * (self.workers.parts if kind == MessageType.TRAIN else 1)
        num = max(num, -(-len(messages) * max_bytes // PART_BYTES))
        clients = [message.metadata.dst_node_id - FIRST_NODE for message in messages]
        sizes = [1 + int(self.roster.sizes[client, 0]) for client in clients]
        return [[messages[i] for i in part] for part in deal(sizes, num)]

    def content(self, part: Sequence[Message]) -> RecordDict:
        """The content of one message to a worker."""
        clients = [message.metadata.dst_node_id - FIRST_NODE for message in part]
        return joined_content([message.content for message in part], clients, len(self.roster))

    def absent(self) -> set[str]:
        """Implements `Pool.absent`: no client of a simulation is ever away."""
        return set()

    def returned(self, clients: Set[str]) -> set[str]:
        """Implements `Pool.returned`: nobody is asked before the backoff has ended."""
        return set()

    def record_in(self, path: Path, note: Callable[..., Any]) -> None:
        """Implements `Pool.record_in`."""
        note("joined", simulated=len(self.roster))
        save_roster(path / ROSTER_FILE, self.roster)


def deal(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices into `sizes` in at most so many parts of about the same sum, largest first.

    Longest first: each goes to the part with the smallest sum so far (Graham 1969).
    """
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(sizes)))]
    sums = [0] * len(parts)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        smallest = sums.index(min(sums))
        sums[smallest] += sizes[i]
        parts[smallest].append(i)
    order = sorted(range(len(parts)), key=lambda k: -sums[k])
    return [sorted(parts[k]) for k in order]


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
