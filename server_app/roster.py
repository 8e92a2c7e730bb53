"""Who takes part: every client is asked for its roster entry before round 1, and checked."""

import itertools
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from client_app.method import Method
from client_app.methods import method_of
from data.sources import Source
from protocol.config import RunConfig
from protocol.files import write_atomically
from protocol.messages import (
    RosterEntry,
    TrainRequest,
    in_one_line,
    read_roster,
    request_record,
    roster_entry,
)
from server_app.exchange import Exchange, no_answer

log = logging.getLogger("keel.server")
settle_s = 1.0
ask_s = 30.0  # how long a SuperNode that is new during the run may take to say who it is
return_s = 90.0  # how long a resume waits for its clients; Flower takes a killed one back after 60
ask_again_s = 60.0  # after which a node that could not be used is asked again
# a ClientApp that was killed as it answered may be asked again
died = (
    ErrorCode.CLIENT_APP_CRASHED,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)
at_once = 64  # how many simulated clients are asked for the roster at a time


def gather_roster(
    grid: Grid, config: RunConfig, request: TrainRequest, source: Source
) -> dict[int, RosterEntry]:
    """Node id to roster entry of every client, once all that the run asks for are there.

    Waits `start-timeout` at most. ValueError, one line, naming who is missing, failed, or does
    not fit with the rest or with the run's source.
    """
    deadline = time.monotonic() + config.rounds.start_timeout
    nodes = wait_for_nodes(grid, config.rounds.num_clients, deadline)
    entries: dict[int, RosterEntry] = {}
    while True:
        new = [node for node in nodes if node not in entries]
        answers = ask(grid, new, request_record(request), deadline)
        for node, reason in answers.rejected.items():
            raise ValueError(f"a client cannot take part (node {node}): {reason}")
        if answers.silent:
            raise TimeoutError(
                f"{len(answers.silent)} SuperNodes did not answer in time: {answers.silent[:5]}. "
                "start-timeout says how long they may take"
            )
        entries |= answers.entries
        partitions = max((entry.num_partitions for entry in entries.values()), default=1)
        needed = max(1, partitions, config.rounds.num_clients)
        if len(entries) >= needed:
            break
        time.sleep(0.1)
        nodes = wait_for_nodes(grid, needed, deadline)
    check_roster(config, list(entries.values()), source)
    return entries


