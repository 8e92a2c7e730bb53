"""FedCL: contrast without labels, an ablation of FedRCL (client half).

Seo et al., arXiv 2401.04928, Table 3; van den Oord et al., arXiv 1807.03748 (InfoNCE).
Aggregation: uniform average. Client state: none.

No FedCL configuration is published. This is the `unsupervised` branch of the released code: the
positive is the sample itself (s = 1, no gradient), the negatives are its two most similar other
samples of any class: pure repulsion. `negatives = "all"` takes all others. Two views are not
offered: which augmentation would make the second one is not known.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.methods.fedrcl import level_layers
from client_app.objective import Batch, LocalObjective
from client_app.similarity import unit_features
from models import StagedModel
from protocol.options import more_than, one_of, option, true_or_false


def repulsion(phi: Tensor, tau: float, negatives: str) -> Tensor:
    """-log( e^{1/tau} / (e^{1/tau} + sum_n e^{s_n/tau}) ), a scalar: mean over the batch.

    phi [B, C] of unit length. 0 for a batch of one, which has no negative.
    """
    batch = len(phi)
    s = (phi @ phi.T).masked_fill(torch.eye(batch, dtype=torch.bool, device=phi.device), -torch.inf)
    if negatives == "hard":
        s = s.topk(min(2, batch), dim=1).values
    one = phi.new_ones(batch, 1)
    return (torch.cat([one, s], dim=1).div(tau).logsumexp(1) - 1 / tau).mean()


@dataclass(frozen=True)
class FedCL(LocalObjective):
    """Repulsion of samples within the batch, at every level."""

    default_weighting: ClassVar[str] = "uniform"
    regularises: ClassVar[str] = "all stages, samples of a batch against each other, without labels"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", source="as FedRCL: 0.05")
    negatives: str = option(
        one_of("hard", "all"), "the two most similar other samples, or all", source="authors' code"
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
        """The repulsion, mean over levels."""
        losses = [repulsion(phi, self.tau, self.negatives) for phi in batch.reps]
        return torch.stack(losses).mean()
