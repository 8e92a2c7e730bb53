"""Logical clients: any number of them on any number of nodes, which simulate those of a message.

`LogicalGrid` looks like a grid with a node for every client. It sends each worker, a node of the
grid below, one message with its share of the round's clients. In training, the smallest eighth of
many clients is sent in later messages, split again in the same way, so that no worker idles at the
end. The model is in each message once.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_adapter import assign_message_id, has_own_clients, is_in_process_grid
from protocol.messages import find_record, simulated_content, simulated_replies
from strategies.sampling import FIRST_NODE

TAIL_SHARE = 8  # the smallest 1 / 8 of the clients is sent later, and so on
MIN_TAIL = 4  # clients per worker, at least, to send some of them later


def place(times: Sequence[float], seconds_per_unit: Sequence[float]) -> list[list[int]]:
    """Assign clients to workers; returns each worker's indices into `times`.

    Longest first, each client goes to the worker that would finish it first. seconds_per_unit: of
    `times`, by worker. The round takes at most 4/3 - 1/(3 W) of the shortest possible time if the W
    workers are equally fast (Graham 1969), 5/3 if not (Friesen 1987).
    """
    shares: list[list[int]] = [[] for _ in seconds_per_unit]
    free_s = [0.0] * len(seconds_per_unit)
    for i in sorted(range(len(times)), key=lambda i: -times[i]):
        done_s = [s + times[i] * rate for s, rate in zip(free_s, seconds_per_unit, strict=True)]
        worker = min(range(len(done_s)), key=done_s.__getitem__)
        free_s[worker] = done_s[worker]
        shares[worker].append(i)
    return shares


class OwnGrid(Grid):
    """A grid without what Flower's processes ask of it and Keel does not."""

    is_in_process = True

    def set_run(self, run: Any) -> None:
        """Does nothing: there is one run."""

    @property
    def run(self) -> Any:
        """The part of Flower's Run that Keel reads."""
        return SimpleNamespace(override_config={})

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Deprecated in Flower: use Message itself."""
        raise NotImplementedError("use flwr.app.Message")

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        """Not used: `Exchange` pushes and pulls."""
        raise NotImplementedError("use server_app.exchange.Exchange")


class LogicalGrid(OwnGrid):
    """A grid of `num_clients` nodes, simulated by the nodes of another grid.

    expected_time: of a node's client, in any unit; set once the roster is known. How many seconds a
    unit takes each worker is measured.
    """

    def __init__(self, grid: Grid, num_clients: int) -> None:
        self.grid, self.num_clients = grid, num_clients
        self.has_own_clients = has_own_clients(grid)
        self.workers = sorted(grid.get_node_ids())
        self.expected_time: Callable[[int], float] = lambda node: 1.0
        self.largest_share = 1  # clients of one worker in the newest messages
        self.seconds_per_unit: dict[int, float] = {}  # by worker, once it has trained
        self.numbers = itertools.count(1)
        # id of a worker's message to the clients' messages in it, and whether it measures the
        # worker: only its first does, any idle one may answer the others
        self.sent: dict[str, tuple[list[Message], bool]] = {}
        self.carrier: dict[str, str] = {}  # id of a client's message to that of the worker's
        self.arrived: dict[str, Message] = {}  # replies by the id of the client's message

    def get_node_ids(self) -> Iterable[int]:
        """One node per client."""
        return range(FIRST_NODE, FIRST_NODE + self.num_clients)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send the messages of one kind and round, placed on the workers."""
        requests = list(messages)
        times = [self.expected_time(message.metadata.dst_node_id) for message in requests]
        ids = []
        for message in requests:
            ids.append(f"logical-{next(self.numbers)}")
            assign_message_id(message, ids[-1])
        is_training = bool(requests) and requests[0].metadata.message_type == MessageType.TRAIN
        parts = self.parts(times, is_training)
        clients_of = Counter(worker for worker, places in parts for _ in places)
        if is_training:
            self.relax_idle(clients_of.keys())
        self.largest_share = max(clients_of.values(), default=1)
        wholes = []
        for worker, places in parts:
            part = [requests[i] for i in places]
            first = part[0].metadata
            clients = [m.metadata.dst_node_id - FIRST_NODE for m in part]
            content = simulated_content([m.content for m in part], clients, self.num_clients)
            wholes.append(
                Message(content, dst_node_id=worker, message_type=first.message_type, ttl=first.ttl)
            )
        self.grid.push_messages(wholes)
        workers: set[int] = set()
        for whole, (worker, places) in zip(wholes, parts, strict=True):
            in_whole, is_first = [requests[i] for i in places], worker not in workers
            workers.add(worker)
            self.sent[whole.metadata.message_id] = in_whole, is_first
            self.carrier |= {ids[i]: whole.metadata.message_id for i in places}
        return ids

    def parts(self, times: Sequence[float], is_training: bool) -> list[tuple[int, list[int]]]:
        """(worker, places in `times`) of each message, the large ones first.

        One per worker, in training followed by smaller ones.
        """
        num_workers = len(self.workers)
        mean = self.mean_seconds()
        rates = [self.seconds_per_unit.get(worker, mean) for worker in self.workers]
        left, sections = sorted(range(len(times)), key=lambda i: -times[i]), []
        if is_training and num_workers > 1:
            while len(left) >= MIN_TAIL * num_workers:
                num_now = len(left) - len(left) // TAIL_SHARE
                sections.append(left[:num_now])
                left = left[num_now:]
        found = []
        for part in [*sections, left]:
            placed = place([times[i] for i in part], rates)
            for worker, share in zip(self.workers, placed, strict=True):
                if share:
                    found.append((worker, sorted(part[k] for k in share)))
        return found

    def relax_idle(self, busy: Collection[int]) -> None:
        """Move the measured time of each worker without clients halfway to the mean.

        One slow round would otherwise exclude it for good.
        """
        mean = self.mean_seconds()
        for worker in self.seconds_per_unit.keys() - busy:
            self.seconds_per_unit[worker] = (self.seconds_per_unit[worker] + mean) / 2

    def mean_seconds(self) -> float:
        """Seconds per unit, mean over the workers that were measured; 1 if none was."""
        return statistics.fmean(self.seconds_per_unit.values() or [1.0])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have come to these clients' messages."""
        asked = [each for each in message_ids if each in self.carrier or each in self.arrived]
        carriers = {self.carrier[each] for each in asked if each in self.carrier}
        for whole in self.grid.pull_messages(carriers) if carriers else []:
            sent = whole.metadata.reply_to_message_id
            messages, is_first = self.sent.pop(sent, ([], False))
            contents: Sequence[RecordDict | Error]
            if whole.has_error():
                contents = [whole.error] * len(messages)
            else:
                contents = simulated_replies(whole.content, len(messages))
                if is_first:
                    self.learn(whole.metadata.src_node_id, messages, contents)
            for message, content in zip(messages, contents, strict=True):
                message_id = message.metadata.message_id
                del self.carrier[message_id]
                self.arrived[message_id] = Message(content, reply_to=message)
        return [self.arrived.pop(each) for each in asked if each in self.arrived]

    def learn(
        self, worker: int, messages: Sequence[Message], contents: Sequence[RecordDict | Error]
    ) -> None:
        """Measure the worker by the seconds that its clients say they trained."""
        seconds, units = 0.0, 0.0
        for message, content in zip(messages, contents, strict=True):
            if isinstance(content, Error):
                continue
            metrics = find_record(content, "metrics", MetricRecord)
            own_s = metrics.get("seconds") if metrics else None
            if isinstance(own_s, float):
                seconds += own_s
                units += self.expected_time(message.metadata.dst_node_id)
        if units:
            known = self.seconds_per_unit.get(worker, seconds / units)
            self.seconds_per_unit[worker] = (known + seconds / units) / 2


def with_logical_clients(grid: Grid, num_clients: int) -> Grid:
    """The grid; a `LogicalGrid` over a simulation with another number of nodes than clients.

    num_clients: 0: as many as nodes.
    """
    can_simulate = is_in_process_grid(grid) and getattr(grid, "simulates_clients", True)
    if not can_simulate or isinstance(grid, LogicalGrid):
        return grid
    is_logical = num_clients not in (0, len(list(grid.get_node_ids())))
    return LogicalGrid(grid, num_clients) if is_logical else grid