class ClientRegistry:
    """The roster of a run under way, kept up with SuperNodes that were restarted.

    roster: node id to entry; changed in place. Without keys a restarted SuperNode has a new id; it
    takes its client's place once the old one is no longer connected.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        request: TrainRequest,
        source: Source,
        roster: dict[int, RosterEntry],
    ) -> None:
        self.grid, self.config, self.source, self.roster = grid, config, source, roster
        self.request = request_record(request)
        self.others: dict[int, RosterEntry] = {}  # nodes whose client has another one still
        self.useless: dict[int, float] = {}  # nodes that no client is, until they are asked again
        self.missing: set[str] = set()  # clients that were not connected at the last look
        self.has_changed = False  # since `roster.json` was written

    def gather(self) -> None:
        """Wait for the clients of a resumed run, 90 seconds for all of them.

        Then those that are there go on; another may come back in any later round. TimeoutError if
        they are fewer than `min-replies`.
        """
        rounds = self.config.rounds
        deadline = time.monotonic() + min(return_s, rounds.start_timeout)
        while True:
            left_s = deadline - time.monotonic()
            self.absent(self.refresh(max(settle_s, left_s)))
            if not self.missing or left_s <= 0:
                break
            time.sleep(settle_s)
        there = len(self.roster) - len(self.missing)
        if there < rounds.min_replies:
            raise TimeoutError(
                f"min-replies = {rounds.min_replies}: {there} clients of this run are connected; "
                f"missing: {shortened(sorted(self.missing))}"
            )
        if self.missing:
            words = shortened(sorted(self.missing))
            log.warning("the run goes on without %s until they are back", words)

    def absent(self, online: set[int]) -> set[str]:
        """Clients that are not among `online`, nor were at the look before: not to be waited for.

        One that has just gone may be back in a moment; a message to it is sent again then.
        """
        before = self.missing
        self.missing = {entry.client for node, entry in self.roster.items() if node not in online}
        for client in sorted(before - self.missing):
            log.info("client %s is connected again", client)
        return self.missing & before

    def returned(self, nodes: list[int]) -> dict[int, int]:
        """The nodes by which the clients of `nodes` are connected now, of those that are."""
        names = {node: self.roster[node].client for node in nodes if node in self.roster}
        online = self.refresh()
        now_at = {entry.client: node for node, entry in self.roster.items()}
        return {node: now_at[c] for node, c in names.items() if now_at[c] in online}

    def refresh(self, within_s: float = ask_s) -> set[int]:
        """The ids that are connected now; each new one is put in its client's place.

        within_s: how long the new ones may take to say who they are.
        """
        if is_simulation(self.grid):
            return set(self.roster)
        online = set(self.grid.get_node_ids())
        now = time.monotonic()
        self.others = {node: entry for node, entry in self.others.items() if node in online}
        known = self.roster.keys() | self.others.keys()
        known |= {node for node, until in self.useless.items() if until > now and node in online}
        if new := sorted(online - known):
            self.others |= self.entries_of(new, within_s)
        for node, entry in [*self.others.items()]:
            old = next((n for n, e in self.roster.items() if e.client == entry.client), None)
            if old is None:
                del self.others[node]
                self.useless[node] = math.inf
                log.warning("client %s came after round 1 and does not take part", entry.client)
            elif old not in online:
                del self.others[node]
                self.replace(old, node, entry)
        return online

    def entries_of(self, nodes: list[int], within_s: float) -> dict[int, RosterEntry]:
        """What new nodes say of themselves, of those that say something useful.

        One that refuses, or is not done in time, is asked again later: it may lack its data now.
        """
        answers = ask(self.grid, nodes, self.request, time.monotonic() + within_s)
        silent = dict.fromkeys(answers.silent, f"no answer within {within_s:g} seconds")
        for node, reason in (answers.rejected | silent).items():
            log.warning("node %d is new and cannot be used: %s", node, reason)
            wait_s = ask_again_s if node in answers.rejected else 10 * ask_again_s
            self.useless[node] = time.monotonic() + wait_s
        return answers.entries

    def replace(self, old: int, new: int, entry: RosterEntry) -> None:
        """Let the client of node `old` go on as node `new`, if it still fits."""
        entries = {n: e for n, e in self.roster.items() if n != old} | {new: entry}
        try:
            check_roster(self.config, list(entries.values()), self.source)
        except ValueError as error:
            log.warning("node %d is new and cannot be used: %s", new, error)
            self.useless[new] = time.monotonic() + ask_again_s
            return
        self.has_changed = True
        if entry.label_counts != self.roster[old].label_counts:
            log.warning("client %s: its training samples are not those of before", entry.client)
        del self.roster[old]
        self.roster[new] = entry
        log.info("client %s is back as node %d", entry.client, new)


def read_saved_roster(path: Path) -> dict[int, RosterEntry]:
    """What `save_roster` wrote; ValueError, naming the file, if it is not readable."""
    try:
        rows = json.loads(path.read_text())
        return {int(row.pop("node")): roster_entry(row) for row in rows}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not the roster of a run of this version: {error}") from error


def save_roster(path: Path, roster: Mapping[int, RosterEntry]) -> None:
    """Write who takes part and by which node, in the order of names."""
    ordered = sorted(roster.items(), key=lambda pair: pair[1].client)
    rows = [{"node": node, **asdict(entry)} for node, entry in ordered]
    write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode())


def roster_warnings(config: RunConfig, entries: list[RosterEntry]) -> list[str]:
    """What is odd about the clients and not forbidden, a line each."""
    warnings = []
    for what, of in (
        ("flwr and torch", {e.client: e.versions for e in entries}),
        ("keel", {e.client: e.keel for e in entries}),
    ):
        [(usual, _), *others] = Counter(of.values()).most_common()
        if others:
            odd = sorted(f"{client} has {v}" for client, v in of.items() if v != usual)
            warnings.append(
                f"versions of {what} differ: {shortened(odd)}; the others {usual}. Their results "
                "may differ in the last bits"
            )
    note = method_of(config).check_roster({e.client: e.label_counts for e in entries})
    return warnings + ([note] if note else [])


def shortened(words: list[str], most: int = 5) -> str:
    """The words with commas, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def wait_for_nodes(grid: Grid, at_least: int, deadline: float) -> list[int]:
    """Node ids once there are `at_least` (0: some, and no more coming); TimeoutError if not."""
    seen = sorted(grid.get_node_ids())
    while len(seen) < max(1, at_least):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"num-clients = {at_least}: {len(seen)} SuperNodes are connected. In simulation, "
                f"start with --federation-config 'num-supernodes={max(1, at_least)}'"
            )
        time.sleep(0.1)
        before, seen = seen, sorted(grid.get_node_ids())
        if at_least and seen and before == seen and len(seen) < at_least:
            time.sleep(settle_s)
            after = sorted(grid.get_node_ids())
            if after == seen and is_simulation(grid):
                raise ValueError(
                    f"num-clients = {at_least}, but the federation has {len(seen)} SuperNodes: "
                    f"start with --federation-config 'num-supernodes={at_least}'"
                )
    return seen


def is_simulation(grid: Grid) -> bool:
    """The clients are all there from the start, or never."""
    return type(grid).__name__ in ("InMemoryGrid", "InlineGrid")


@dataclass
class Answers:
    """What became of a query, by node; a node that is not connected any more is in none."""

    entries: dict[int, RosterEntry] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)


