"""Global class prototypes on the server, for FedProc and FedPAC."""

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.arrays import Arrays
from protocol.messages import RosterEntry, TrainReply


class Prototypes:
    """A prototype for each class [C, d], and which are known [C]; initially zeros."""

    def __init__(self, num_classes: int, width: int) -> None:
        self.values = torch.zeros(num_classes, width)
        self.is_known = torch.zeros(num_classes)

    def update(self, sums: list[Tensor], counts: list[Tensor]) -> None:
        """Mean over all clients' samples: sum of sums [C, d] over sum of counts [C].

        A class that no client reports in this round keeps its old prototype. The counts of a client
        whose weight is capped are scaled down, to less than 1 for a rare class.
        """
        total = torch.stack(counts).sum(0)
        reported = total > 0
        mean = torch.stack(sums).sum(0) / torch.where(reported, total, 1.0)[:, None]
        self.values = torch.where(reported[:, None], mean, self.values)
        self.is_known = torch.where(reported, 1.0, self.is_known)

    def arrays(self) -> Arrays:
        """For messages and checkpoints."""
        return {"prototypes": self.values, "is-known": self.is_known}

    def load(self, arrays: Arrays) -> None:
        """Restore what `arrays` returned."""
        self.values, self.is_known = arrays["prototypes"], arrays["is-known"]


def check_counts(reply: TrainReply, entry: RosterEntry) -> None:
    """ValueError unless the reply's `counts` [C] equal those of the client's roster entry."""
    counts = reply.extra["counts"]
    if not torch.equal(counts, torch.tensor(entry.label_counts, dtype=counts.dtype)):
        raise ValueError(f"array 'counts' is not {entry.label_counts}")


def capped_scales(replies: Sequence[TrainReply], counts: Sequence[float]) -> list[float]:
    """The share of each reply's number of samples that `max-weight-share` leaves; 1: all of it."""
    return [n / r.metrics["num-examples"] for n, r in zip(counts, replies, strict=True)]
