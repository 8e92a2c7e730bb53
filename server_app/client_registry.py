"""Which client is connected as which node: gathered before round 1, kept current during the run."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from data.sources import Source
from protocol.config import RunConfig
from protocol.flower_compat import CRASHED, NO_REPLY, NODE_UNAVAILABLE, is_in_process_grid
from protocol.messages import RosterEntry, in_one_line, read_roster
from server_app.exchange import Exchange
from server_app.roster import check_roster, shortened

log = logging.getLogger("keel.server")
SETTLE_S = 1.0  # the time after which no more nodes of a simulation are expected
QUERY_TIMEOUT_S = 30.0  # for the reply of a SuperNode that connects during the run
RETURN_TIMEOUT_S = 90.0  # a resume waits this long for its clients; Flower readmits a node after 60
RETRY_AFTER_S = 60.0  # an unusable node is queried again after this time
MAX_QUERIES = 64  # simulated clients queried at a time
MAX_ATTEMPTS = 3  # queries of a node whose ClientApp crashes


def gather_roster(
    grid: Grid, config: RunConfig, query: ConfigRecord, source: Source
) -> dict[int, RosterEntry]:
    """Node id to roster entry of every client, once all that the run asks for are connected.

    Waits at most `start-timeout`. ValueError or TimeoutError, one line, naming the client that is
    missing, failed, or does not fit with the others or the run's source.
    """
    deadline = time.monotonic() + config.rounds.start_timeout
    nodes = wait_for_nodes(grid, config.rounds.num_clients, deadline)
    entries: dict[int, RosterEntry] = {}
    while True:
        new = [node for node in nodes if node not in entries]
        answers = ask(grid, new, query, deadline)
        for node, reason in answers.rejected.items():
            raise ValueError(f"a client cannot take part (node {node}): {reason}")
        if answers.silent:
            raise TimeoutError(
                f"start-timeout = {config.rounds.start_timeout:g}: {len(answers.silent)} nodes did "
                f"not answer in time: {shortened([str(node) for node in answers.silent])}"
            )
        entries |= answers.entries
        partitions = max((entry.num_partitions for entry in entries.values()), default=1)
        expected = max(1, partitions, config.rounds.num_clients)
        if len(entries) >= expected:
            break
        time.sleep(0.1)
        nodes = wait_for_nodes(grid, expected, deadline)
    check_roster(config, list(entries.values()), source)
    return entries


class ClientRegistry:
    """The roster of a run under way, updated when SuperNodes restart.

    roster: node id to entry; changed in place. Without registered keys a restarted SuperNode has a
    new id; it takes its client's place once the old id is no longer connected.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        query: ConfigRecord,
        source: Source,
        roster: dict[int, RosterEntry],
    ) -> None:
        self.grid, self.config, self.query = grid, config, query
        self.source, self.roster = source, roster
        self.waiting: dict[int, RosterEntry] = {}  # nodes whose client is still connected elsewhere
        self.unusable: dict[int, float] = {}  # node: when to query it again
        self.missing: set[str] = set()  # clients that were not connected at the last look
        self.has_changed = False  # since `roster.json` was written

    def gather(self) -> None:
        """Wait up to 90 seconds for the clients of a resumed run.

        The run continues with those that are connected; others may return in any later round.
        TimeoutError if they are fewer than `min-replies`.
        """
        rounds = self.config.rounds
        deadline = time.monotonic() + min(RETURN_TIMEOUT_S, rounds.start_timeout)
        while True:
            left_s = deadline - time.monotonic()
            self.absent(self.refresh(max(SETTLE_S, left_s)))
            if not self.missing or left_s <= 0:
                break
            time.sleep(SETTLE_S)
        num_connected = len(self.roster) - len(self.missing)
        if num_connected < rounds.min_replies:
            raise TimeoutError(
                f"min-replies = {rounds.min_replies}: {num_connected} clients of this run are "
                f"connected; missing: {shortened(sorted(self.missing))}"
            )
        if self.missing:
            names = shortened(sorted(self.missing))
            log.warning("the run continues without %s until they return", names)

    def absent(self, online: set[int]) -> set[str]:
        """Clients missing from `online` twice in a row, which are not waited for.

        A client that has just gone may return in a moment; the message is then sent to it again.
        """
        before = self.missing
        self.missing = {entry.client for node, entry in self.roster.items() if node not in online}
        for client in sorted(before - self.missing):
            log.info("client %s is connected again", client)
        return self.missing & before

    def returned(self, nodes: list[int]) -> dict[int, int]:
        """The current node of each client of `nodes` that is connected."""
        names = {node: self.roster[node].client for node in nodes if node in self.roster}
        online = self.refresh()
        node_of = {entry.client: node for node, entry in self.roster.items()}
        return {node: node_of[c] for node, c in names.items() if node_of[c] in online}

    def refresh(self, timeout_s: float = QUERY_TIMEOUT_S) -> set[int]:
        """The connected node ids; a new one takes its client's place if the old one is gone.

        timeout_s: for the replies of new nodes to the query.
        """
        if is_in_process_grid(self.grid):
            return set(self.roster)
        online = set(self.grid.get_node_ids())
        now = time.monotonic()
        self.waiting = {node: entry for node, entry in self.waiting.items() if node in online}
        known = self.roster.keys() | self.waiting.keys()
        known |= {node for node, until in self.unusable.items() if until > now and node in online}
        if new := sorted(online - known):
            self.waiting |= self.entries_of(new, timeout_s)
        for node, entry in list(self.waiting.items()):
            old = next((n for n, e in self.roster.items() if e.client == entry.client), None)
            if old is None:
                del self.waiting[node]
                self.unusable[node] = math.inf
                log.warning("client %s came after round 1 and does not take part", entry.client)
            elif old not in online:
                del self.waiting[node]
                self.replace(old, node, entry)
        return online

    def entries_of(self, nodes: list[int], timeout_s: float) -> dict[int, RosterEntry]:
        """The entries of new nodes; one that fails or is silent is queried again later."""
        answers = ask(self.grid, nodes, self.query, time.monotonic() + timeout_s)
        silent = dict.fromkeys(answers.silent, f"no answer within {timeout_s:g} seconds")
        for node, reason in (answers.rejected | silent).items():
            log.warning("node %d is new and cannot be used: %s", node, reason)
            wait_s = RETRY_AFTER_S if node in answers.rejected else 10 * RETRY_AFTER_S
            self.unusable[node] = time.monotonic() + wait_s
        return answers.entries

    def replace(self, old: int, new: int, entry: RosterEntry) -> None:
        """Let the client of node `old` continue as node `new`, if it still fits."""
        entries = {n: e for n, e in self.roster.items() if n != old} | {new: entry}
        try:
            check_roster(self.config, list(entries.values()), self.source)
        except ValueError as error:
            log.warning("node %d is new and cannot be used: %s", new, error)
            self.unusable[new] = time.monotonic() + RETRY_AFTER_S
            return
        self.has_changed = True
        if entry.label_counts != self.roster[old].label_counts:
            log.warning("client %s: its training samples have changed", entry.client)
        del self.roster[old]
        self.roster[new] = entry
        log.info("client %s is connected again, as node %d", entry.client, new)