def ask(grid: Grid, nodes: list[int], request: ConfigRecord, deadline: float) -> Answers:
    """What these nodes say of themselves; one whose ClientApp dies on it is asked again."""
    answers = Answers()
    for _ in range(3):
        nodes = ask_once(grid, nodes, request, deadline, answers) if nodes else []
    answers.rejected |= dict.fromkeys(nodes, "its ClientApp died on the query three times")
    return answers


def ask_once(
    grid: Grid, nodes: list[int], request: ConfigRecord, deadline: float, answers: Answers
) -> list[int]:
    """Note in `answers` what each of these nodes says; those whose ClientApp died on it."""
    again: list[int] = []
    for node, reply in query(grid, nodes, request, deadline):
        if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
            log.warning("node %d was there and is not connected any more", node)
        elif reply.has_error() and reply.error.code == no_answer:
            answers.silent.append(node)
        elif reply.has_error() and reply.error.code in died:
            log.warning("node %d is asked again: %s", node, in_one_line(reply.error.reason))
            again.append(node)
        elif reply.has_error():
            answers.rejected[node] = in_one_line(reply.error.reason)
        else:
            try:
                answers.entries[node] = read_roster(reply)
            except Exception as error:  # a client's bytes may raise anything
                answers.rejected[node] = in_one_line(error)
    return again


def query(
    grid: Grid, nodes: list[int], request: ConfigRecord, deadline: float
) -> Iterator[tuple[int, Message]]:
    """Each of these nodes, in their order, with its answer to the query.

    Simulated ones are asked `at_once` at a time: thousands of messages alive together leave holes
    in the memory of the server's process. Real ones all at once: none waits for another.
    """
    exchange, size = Exchange(grid), at_once if is_simulation(grid) else max(1, len(nodes))
    content = RecordDict({"round": request})  # shared, and nobody changes it
    for start in range(0, len(nodes), size):
        some = nodes[start : start + size]
        messages = [
            Message(content=content, dst_node_id=node, message_type=MessageType.QUERY)
            for node in some
        ]
        seconds = max(0.0, deadline - time.monotonic())
        yield from zip(some, exchange.ask(messages, seconds, "the roster"), strict=True)


def evaluates_clients(config: RunConfig, method: Method) -> str:
    """none, participants or all: whose local test parts are evaluated on."""
    asked = config.rounds.evaluate_clients
    if asked != "auto":
        return asked
    return "all" if method.is_personal else "none"


def check_roster(config: RunConfig, entries: list[RosterEntry], source: Source) -> None:
    """ValueError, one line naming the client, where the clients do not fit together.

    Nor with the run's source, on whose test set the global model is judged, nor with the method.
    """
    if config.rounds.num_clients and len(entries) > config.rounds.num_clients:
        n = config.rounds.num_clients
        raise ValueError(
            f"num-clients = {n}, but the federation has {len(entries)} SuperNodes: start with "
            f"--federation-config 'num-supernodes={n}', or give num-clients={len(entries)}"
        )
    names: Mapping[str, int] = {e.client: 0 for e in entries}
    if len(names) < len(entries):
        twice = sorted(e.client for e in entries)
        name = next(a for a, b in itertools.pairwise(twice) if a == b)
        raise ValueError(f"two clients are named {name!r}: a client's name has to be its own")
    first = min(entries, key=lambda e: e.client)
    for entry in sorted(entries, key=lambda e: e.client):
        if entry.num_examples == 0:
            raise ValueError(f"client {entry.client} has no training samples")
        for what, mine, others in (
            ("image shape", entry.image_shape, first.image_shape),
            ("number of classes", len(entry.label_counts), len(first.label_counts)),
            ("representation width", entry.representation_width, first.representation_width),
        ):
            if mine != others:
                raise ValueError(
                    f"client {entry.client} ({entry.model}): {what} {mine}, client {first.client} "
                    f"({first.model}) has {others}: they have to agree"
                )
    for what, found, wanted in (
        ("image shape", first.image_shape, list(source.image_shape)),
        ("number of classes", len(first.label_counts), source.num_classes),
    ):
        if found != wanted:
            raise ValueError(
                f"client {first.client}: {what} {found}, the run's source {source.name} has "
                f"{wanted}: they have to agree"
            )
    if (
        any(e.model != config.model.model for e in entries)
        and not method_of(config).supports_mixed_architectures
    ):
        other = next(e for e in entries if e.model != config.model.model)
        raise ValueError(
            f"client {other.client} trains {other.model}, the run {config.model.model}: only "
            "method = 'fedreco' lets clients differ in architecture"
        )
    totals = [sum(counts) for counts in zip(*(e.label_counts for e in entries), strict=True)]
    if 0 in totals:
        raise ValueError(f"class {totals.index(0)} is held by no client: it cannot be learnt")
    method = method_of(config)
    method.check_roster({e.client: e.label_counts for e in entries})
    if evaluates_clients(config, method) != "none":
        for entry in entries:
            if not sum(entry.test_label_counts):
                raise ValueError(
                    f"client {entry.client} has no local test part: personal accuracy needs "
                    "local-test-fraction > 0 (or images under test/ in its own data)"
                )
