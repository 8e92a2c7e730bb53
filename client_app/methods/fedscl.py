"""FedSCL, client half: FedRCL without its divergence penalty, plain supervised contrast.

Source: Seo et al., arXiv 2401.04928, eq. (2) and Table 3 (the ablation); Khosla et al., "Supervised
Contrastive Learning", NeurIPS 2020, arXiv 2004.11362. Server half: the plain mean. Kept between
rounds: nothing. It is client_app/methods/fedrcl.py with beta = 0, by the same code.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.method import Batch, LocalObjective
from client_app.methods.fedrcl import MINING, level_taps, unit_features
from models import StagedModel
from protocol.options import more_than, one_of, option, true_or_false


@dataclass(frozen=True)
class FedSCL(LocalObjective):
    """Supervised contrast within the batch, at every level."""

    default_weighting: ClassVar[str] = "uniform"
    regularises: ClassVar[str] = "all stages, of each other's samples in the batch"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", source="as FedRCL: 0.05")
    mining: str = option(
        one_of("all", "hard"), "all pairs, eq. (2), or hard pairs", source="hard: authors' code"
    )
    levels: str = option(one_of("all", "last"), "stages compared", source="FedRCL, Table 4")
    pre_activation: bool = option(
        true_or_false(), "representations before the closing ReLU", source="authors' code"
    )

    def taps(self, model: StagedModel) -> list[str]:
        """All stages or the last, before their activation or after it."""
        return level_taps(model, self.levels, self.pre_activation)

    def penalty(self, batch: Batch) -> Tensor:
        """(1/L) sum_l L_SCL(phi_l)."""
        scl = MINING[self.mining]
        levels = [scl(unit_features(tap), batch.y, self.tau, 1.0, 0.0) for tap in batch.taps]
        return torch.stack(levels).mean()
