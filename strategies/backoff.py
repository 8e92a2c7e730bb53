"""Backoff: clients that fail repeatedly are not sampled, or not evaluated, for some rounds.

A dead client costs a whole timeout in each round in which it is sampled. After `backoff-after`
failures in a row it is not sampled for five rounds. Then one more failure excludes it again, and
one success clears it.
"""

from collections.abc import Collection, Mapping, Sequence

BACKOFF_ROUNDS = 5  # length of a backoff


class Backoff:
    """Each client's failures in a row, and the last round of its backoff."""

    def __init__(self, backoff_after: int) -> None:
        self.backoff_after = backoff_after  # failures in a row; 0: never
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

    def note(self, server_round: int, good: Collection[str], failed: Collection[str]) -> list[str]:
        """Record a round; returns the clients that are backed off from the next round on."""
        for client in good:
            self.failures.pop(client, None)
            self.last_rounds.pop(client, None)
        for client in sorted(failed):  # the order is in the checkpoint
            self.failures[client] = self.failures.get(client, 0) + 1
        if not self.backoff_after:
            return []
        new = sorted(c for c in failed if self.failures[c] >= self.backoff_after)
        for client in new:
            self.last_rounds[client] = server_round + BACKOFF_ROUNDS
        return new

    def state(self) -> dict[str, list[int]]:
        """[failures, last round of the backoff] of each client that has failed lately."""
        return {
            client: [failures, self.last_rounds.get(client, 0)]
            for client, failures in self.failures.items()
        }

    def load(self, state: Mapping[str, Sequence[int]]) -> None:
        """Restore what `state` returned."""
        self.failures = {client: failures for client, (failures, _) in state.items()}
        self.last_rounds = {client: last for client, (_, last) in state.items() if last}
