"""FedProc, client half: features near their class's global prototype, less and less so.

Source: Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 143
(2023), arXiv 2109.12273. Server half: strategies/fedproc.py, which averages the prototypes. Kept
between rounds: nothing. Symbols: z a sample's 256 projected features, of length 1, which the
classifier acts on; c_k the prototype of class k, of length 1; t = 0, 1, ... the round, T the total.

As the authors' code: no temperature, loss a_t CE + (1 - a_t) GPC with a_t = min(1, t / T), CE alone
at t = 0. T is the run's number of rounds (their code has 100). Prototypes come from the trained
local model in eval mode on all samples without augmentation (their code: train mode, augmented).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import Arrays, Batch, LocalObjective, ModelParts, Update
from client_app.prototypes import class_sums
from client_app.round import RoundContext
from client_app.trainer import train_on_objective
from models import StagedModel


def prototype_contrast(z: Tensor, y: Tensor, c: Tensor) -> Tensor:
    """GPC, a scalar: mean over the batch of -log( e^{z.c_y} / sum_k e^{z.c_k} ).

    z [B, d] of length 1, y [B], c [C, d] prototypes of any length, constants. A class without a
    prototype (a row of zeros) is left out of the sum, and its samples out of the mean; without any
    sample left it is 0.
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
    regularises: ClassVar[str] = "projected features, to the global class prototypes"
    paper: ClassVar[str] = "Mu et al. 2023"
    extra_forwards: ClassVar[str] = "1 a round over all samples"

    def depends_on_num_rounds(self) -> bool:
        """Its schedule a_t does."""
        return True

    def model_parts(self) -> ModelParts:
        """The classifier acts on a projection of length 1."""
        return ModelParts(projection="mlp-normalised")

    def taps(self, model: StagedModel) -> list[str]:
        """What enters the classifier."""
        return ["features"]

    def supervised(self, batch: Batch) -> Tensor:
        """a_t CE."""
        return self.weight(batch.round) * F.cross_entropy(batch.logits, batch.y)

    def penalty(self, batch: Batch) -> Tensor | None:
        """(1 - a_t) GPC."""
        (z,) = batch.taps
        weight = 1 - self.weight(batch.round)
        if weight == 0:
            return None
        return weight * prototype_contrast(z, batch.y, batch.round.extra["prototypes"])

    def weight(self, ctx: RoundContext) -> float:
        """a_t of this round."""
        return schedule(ctx.round - 1, ctx.config.rounds.num_rounds)

    def train(self, ctx: RoundContext) -> Update:
        """Local training, then this client's class sums with the model it ends with."""
        update = train_on_objective(self, ctx)
        sums, counts = class_sums(ctx.model, ctx.train_samples)
        extra: Arrays = {"sums": sums, "counts": counts}
        return replace(update, extra=extra)
