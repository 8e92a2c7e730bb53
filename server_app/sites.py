"""The sites of a deployment: who is connected as which node, and the way to ask them."""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from data.sources import Reading, Source, source_without_images
from flower_adapter import (
    NO_REPLY,
    bound_pulls,
)
from protocol.config import RunConfig, resolve_config
from protocol.messages import (
    DatasetSpec,
    MachineReport,
    RosterEntry,
    RosterRequest,
    error_reason,
    read_roster,
    request_record,
)
from protocol.models import OWN_SIZE, model_spec, size_text
from protocol.options import OptionValue
from protocol.source_spec import SITES
from protocol.text import in_one_line, num_of, shortened
from server_app.checks import PARTITION_KEYS
from server_app.exchange import Exchange
from server_app.pool import TTL_S
from server_app.roster import check_partitions, check_roster, save_roster
from server_app.run_reader import ROSTER_FILE
from strategies.validation import RECORD_BYTES

REGISTRY_VARIABLE = "KEEL_CLIENT_REGISTRY"  # the file that `keel deploy register` writes
log = logging.getLogger("keel.server")
START_S = 600.0  # for the clients of a new run to connect
GATHER_S = 90.0  # for the clients of a resumed run to return; Flower readmits a node after 60
LOOK_EVERY_S = 1.0
QUERY_S = 30.0  # for a node that connects during the run to describe itself
RETRY_S, RETRY_SILENT_S = 60.0, 600.0  # until a node that was refused, or silent, is queried again


