"""Who takes part: every client is asked for its roster entry before round 1, and checked."""

import itertools
import time
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from client_app.method import Method
from client_app.methods import method_of
from protocol.config import RunConfig
from protocol.messages import Instruction, RosterEntry, instruction_record, read_roster
from server_app.exchange import exchange

settle_s = 1.0


def gather_roster(
    grid: Grid, config: RunConfig, instruction: Instruction
) -> dict[int, RosterEntry]:
    """Node id to roster entry of every client, once all that the run asks for are there.

    Waits `round-timeout` at most. ValueError, one line, naming who is missing, failed, or does
    not fit with the rest.
    """
    deadline = time.monotonic() + config.rounds.round_timeout
    nodes = wait_for_nodes(grid, config.rounds.num_clients, deadline)
    entries: dict[int, RosterEntry] = {}
    while True:
        new = [node for node in nodes if node not in entries]
        entries |= ask(grid, new, instruction_record(instruction), deadline)
        partitions = max(entry.num_partitions for entry in entries.values())
        if len(entries) >= max(partitions, config.rounds.num_clients):
            break
        nodes = wait_for_nodes(grid, max(partitions, config.rounds.num_clients), deadline)
    check_roster(config, list(entries.values()))
    return entries


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


def ask(
    grid: Grid, nodes: list[int], instruction: ConfigRecord, deadline: float
) -> dict[int, RosterEntry]:
    """The roster entries of these nodes; ValueError naming the first that gave none, and why."""
    messages = [
        Message(
            content=RecordDict({"round": instruction}),
            dst_node_id=node,
            message_type=MessageType.QUERY,
        )
        for node in nodes
    ]
    replies = exchange(grid, messages, timeout_s=max(0.0, deadline - time.monotonic()))
    entries: dict[int, RosterEntry] = {}
    for reply in replies:
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise ValueError(f"a client cannot take part: {reply.error.reason}")
        entries[node] = read_roster(reply)
    silent = sorted(set(nodes) - entries.keys())
    if silent:
        raise TimeoutError(f"{len(silent)} SuperNodes did not answer in time: {silent[:5]}")
    return entries


def evaluates_clients(config: RunConfig, method: Method) -> str:
    """none, participants or all: whose local test parts are evaluated on."""
    asked = config.rounds.evaluate_clients
    if asked != "auto":
        return asked
    return "all" if method.is_personal else "none"


def check_roster(config: RunConfig, entries: list[RosterEntry]) -> None:
    """ValueError, one line naming the client, where the clients do not fit together."""
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
    if any(e.model != config.model.model for e in entries) and config.rounds.method != "fedreco":
        other = next(e for e in entries if e.model != config.model.model)
        raise ValueError(
            f"client {other.client} trains {other.model}, the run {config.model.model}: only "
            "method = 'fedreco' lets clients differ in architecture"
        )
    totals = [sum(counts) for counts in zip(*(e.label_counts for e in entries), strict=True)]
    if 0 in totals:
        raise ValueError(f"class {totals.index(0)} is held by no client: it cannot be learnt")
    if evaluates_clients(config, method_of(config)) != "none":
        for entry in entries:
            if not sum(entry.test_label_counts):
                raise ValueError(
                    f"client {entry.client} has no local test part: personal accuracy needs "
                    "local-test-fraction > 0 (or images under test/ in its own data)"
                )