def wait_for_nodes(grid: Grid, num_clients: int, deadline: float) -> list[int]:
    """Node ids once `num_clients` are connected (0: once any is); TimeoutError if they are not."""
    expected = max(1, num_clients)
    nodes = sorted(grid.get_node_ids())
    while len(nodes) < expected:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"num-clients = {num_clients}: {len(nodes)} SuperNodes are connected; simulation "
                f"takes --federation-config 'num-supernodes={expected}'"
            )
        time.sleep(0.1)
        before, nodes = nodes, sorted(grid.get_node_ids())
        if num_clients and nodes and before == nodes and len(nodes) < expected:
            time.sleep(SETTLE_S)
            if is_in_process_grid(grid) and sorted(grid.get_node_ids()) == nodes:
                raise ValueError(
                    f"num-clients = {num_clients}, but the federation has {len(nodes)} SuperNodes: "
                    f"start with --federation-config 'num-supernodes={num_clients}'"
                )
    return nodes


@dataclass
class Answers:
    """Outcome of a query by node; a node that is no longer connected is in none of them."""

    entries: dict[int, RosterEntry] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)


def ask(grid: Grid, nodes: list[int], query: ConfigRecord, deadline: float) -> Answers:
    """Query these nodes for their entries; one whose ClientApp crashes is queried again."""
    answers = Answers()
    for _ in range(MAX_ATTEMPTS):
        crashed: list[int] = []
        for node, reply in replies_of(grid, nodes, query, deadline):
            if not reply.has_error():
                try:
                    answers.entries[node] = read_roster(reply)
                except Exception as error:  # a client's bytes may raise any exception
                    answers.rejected[node] = in_one_line(error)
            elif reply.error.code == NODE_UNAVAILABLE:
                log.warning("node %d is no longer connected", node)
            elif reply.error.code == NO_REPLY:
                answers.silent.append(node)
            elif reply.error.code in CRASHED:
                log.warning("node %d is queried again: %s", node, in_one_line(reply.error.reason))
                crashed.append(node)
            else:
                answers.rejected[node] = in_one_line(reply.error.reason)
        nodes = crashed
        if not nodes:
            break
    reason = f"its ClientApp crashed on the query {MAX_ATTEMPTS} times"
    answers.rejected |= dict.fromkeys(nodes, reason)
    return answers


def replies_of(
    grid: Grid, nodes: list[int], query: ConfigRecord, deadline: float
) -> Iterator[tuple[int, Message]]:
    """Each of these nodes, in their order, with its reply to the query.

    Simulated nodes are queried `MAX_QUERIES` at a time: thousands of live messages fragment the
    memory of the server's process. SuperNodes are queried all at once, so that none waits for
    another.
    """
    exchange = Exchange(grid)
    size = MAX_QUERIES if is_in_process_grid(grid) else max(1, len(nodes))
    content = RecordDict({"round": query})  # shared by all messages and never changed
    for start in range(0, len(nodes), size):
        part = nodes[start : start + size]
        messages = [
            Message(content=content, dst_node_id=node, message_type=MessageType.QUERY)
            for node in part
        ]
        seconds = max(0.0, deadline - time.monotonic())
        replies = exchange.ask(messages, seconds, "the roster", key="start-timeout")
        yield from zip(part, replies, strict=True)
