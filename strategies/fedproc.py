"""FedProc: the weighted average, and global class prototypes (server half).

Mu et al., FGCS 143 (2023), arXiv 2109.12273. c_k is the sum of the clients' sums over the
sum of their counts, as in the authors' code; a class that no client reports keeps its prototype,
initially zeros.
"""

from typing import ClassVar

import torch

from models import StagedModel
from protocol.arrays import Arrays
from protocol.config import RunConfig
from protocol.messages import TrainReply
from strategies.average import Average
from strategies.prototypes import Prototypes, capped_scales, check_counts


class FedProcServer(Average):
    """Sends the prototypes alongside the model; receives class sums and counts."""

    needs_updates: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: StagedModel) -> None:
        super().__init__(config, model)
        self.prototypes = Prototypes(model.num_classes, model.feature_width)

    def extra(self) -> Arrays:
        """The prototypes; zeros for classes without one."""
        return {"prototypes": self.prototypes.values}

    def expected_extra(self) -> Arrays:
        """Sums [C, d] and counts [C]."""
        sums = self.prototypes.values
        return {"sums": sums, "counts": torch.zeros(len(sums))}

    def checked_extra(self, reply: TrainReply) -> Arrays:
        """Class means. ValueError if the counts or sums differ from the roster entry."""
        check_counts(reply, self.entry_of(reply))
        sums, counts = reply.extra["sums"], reply.extra["counts"]
        if sums[counts == 0].any():
            raise ValueError("array 'sums' is not 0 for a class without samples")
        return {"means": sums / counts.clamp_min(1)[:, None]}

    def next_arrays(self, current: Arrays, replies: list[TrainReply]) -> Arrays:
        """The average, then new prototypes."""
        following = super().next_arrays(current, replies)
        scales = capped_scales(replies, self.counts(replies))
        sums, counts = (
            [r.extra[key] * scale for r, scale in zip(replies, scales, strict=True)]
            for key in ("sums", "counts")
        )
        self.prototypes.update(sums, counts)
        return following

    def own_state(self) -> Arrays:
        """The prototypes."""
        return self.prototypes.arrays()

    def load_own(self, state: Arrays) -> None:
        """Restore these prototypes."""
        self.prototypes.load(state)
