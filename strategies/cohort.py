"""The run's clients, and the cohort of each round: who is sampled, and who is in backoff.

A dead client costs a whole timeout in each round in which it is sampled. After it has given no
answer `backoff-after` times in a row it is not sampled, or not evaluated, for five rounds. Then one
more silence excludes it again. Any answer, also an error, ends the backoff: it costs no timeout.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import numpy as np

from protocol.config_keys import RoundsConfig
from protocol.messages import RosterEntry
from protocol.seeds import seed_of
from protocol.text import num_of

FIRST_NODE = 2  # the node of simulated client 0; 1 is Flower's SuperLink
BACKOFF_ROUNDS = 5  # length of a backoff
log = logging.getLogger("keel.server")
ClientState = dict[str, dict[str, int] | dict[str, list[int]]]


def name_of(number: int) -> str:
    """A simulated client's name."""
    return f"client-{number:04d}"


class Backoff:
    """How often each client gave no answer in a row, and the last round of its backoff."""

    def __init__(self, backoff_after: int) -> None:
        self.backoff_after = backoff_after  # unanswered messages in a row; 0: never
        self.failures: dict[str, int] = {}
        self.last_rounds: dict[str, int] = {}

    def backed_off(self, server_round: int, clients: Collection[str], min_left: int) -> set[str]:
        """The clients that are backed off in this round; none if fewer than `min_left` remain."""
        found = {
            client
            for client, last in self.last_rounds.items()
            if server_round <= last < server_round + BACKOFF_ROUNDS and client in clients
        }
        return found if len(clients) - len(found) >= min_left else set()

    def end(self, clients: Iterable[str]) -> None:
        """Note that these clients answer."""
        for client in clients:
            self.failures.pop(client, None)
            self.last_rounds.pop(client, None)

    def note(
        self, server_round: int, answered: Iterable[str], silent: Collection[str]
    ) -> list[str]:
        """Record a round; returns the clients that are backed off from the next round on."""
        self.end(answered)
        for client in sorted(silent):  # the order is in the checkpoint
            self.failures[client] = self.failures.get(client, 0) + 1
        if not self.backoff_after:
            return []
        new = sorted(c for c in silent if self.failures[c] >= self.backoff_after)
        for client in new:
            self.last_rounds[client] = server_round + BACKOFF_ROUNDS
        return new

    def state(self) -> dict[str, list[int]]:
        """[failures, last round of the backoff] of each client that gave no answer lately."""
        return {
            client: [failures, self.last_rounds.get(client, 0)]
            for client, failures in self.failures.items()
        }

    def load(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore what `state` returned."""
        self.failures = {client: failures for client, (failures, _) in state.items()}
        self.last_rounds = {client: last for client, (_, last) in state.items() if last}


class Cohort:
    """Samples clients by name from the run's seed; remembers who was accepted and who was silent.

    roster: node id to the client behind it; may change between rounds (a restarted SuperNode).
    away: clients that are not connected. last_accepted_rounds: by client.
    evaluation_backoff: counts evaluations alone, as a client may train and answer no evaluation.
    """

    def __init__(self, rounds: RoundsConfig) -> None:
        self.rounds = rounds
        self.roster: Mapping[int, RosterEntry] = {}
        self.away: set[str] = set()
        self.last_accepted_rounds: dict[str, int] = {}
        self.backoff = Backoff(rounds.backoff_after)
        self.evaluation_backoff = Backoff(rounds.backoff_after)  # not in `state`

    @property
    def node_of(self) -> Mapping[str, int]:
        """The node of each client, by name."""
        found: Mapping[str, int] | None = getattr(self.roster, "node_of", None)  # simulated clients
        return {e.client: node for node, e in self.roster.items()} if found is None else found

    @property
    def clients(self) -> Set[str]:
        """The names of all clients."""
        return self.node_of.keys()

    def nodes_of(self, clients: Iterable[str]) -> list[int]:
        """The nodes of these clients, in their order."""
        node_of = self.node_of
        return [node_of[client] for client in clients]

    def sample(self, server_round: int) -> list[int]:
        """Node ids of the round's cohort, in the order of the clients' names.

        Drawn is `train-fraction` of all clients (at least one), without replacement, from those
        that are available. The draw depends on the run's seed, the round and the clients' names
        alone: Flower's own sampling depends on node ids, which are random.
        """
        names, unavailable = sorted(self.clients), self.backed_off(server_round)
        available = [name for name in names if name not in unavailable]
        count = min(max(1, round(self.rounds.train_fraction * len(names))), len(available))
        rng = np.random.default_rng(seed_of(self.rounds.seed, server_round, "sampling"))
        chosen = np.sort(rng.choice(len(available), size=count, replace=False))
        return self.nodes_of(available[i] for i in chosen)

    def backed_off(self, server_round: int) -> set[str]:
        """Clients that are not sampled in this round: disconnected, or silent too often.

        Neither kind is left out where fewer than `fewest_replies` clients would remain.
        """
        clients, fewest = self.clients, max(1, self.rounds.fewest_replies)
        if not self.away:
            return self.backoff.backed_off(server_round, clients, fewest)
        away = self.away if len(clients - self.away) >= fewest else set()
        return away | self.backoff.backed_off(server_round, clients - away, fewest)

    def note(self, server_round: int, answered: Iterable[str], silent: Collection[str]) -> None:
        """Record the clients of a round that answered, if with an error, and those that did not."""
        for client in self.backoff.note(server_round, answered, silent):
            log.warning(
                "round %d: client %s gave no answer %s in a row; it is not sampled for %d rounds, "
                "or until it answers",
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
