"""FedSCL: FedRCL without its divergence penalty, plain supervised contrast (client half).

Seo et al., arXiv 2401.04928, eq. (2) and Table 3 (the ablation); Khosla et al., "Supervised
Contrastive Learning", NeurIPS 2020, arXiv 2004.11362. FedRCL's code with beta = 0.
Aggregation: uniform average. Client state: none.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.methods.fedrcl import MINING, level_layers
from client_app.objective import Batch, LocalObjective
from client_app.similarity import unit_features
from models import StagedModel
from protocol.options import more_than, one_of, option, true_or_false


@dataclass(frozen=True)
class FedSCL(LocalObjective):
    """Supervised contrast within the batch, at every level."""

    default_weighting: ClassVar[str] = "uniform"
    regularises: ClassVar[str] = "all stages, samples of a batch against each other"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", source="as FedRCL: 0.05")
    mining: str = option(
        one_of("all", "hard"), "all pairs, eq. (2), or hard pairs", source="hard: authors' code"
    )
    levels: str = option(one_of("all", "last"), "stages compared", source="FedRCL, Table 4")
    pre_activation: bool = option(
        true_or_false(), "representations before the closing ReLU", source="authors' code"
    )

    def layers(self, model: StagedModel) -> list[str]:
        """All stages or the last, before or after their activation."""
        return level_layers(model, self.levels, self.pre_activation)

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """phi_l, [B, C] each."""
        return [unit_features(z) for z in outputs]

    def penalty(self, batch: Batch) -> Tensor:
        """(1/L) sum_l L_SCL(phi_l)."""
        scl = MINING[self.mining]
        losses = [scl(phi, batch.y, self.tau, 1.0, 0.0) for phi in batch.reps]
        return torch.stack(losses).mean()
