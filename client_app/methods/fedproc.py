"""FedProc: contrast features with global class prototypes, with decreasing weight (client half).

Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 143 (2023),
arXiv 2109.12273. Server half: strategies/fedproc.py, which averages the prototypes.
Aggregation: weighted average. Client state: none.
z: a sample's 256 projected features, of unit length, which the classifier acts on; c_k: the
prototype of class k, of unit length; t = 0, 1, ...: the round; T: the number of rounds.

As in the authors' code, the projection is in line and of unit length, there is no temperature, and
the loss is a_t CE + (1 - a_t) GPC with a_t = min(1, t / T), but CE alone at t = 0. The code is the
only source here; the paper's text was not available. T is `schedule-rounds`, or the run's number of
rounds (their code: 100). `schedule-rounds = 1` is a control: cross entropy alone, on FedProc's
network.
Prototypes are computed with the trained local model in eval mode on all samples without
augmentation (their code: train mode, with augmentation).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import ModelParts, Update
from client_app.objective import Batch, LocalObjective
from client_app.prototypes import class_sums
from client_app.round import RoundContext
from models import StagedModel
from protocol.options import at_least, option


def prototype_contrast(z: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """GPC, a scalar: mean over the batch of -log( e^{z.c_y} / sum_k e^{z.c_k} ).

    z [B, d] of unit length, y [B], c [C, d] prototypes of any length, constants. A class without a
    prototype (a row of zeros) is left out of the sum, and its samples out of the mean; 0 if no
    sample is left.
    """
    known = c.norm(dim=1) > 0  # [C]
    logits = (z @ F.normalize(c.detach(), dim=1).T).masked_fill(~known, -torch.inf)
    counts = known[y]
    losses = torch.where(counts, F.cross_entropy(logits, y, reduction="none"), 0.0)
    mean: Tensor = losses.sum() / counts.sum().clamp_min(1)
    return mean


def schedule(t: int, total: int) -> float:
    """a_t = min(1, t / T), the weight of cross entropy; 1 at t = 0, where no prototype is known."""
    return 1.0 if t == 0 else min(1.0, t / total)


@dataclass(frozen=True)
class FedProc(LocalObjective):
    """Contrast with the global class prototypes."""

    has_own_server_half: ClassVar[bool] = True
    regularises: ClassVar[str] = "projected features, towards the global class prototypes"
    paper: ClassVar[str] = "Mu et al. 2023"
    extra_forwards: ClassVar[str] = "1 pass over its data per round"

    schedule_rounds: int = option(
        at_least(0),
        "T, the round from which the loss is cross entropy alone; 0: the run's number of rounds",
        default=0,
        source="authors' code: 100",
    )

    def depends_on_num_rounds(self) -> bool:
        """The schedule a_t depends on T, if that is the run's."""
        return self.schedule_rounds == 0

    def model_parts(self) -> ModelParts:
        """The classifier acts on a projection of length 1."""
        return ModelParts(projection="mlp-normalised")

    def layers(self, model: StagedModel) -> list[str]:
        """The classifier's input."""
        return ["features"]

    def begin_round(self, ctx: RoundContext) -> float:
        """a_t of this round."""
        return schedule(ctx.round - 1, self.schedule_rounds or ctx.config.rounds.num_rounds)

    def supervised(self, batch: Batch) -> Tensor:
        """a_t CE."""
        a_t: float = batch.prepared
        return a_t * F.cross_entropy(batch.logits, batch.y)

    def penalty(self, batch: Batch) -> Tensor:
        """(1 - a_t) GPC."""
        (z,) = batch.reps
        weight: float = 1 - batch.prepared
        if weight == 0:
            return z.new_zeros(())
        return weight * prototype_contrast(z, batch.y, batch.ctx.extra["prototypes"])

    def train(self, ctx: RoundContext) -> Update:
        """Local training, then this client's class sums under the trained model."""
        update = super().train(ctx)
        sums, counts = class_sums(ctx.model, ctx.train_samples)
        return replace(update, extra={"sums": sums, "counts": counts})
