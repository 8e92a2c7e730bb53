"""Who is asked: a client that fails time after time is rested, and tried again later.

A dead client costs a whole deadline in each round that it is asked. After `backoff-after` failures in
a row it is left alone for `backoff-rounds` rounds; then one more failure rests it again, one success
clears it.
"""

from collections.abc import Collection

import torch

from protocol.messages import Arrays


class Backoff:
    """Failures in a row of each client, and the last round of its rest."""

    def __init__(self, backoff_after: int, backoff_rounds: int) -> None:
        self.backoff_after, self.backoff_rounds = backoff_after, backoff_rounds
        self.failures: dict[str, int] = {}
        self.rests_until: dict[str, int] = {}

    def resting(self, server_round: int, clients: Collection[str], at_least: int) -> set[str]:
        """Which of the clients rest in this round: none if fewer than `at_least` would be left."""
        found = {
            client
            for client in clients
            if server_round <= self.rests_until.get(client, 0) < server_round + self.backoff_rounds
        }
        return found if len(clients) - len(found) >= max(1, at_least) else set()

    def note(self, server_round: int, good: Collection[str], failed: Collection[str]) -> list[str]:
        """Remember how this round went; the clients that rest from the next round on."""
        for client in good:
            self.failures.pop(client, None)
            self.rests_until.pop(client, None)
        for client in failed:
            self.failures[client] = self.failures.get(client, 0) + 1
        if not self.backoff_after:
            return []
        tired = sorted(c for c in failed if self.failures[c] >= self.backoff_after)
        for client in tired:
            self.rests_until[client] = server_round + self.backoff_rounds
        return tired

    def state(self) -> Arrays:
        """[failures, last round of the rest] of each client that has failed lately."""
        return {
            client: torch.tensor([failures, self.rests_until.get(client, 0)])
            for client, failures in self.failures.items()
        }

    def load(self, state: Arrays) -> None:
        """Go on from what `state` gave."""
        self.failures = {client: int(pair[0]) for client, pair in state.items()}
        self.rests_until = {client: int(pair[1]) for client, pair in state.items() if pair[1]}
