"""How long each update of a round is, and whether it goes the way of the others'."""

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from protocol.arrays import Arrays

# values of a round's updates, up to which they are held to be measured: 1 GB at sites, 16 MB in a
# simulation, whose clients are not sites that somebody watches
MAX_SITE_VALUES, MAX_SIMULATED_VALUES = 2**28, 2**22


class Directions:
    """The updates of a round's clients, one vector each; {} and no work beyond the limits above."""

    def __init__(self, num_clients: int, sent: Arrays, is_simulated: bool) -> None:
        num_values = num_clients * sum(array.numel() for array in sent.values())
        self.is_on = num_values <= (MAX_SIMULATED_VALUES if is_simulated else MAX_SITE_VALUES)
        self.updates: dict[str, Tensor] = {}

    def add(self, client: str, update: Arrays, trainable: Container[str]) -> None:
        """Hold a client's update, without BatchNorm's statistics; none of no arrays."""
        trained = [array for name, array in update.items() if name in trainable]
        if pieces := [array.reshape(-1).float() for array in trained or update.values()]:
            self.updates[client] = torch.cat(pieces)

    def of(self, clients: Sequence[str], weights: Sequence[float]) -> dict[str, dict[str, float]]:
        """By client the `norm` of its update, and its `cosine` with the mean of the others'.

        weights: of the clients in the mean. There is no cosine where either is 0, or nobody else.
        """
        pairs = [
            (self.updates[c], w) for c, w in zip(clients, weights, strict=True) if self.updates
        ]
        if not pairs:
            return {}
        total = torch.zeros_like(pairs[0][0])
        for update, weight in pairs:
            total.add_(update, alpha=weight)
        total_square = float(total.dot(total))
        found: dict[str, dict[str, float]] = {}
        for client, (update, weight) in zip(clients, pairs, strict=True):
            square, product = float(update.dot(update)), float(update.dot(total))
            # of the weighted sum without this client's
            rest_square = total_square - 2 * weight * product + weight**2 * square
            found[client] = {"norm": math.sqrt(square)}
            if len(clients) > 1 and square > 0 and rest_square > 1e-9 * weight**2 * square:
                cosine = (product - weight * square) / math.sqrt(square * rest_square)
                found[client]["cosine"] = max(-1.0, min(1.0, cosine))
        return found
