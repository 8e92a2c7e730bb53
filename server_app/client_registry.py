"""Which client is connected as which node, from before round 1 until the end of the run."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from data.sources import Source
from flower_adapter import CRASHED, NO_REPLY, NODE_UNAVAILABLE, is_in_process_grid
from protocol.config import RunConfig
from protocol.messages import RosterEntry, error_reason, read_roster
from protocol.text import in_one_line, num_of, shortened
from server_app.exchange import Exchange
from server_app.roster import check_partitions, check_roster
from server_app.run_reader import DAMAGE
from strategies.validation import RECORD_BYTES

log = logging.getLogger("keel.server")
START_TIMEOUT_S = 600.0  # for the clients to connect and to describe themselves
SETTLE_S = 1.0  # after this time no more nodes of a simulation are expected
QUERY_TIMEOUT_S = 30.0  # for the reply of a SuperNode that connects during the run
RETURN_TIMEOUT_S = 90.0  # a resume waits this long for its clients; Flower readmits a node after 60
WAITING_EVERY_S = 30.0  # a line about clients that a run waits for
RETRY_AFTER_S = 60.0  # an unusable node is queried again after this time
MAX_QUERIES = 64  # simulated clients queried at a time
MAX_ATTEMPTS = 3  # queries of a node whose ClientApp crashes
REGISTRY_VARIABLE = "KEEL_CLIENT_REGISTRY"  # the file that `keel deploy register` writes


def registered_names(grid: Grid) -> dict[int, str] | None:
    """Client name by node id, as `keel deploy register` recorded them for the clients' keys.

    None where there are no keys: in simulation, and without $KEEL_CLIENT_REGISTRY. A SuperLink
    binds a node id to a key, so with the file a client is who its key says. ValueError if the file
    cannot be read.
    """
    path = os.environ.get(REGISTRY_VARIABLE)
    if is_in_process_grid(grid) or not path:
        return None
    try:
        clients = json.loads(Path(path).read_text())
        return {int(about["node"]): str(name) for name, about in clients.items()}
    except (OSError, *DAMAGE) as error:
        raise ValueError(
            f"{REGISTRY_VARIABLE} = {path!r}: missing or damaged ({in_one_line(error)}): write it "
            "with `keel deploy register` (`make register`)"
        ) from error


def identity_problem(node: int, client: str, names: Mapping[int, str] | None) -> str:
    """Why the key of `node` is not that of `client`; empty if it is, or if there are no keys."""
    if names is None or names.get(node) == client:
        return ""
    claimed = in_one_line(client, 64)
    if node not in names:
        return (
            f"it calls itself {claimed!r}, and its key has no name: add its public key to the "
            "server's credentials/server/clients and run `keel deploy register`"
        )
    return (
        f"it calls itself {claimed!r}, but its key is registered as {names[node]!r}: deploy it "
        f"with the credentials of {claimed!r}, or under the name {names[node]!r}"
    )


def gather_roster(
    grid: Grid, config: RunConfig, query: ConfigRecord, source: Source
) -> dict[int, RosterEntry]:
    """Node id to roster entry of every client, once all that the run needs are connected.

    Waits at most `START_TIMEOUT_S`. ValueError or TimeoutError, one line, naming the client that is
    missing, failed, or does not fit with the others or the run's source.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    names = registered_names(grid)
    nodes = wait_for_nodes(grid, config.rounds.num_clients, deadline, names)
    entries: dict[int, RosterEntry] = {}
    while True:
        entries = {node: entry for node, entry in entries.items() if node in nodes}
        answers = ask(grid, [node for node in nodes if node not in entries], query, deadline, names)
        for node, reason in answers.rejected.items():
            if is_in_process_grid(grid):  # users of a simulation do not know its nodes
                raise ValueError(reason)
            if names and node in names:
                reason = reason.removeprefix(f"client {names[node]}: ")  # the client's own words
                raise ValueError(f"client {names[node]} cannot take part: {reason}")
            raise ValueError(f"a client cannot take part (node {node}): {reason}")
        if answers.silent:
            silent = sorted((names or {}).get(node, f"node {node}") for node in answers.silent)
            raise TimeoutError(f"no answer within {START_TIMEOUT_S:g} s from {shortened(silent)}")
        entries |= answers.entries
        check_partitions(entries.values())
        partitions = max((entry.num_partitions for entry in entries.values()), default=1)
        expected = max(1, partitions, config.rounds.num_clients)
        if len(entries) >= expected:
            break
        time.sleep(0.1)
        nodes = wait_for_nodes(grid, expected, deadline, names)
    check_roster(config, entries, source)
    return entries