def keys_of_sites(grid: Grid, keys: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """What a new run with `source = sites` leaves to them: `classes`, `image-size`, `channels`.

    As the first of the run's sites has them, by name. {} where classes may not leave the sites.
    """
    config = resolve_config(keys)
    data, model = config.data, model_spec(config.model.model)
    is_told = data.source != SITES or bool(config.rounds.resume) or bool(data.classes)
    if is_told or config.privacy.withholds_metrics:
        return {}
    query = request_record(RosterRequest(config, DatasetSpec((0, 0, 0), (), (), ())))
    sites = Sites(grid, config, query, source_without_images(Reading((1, 1), 1, classes="?")))
    first = min(sites.all_entries().values(), key=lambda entry: entry.client)
    log.info("classes, as client %s has them: %s", first.client, ", ".join(first.own_labels))
    channels, height, width = first.image_shape
    found: dict[str, OptionValue] = {"classes": json.dumps(first.own_labels)}
    if config.image_size == OWN_SIZE:
        found["image-size"] = size_text((height, width))
    if not data.channels and not model.channels:
        found["channels"] = channels
    return found


class Sites:
    """The clients of a deployment (a `Pool`). `gather` first, then `record_in`.

    roster: of the run's clients, from round 1 on always the same ones; a client's node may change.
    missing: the clients that were not connected when last looked.
    """

    stores_state_here: ClassVar[bool] = False
    machines: Sequence[MachineReport] = ()

    @property
    def unused_keys(self) -> Mapping[str, str]:
        """The config keys that a run at these sites does not use, with the reason."""
        if any(entry.num_partitions for entry in self.roster.values()):
            return {}
        keys = ("partition", *PARTITION_KEYS, "data-fraction", "pool-test")
        return dict.fromkeys(keys, "each site has data of its own")

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        query: ConfigRecord,
        source: Source,
        saved: Mapping[int, RosterEntry] | None = None,
    ) -> None:
        """query: a roster request. source: the run's. saved: the roster of a resumed run."""
        self.grid, self.config, self.query, self.source = grid, config, query, source
        self.roster: dict[int, RosterEntry] = dict(saved or {})
        # of former nodes too
        self.clients = {node: entry.client for node, entry in self.roster.items()}
        self.refused: dict[int, float] = {}  # node: when it is queried again
        self.missing: set[str] = set()
        self.probes: dict[str, str] = {}  # message id: the client in backoff that was asked
        self.path: Path | None = None
        self.note: Callable[..., Any] = lambda event, **fields: None
        self.names = registered_names()

    def record_in(self, path: Path, note: Callable[..., Any]) -> None:
        """From now on, keep `roster.json` in the run directory up to date, and note who joins.

        note: of the audit log; is also told who is refused.
        """
        self.path, self.note = path, note
        for node, entry in sorted(self.roster.items(), key=lambda pair: pair[1].client):
            if entry.client not in self.missing:
                note("joined", client=entry.client, node=node)
        save_roster(path / ROSTER_FILE, self.roster)

    def ask(
        self,
        messages: Sequence[Message],
        what: str,
        on_reply: Callable[[Message], None],
        *,
        max_bytes: int,
        before_resend: Callable[[int], None],
    ) -> set[int]:
        """Implements `Pool.ask`.

        A message is sent again, once, to a client that went away and has returned (within 30
        seconds, or later if others are still awaited), whose reply was lost, or whose ClientApp
        crashed.
        """
        bound_pulls(self.grid, max_bytes)
        asked = {message.metadata.dst_node_id: message for message in messages}
        name_of = self.clients.__getitem__
        exchange = Exchange(
            self.grid, what, asked, on_reply, self.connected, name_of, before_resend
        )
        return exchange.run(self.config.rounds.round_timeout, "round-timeout")

    def returned(self, clients: Set[str]) -> set[str]:
        """Implements `Pool.returned`: those that have answered a query of an earlier round.

        The others are sent one, which they find when they are there again.
        """
        if not clients:
            return set()
        bound_pulls(self.grid, 4 * RECORD_BYTES)
        found = set()
        for reply in self.grid.pull_messages([*self.probes]) if self.probes else ():
            client = self.probes.pop(reply.metadata.reply_to_message_id, "")
            if client in clients and not reply.has_error():
                found.add(client)
        content = RecordDict({"round": self.query})
        for node, entry in self.roster.items():
            if entry.client in clients - found - {*self.probes.values()}:
                probe = Message(content, node, MessageType.QUERY, ttl=TTL_S)
                for message_id in self.grid.push_messages([probe]):
                    self.probes[message_id] = entry.client
        return found

    def gather(self) -> None:
        """Wait for the clients: those of a new run, or those of a resumed one that are there.

        ValueError or TimeoutError, one line, naming the client that is missing, cannot take part,
        or does not fit with the others or the run's source.
        """
        if self.names is None:
            log.warning(
                "clients' names are not verified: without $%s, they are not bound to keys",
                REGISTRY_VARIABLE,
            )
        if self.roster:
            self.gather_again()
            return
        entries = self.all_entries()
        check_roster(self.config, entries, self.source)
        self.roster.update(entries)
        self.clients = {node: entry.client for node, entry in entries.items()}

    def all_entries(self) -> dict[int, RosterEntry]:
        """The entry of each node, once as many clients as the run has have described themselves.

        ValueError or TimeoutError as `gather`.
        """
        deadline, said = time.monotonic() + START_S, ""
        entries: dict[int, RosterEntry] = {}
        while True:
            nodes = set(self.grid.get_node_ids())
            entries = {node: entry for node, entry in entries.items() if node in nodes}
            for node, answer in self.describe(nodes - entries.keys(), START_S).items():
                if isinstance(answer, str):
                    raise ValueError(f"client {self.name_of(node)} cannot take part: {answer}")
                entries[node] = answer
            check_partitions(entries.values())
            partitions = max((entry.num_partitions for entry in entries.values()), default=1)
            expected = max(1, partitions, self.config.rounds.num_clients)
            if len(entries) >= expected:
                return entries
            text = f"{len(entries)} of {expected} connected"
            if away := sorted(c for node, c in (self.names or {}).items() if node not in entries):
                text += f"; not connected, or silent: {shortened(away)}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"the clients are not there after {START_S:.0f} seconds: {text}")
            if text != said:
                said = text
                log.info("waiting for clients: %s", text)
            time.sleep(LOOK_EVERY_S)

    def gather_again(self) -> None:
        """Wait up to 90 seconds for the clients of a resumed run; others may return later.

        TimeoutError if too few for a round are connected.
        """
        deadline = time.monotonic() + GATHER_S
        while True:
            self.absent()
            if not self.missing or time.monotonic() > deadline:
                break
            time.sleep(LOOK_EVERY_S)
        fewest = self.config.rounds.fewest_replies
        missing = shortened(sorted(self.missing))
        if (num_connected := len(self.roster) - len(self.missing)) < fewest:
            raise TimeoutError(
                f"a round needs {num_of('client', fewest)}, {num_connected} of this run's are "
                f"connected; missing: {missing}"
            )
        if self.missing:
            log.warning("the run continues without %s until they return", missing)

    def absent(self) -> set[str]:
        """Implements `Pool.absent`: the clients that are missing for the second time in a row.

        One that has just disconnected may soon return; its message is then sent again.
        """
        before, online = self.missing, self.refresh()
        self.missing = {entry.client for node, entry in self.roster.items() if node not in online}
        for client in sorted(before - self.missing):
            log.info("client %s is connected again", client)
        return self.missing & before

    def connected(self, nodes: Iterable[int]) -> dict[int, int]:
        """Of nodes that clients have, or had, those whose client is connected: its current node."""
        online = self.refresh()
        node_of = {entry.client: node for node, entry in self.roster.items()}
        found = {node: node_of[self.clients[node]] for node in nodes}
        return {node: current for node, current in found.items() if current in online}

    def refresh(self) -> set[int]:
        """The connected nodes, once new ones have taken the places of their clients' old ones."""
        online, now = set(self.grid.get_node_ids()), time.monotonic()
        unknown = online - self.roster.keys()
        if unknown := {node for node in unknown if self.refused.get(node, now) <= now}:
            self.names = registered_names()  # keys may have been registered since
            answers = self.describe(unknown, min(QUERY_S, self.config.rounds.round_timeout))
            for node in sorted(unknown):
                answer = answers.get(node)
                if isinstance(answer, RosterEntry):
                    self.admit(node, answer, online)
                elif answer is None:
                    self.refuse(node, "no answer", RETRY_SILENT_S)
                else:
                    self.refuse(node, answer, RETRY_S)
        return online

    def describe(self, nodes: Iterable[int], timeout_s: float) -> dict[int, RosterEntry | str]:
        """The entries of nodes, or why they cannot take part; without those that do not answer."""
        found: dict[int, RosterEntry | str] = {}

        def note(reply: Message) -> None:
            node = reply.metadata.src_node_id
            if reply.has_error():
                if reply.error.code != NO_REPLY:
                    found[node] = error_reason(reply.error)
                return
            try:
                entry = read_roster(reply)
            except Exception as error:  # a client's bytes may raise any exception
                found[node] = in_one_line(error)
                return
            found[node] = identity_problem(node, entry.client, self.names) or entry

        content = RecordDict({"round": self.query})
        asked = {
            node: Message(content=content, dst_node_id=node, message_type=MessageType.QUERY)
            for node in sorted(nodes)
        }
        bound_pulls(self.grid, 4 * RECORD_BYTES)
        exchange = Exchange(self.grid, "roster", asked, note, self.still_there, self.name_of)
        exchange.run(timeout_s, "the limit")
        return found

    def still_there(self, nodes: list[int]) -> dict[int, int]:
        """Those of these nodes that are connected."""
        return {node: node for node in set(nodes).intersection(self.grid.get_node_ids())}

    def name_of(self, node: int) -> str:
        """The registered name of a node's client; its number if there is none."""
        return (self.names or {}).get(node, f"on node {node}")

    def refuse(self, node: int, reason: str, wait_s: float) -> None:
        """Log that a node does not take part, and do not query it for `wait_s`."""
        reason = in_one_line(reason)
        log.warning("node %d is new and does not take part: %s", node, reason)
        self.note("refused", node=node, reason=reason)
        self.refused[node] = time.monotonic() + wait_s

    def admit(self, node: int, entry: RosterEntry, online: set[int]) -> None:
        """Let the client of a new node continue there, if its former node is gone and it fits."""
        old = next((n for n, e in self.roster.items() if e.client == entry.client), None)
        if old is None:
            self.refuse(node, f"client {entry.client} came after round 1", math.inf)
            return
        if old in online:
            self.refuse(node, f"client {entry.client} is connected as node {old}", RETRY_S)
            return
        entries = {n: e for n, e in self.roster.items() if n != old} | {node: entry}
        try:
            check_roster(self.config, entries, self.source)
        except ValueError as error:
            self.refuse(node, str(error), RETRY_S)
            return
        before = self.roster.pop(old)
        if (entry.label_counts, entry.num_train) != (before.label_counts, before.num_train):
            log.warning("client %s: its training samples have changed", entry.client)
        self.roster[node] = entry
        self.clients[node] = entry.client
        log.info("client %s is connected again, as node %d", entry.client, node)
        self.note("joined", client=entry.client, node=node)
        if self.path:
            save_roster(self.path / ROSTER_FILE, self.roster)


# --- who the client behind a node is --------------------------------------------------------------


def registered_names() -> dict[int, str] | None:
    """Client name by node id, as `keel deploy register` recorded them for the clients' keys.

    None without $KEEL_CLIENT_REGISTRY. A SuperLink binds a node id to a key, so with the file a
    client is who its key says. ValueError if the file cannot be read.
    """
    path = os.environ.get(REGISTRY_VARIABLE)
    if not path:
        return None
    try:
        clients = json.loads(Path(path).read_text())
        return {int(about["node"]): str(name) for name, about in clients.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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
            f"it calls itself {claimed!r}, and its key has no name: register its request, "
            "the NAME.pub of its credentials, with `keel deploy register`"
        )
    return (
        f"it calls itself {claimed!r}, but its key is registered as {names[node]!r}: deploy it "
        f"with the credentials of {claimed!r}, or under the name {names[node]!r}"
    )
