"""A contrast of the samples of a batch at every stage: the base of FedRCL, FedSCL and FedCL."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from client_app.similarity import unit_features
from models import StagedModel


@dataclass(frozen=True)
class LevelContrast(LocalObjective):
    """A loss on phi_l, the representation at level l, averaged over levels."""

    default_weighting: ClassVar[str] = "uniform"

    def layers(self, model: StagedModel) -> list[str]:
        """All stages before their final ReLU, as in the code of FedRCL's authors."""
        return [f"{stage}:pre" for stage in model.regularised_stages]

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """phi_l, [B, C] each: averaged over positions and scaled to unit length."""
        return [unit_features(z) for z in outputs]

    def level_loss(self, phi: Tensor, y: Tensor) -> Tensor:
        """The loss at one level, a scalar. phi [B, C] of unit length, y [B]."""
        raise NotImplementedError

    def penalty(self, batch: Batch) -> Tensor:
        """(1/L) sum_l of the loss at level l, section 4.4 of the FedRCL paper."""
        return torch.stack([self.level_loss(phi, batch.y) for phi in batch.reps]).mean()