class ClientRegistry:
    """Which node each client of a run is on, kept up to date when SuperNodes restart.

    roster: node id to entry; changed in place. names: see `registered_names`; a node can only take
    the place of the client whose key it has. Without them names are not verified: a restarted
    SuperNode, which then has a new id, takes its client's place once the old id is no longer
    connected.
    note: called for each client that joins or is refused, for the audit log.
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
        self.clients = {node: entry.client for node, entry in roster.items()}  # former nodes too
        self.waiting: dict[int, RosterEntry] = {}  # nodes whose client is still connected elsewhere
        self.unusable: dict[int, float] = {}  # node: when to query it again
        self.hurried: set[int] = set()  # unusable nodes that had less than QUERY_TIMEOUT_S
        self.missing: set[str] = set()  # clients that were not connected when last checked
        self.has_changed = False  # since `roster.json` was written
        self.names = registered_names(grid)
        self.note: Callable[..., Any] = lambda event, **fields: None
        if self.names is None and not is_in_process_grid(grid):
            log.warning(
                "clients' names are not verified: without $%s, they are not bound to keys",
                REGISTRY_VARIABLE,
            )

    def gather(self) -> None:
        """Wait up to 90 seconds for the clients of a resumed run.

        The run continues with those that are connected; others may return in any later round.
        TimeoutError if too few for a round are connected.
        """
        rounds = self.config.rounds
        deadline = time.monotonic() + RETURN_TIMEOUT_S
        next_line = 0.0
        while True:
            left_s = deadline - time.monotonic()
            self.absent(self.refresh(max(SETTLE_S, left_s)))
            if not self.missing or left_s <= 0:
                break
            if time.monotonic() >= next_line:
                names = shortened(sorted(self.missing))
                log.info("waiting %.0f s for clients: not connected: %s", left_s, names)
                next_line = time.monotonic() + WAITING_EVERY_S
            time.sleep(SETTLE_S)
        num_connected = len(self.roster) - len(self.missing)
        if num_connected < rounds.fewest_replies:
            raise TimeoutError(
                f"{rounds.fewest_replies_text}: "
                f"{num_of('client of this run is', num_connected, 'clients of this run are')} "
                f"connected; missing: {shortened(sorted(self.missing))}"
            )
        if self.missing:
            names = shortened(sorted(self.missing))
            log.warning("the run continues without %s until they return", names)

    def absent(self, online: set[int]) -> set[str]:
        """Clients missing from `online` twice in a row, which are not waited for.

        A client that has just disconnected may soon return; its message is then sent again.
        """
        before = self.missing
        self.missing = {entry.client for node, entry in self.roster.items() if node not in online}
        for client in sorted(before - self.missing):
            log.info("client %s is connected again", client)
        return self.missing & before

    def returned(self, nodes: list[int], timeout_s: float = math.inf) -> dict[int, int]:
        """The current node of each connected client that is, or was, one of `nodes`."""
        online = self.refresh(min(timeout_s, QUERY_TIMEOUT_S))
        node_of = {entry.client: node for node, entry in self.roster.items()}
        found = {node: node_of[self.clients[node]] for node in nodes}
        return {node: now for node, now in found.items() if now in online}

    def refresh(self, timeout_s: float = QUERY_TIMEOUT_S) -> set[int]:
        """The connected node ids; a new one takes its client's place if the old one is gone.

        timeout_s: for the replies of new nodes to the query.
        """
        if is_in_process_grid(self.grid):
            return set(self.roster)
        online = set(self.grid.get_node_ids())
        if online - self.roster.keys():
            try:
                self.names = registered_names(self.grid)  # keys may have been registered since
            except ValueError as error:  # names are bound as they were
                log.warning("%s", error)
        for node, entry in self.roster.items():
            if node in online and (why := identity_problem(node, entry.client, self.names)):
                online.remove(node)
                if node not in self.unusable:
                    self.refuse(node, why, math.inf)
        now = time.monotonic()
        self.waiting = {node: entry for node, entry in self.waiting.items() if node in online}
        is_complete = self.roster.keys() <= online
        known = self.roster.keys() | self.waiting.keys()
        known |= {
            node
            for node, until in self.unusable.items()
            if until > now and node in online and (is_complete or node not in self.hurried)
        }
        if new := sorted(online - known):
            if is_complete:  # a stranger, or a client that has just restarted
                timeout_s = min(timeout_s, self.config.rounds.round_timeout / 10)
            self.waiting |= self.entries_of(new, timeout_s, is_complete)
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

    def entries_of(
        self, nodes: list[int], timeout_s: float, is_complete: bool
    ) -> dict[int, RosterEntry]:
        """The entries of new nodes; one that fails or is silent is queried again later.

        One that was silent is queried again after 20 times as long, at least a minute; at once when
        a client is missing and it had less than QUERY_TIMEOUT_S.
        """
        answers = ask(self.grid, nodes, self.query, time.monotonic() + timeout_s, self.names)
        for node, reason in answers.rejected.items():
            self.refuse(node, reason, RETRY_AFTER_S)
        had_little_time = timeout_s < QUERY_TIMEOUT_S
        self.hurried = self.hurried.difference(nodes)
        for node in answers.silent if is_complete or not had_little_time else []:
            wait_s = max(RETRY_AFTER_S, 20 * timeout_s)
            self.refuse(node, f"no answer within {num_of('second', timeout_s)}", wait_s)
            if had_little_time:
                self.hurried.add(node)
        return answers.entries

    def refuse(self, node: int, reason: str, wait_s: float) -> None:
        """Log that a node cannot be used, and do not query it for `wait_s`."""
        reason = in_one_line(reason)
        log.warning("node %d is new and cannot be used: %s", node, reason)
        self.note("refused", node=node, reason=reason)
        self.unusable[node] = time.monotonic() + wait_s

    def replace(self, old: int, new: int, entry: RosterEntry) -> None:
        """Let the client of node `old` continue as node `new`, if it still fits."""
        entries = {n: e for n, e in self.roster.items() if n != old} | {new: entry}
        try:
            check_roster(self.config, entries, self.source)
        except ValueError as error:
            self.refuse(new, str(error), RETRY_AFTER_S)
            return
        self.has_changed = True
        before = self.roster[old]
        if (entry.label_counts, entry.num_train) != (before.label_counts, before.num_train):
            log.warning("client %s: its training samples have changed", entry.client)
        del self.roster[old]
        self.roster[new] = entry
        self.clients[new] = entry.client
        log.info("client %s is connected again, as node %d", entry.client, new)
        self.note("joined", client=entry.client, node=new)


def wait_for_nodes(
    grid: Grid, num_clients: int, deadline: float, names: Mapping[int, str] | None = None
) -> list[int]:
    """Node ids once `num_clients` are connected (0: once any is); TimeoutError if they are not.

    names: see `registered_names`; those of a deployment that are not connected are logged.
    """
    expected, next_line = max(1, num_clients), 0.0
    nodes = sorted(grid.get_node_ids())
    while len(nodes) < expected:
        what = f"{len(nodes)} of {expected} connected"
        if away := sorted(name for node, name in (names or {}).items() if node not in nodes):
            what += f"; not connected: {shortened(away)}"
        if time.monotonic() > deadline:
            hint = f"; start with --federation-config 'num-supernodes={expected}'"
            what += hint if is_in_process_grid(grid) else "; start them"
            raise TimeoutError(f"num-clients = {num_clients}: {what}")
        if not is_in_process_grid(grid) and time.monotonic() >= next_line:
            log.info("waiting for clients: %s", what)
            next_line = time.monotonic() + WAITING_EVERY_S
        time.sleep(0.1)
        before, nodes = nodes, sorted(grid.get_node_ids())
        if num_clients and nodes and before == nodes and len(nodes) < expected:
            time.sleep(SETTLE_S)
            if is_in_process_grid(grid) and sorted(grid.get_node_ids()) == nodes:
                raise ValueError(
                    f"num-clients = {num_clients}, but the federation has "
                    f"{num_of('SuperNode', nodes)}: start with "
                    f"--federation-config 'num-supernodes={num_clients}'"
                )
    return nodes


@dataclass
class Answers:
    """Outcome of a query by node; a node that is no longer connected is in none of them."""

    entries: dict[int, RosterEntry] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)


def ask(
    grid: Grid,
    nodes: list[int],
    query: ConfigRecord,
    deadline: float,
    names: Mapping[int, str] | None = None,
) -> Answers:
    """Query these nodes for their entries; one whose ClientApp crashes is queried again.

    names: see `registered_names`; an entry with another name than its key's is rejected.
    """
    answers = Answers()
    for _ in range(MAX_ATTEMPTS):
        crashed: list[int] = []
        for node, reply in replies_of(grid, nodes, query, deadline):
            if not reply.has_error():
                try:
                    entry = read_roster(reply)
                except Exception as error:  # a client's bytes may raise any exception
                    answers.rejected[node] = in_one_line(error)
                    continue
                if why := identity_problem(node, entry.client, names):
                    answers.rejected[node] = why
                else:
                    answers.entries[node] = entry
            elif reply.error.code == NODE_UNAVAILABLE:
                log.warning("node %d is no longer connected", node)
            elif reply.error.code == NO_REPLY:
                answers.silent.append(node)
            elif reply.error.code in CRASHED:
                log.warning("node %d is queried again: %s", node, error_reason(reply.error))
                crashed.append(node)
            else:
                answers.rejected[node] = error_reason(reply.error)
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
        replies = exchange.ask(messages, seconds, "the roster", max_bytes=4 * RECORD_BYTES)
        yield from zip(part, replies, strict=True)
