"""The run's clients, and the cohort of each round."""

import logging
from collections.abc import Collection, Iterable, Mapping, Set

import numpy as np

from protocol.config_keys import RoundsConfig
from protocol.messages import RosterEntry
from protocol.text import num_of
from strategies.backoff import BACKOFF_ROUNDS, Backoff
from strategies.sampling import FIRST_NODE, ClientNames, sample_cohort

log = logging.getLogger("keel.server")
ClientState = dict[str, dict[str, int] | dict[str, list[int]]]


class Cohort:
    """Samples clients by name from the run's seed, and remembers who was accepted and who failed.

    roster: node id to the client behind it; may change between rounds (a restarted SuperNode).
    away: clients that are not connected. last_accepted_rounds: by client.
    """

    def __init__(self, rounds: RoundsConfig) -> None:
        self.rounds = rounds
        self.roster: Mapping[int, RosterEntry] = {}
        self.away: set[str] = set()
        self.last_accepted_rounds: dict[str, int] = {}
        self.backoff = Backoff(rounds.backoff_after)

    @property
    def clients(self) -> Set[str]:
        """The names of all clients."""
        names = getattr(self.roster, "names", None)  # a roster of simulated clients has them
        return names if names is not None else {entry.client for entry in self.roster.values()}

    def nodes_of(self, clients: Iterable[str]) -> list[int]:
        """The nodes of these clients, in their order."""
        names = self.clients
        if isinstance(names, ClientNames):
            return [FIRST_NODE + names.number(client) for client in clients]
        node_of = {entry.client: node for node, entry in self.roster.items()}
        return [node_of[client] for client in clients]

    def sample(self, server_round: int) -> list[int]:
        """Node ids of the round's cohort, in the order of the clients' names."""
        names, unavailable = self.clients, self.backed_off(server_round)
        share, seed = self.rounds.fraction_train, self.rounds.seed
        if isinstance(names, ClientNames):
            numbers = [names.number(name) for name in unavailable]
            found = sample_cohort(names.in_order, numbers, share, seed, server_round)
            return [FIRST_NODE + number for number in found]
        in_order = np.array(sorted(names))
        return self.nodes_of(sample_cohort(in_order, unavailable, share, seed, server_round))

    def backed_off(self, server_round: int) -> set[str]:
        """Clients that are not sampled in this round: disconnected, or failed too often.

        Neither kind is left out where fewer than `fewest_replies` clients would remain.
        """
        clients, fewest = self.clients, max(1, self.rounds.fewest_replies)
        if not self.away:
            return self.backoff.backed_off(server_round, clients, fewest)
        away = self.away if len(clients - self.away) >= fewest else set()
        return away | self.backoff.backed_off(server_round, clients - away, fewest)

    def note(self, server_round: int, accepted: Collection[str], failed: Collection[str]) -> None:
        """Record the clients of a round whose updates were accepted, and those that failed."""
        for client in self.backoff.note(server_round, accepted, failed):
            log.warning(
                "round %d: client %s failed %s in a row; it is not sampled for %d rounds",
                server_round,
                client,
                num_of("time", self.backoff.failures[client]),
                BACKOFF_ROUNDS,
            )

    def state(self) -> ClientState:
        """What a resumed run needs."""
        return {"accepted": self.last_accepted_rounds, "backoff": self.backoff.state()}

    def load(self, state: ClientState) -> None:
        """Restore what `state` returned."""
        self.last_accepted_rounds = dict(state["accepted"])  # type: ignore[arg-type]
        self.backoff.load(state["backoff"])  # type: ignore[arg-type]
