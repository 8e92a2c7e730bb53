"""FedCL: contrast without labels, an ablation of FedRCL (client half).

Seo et al., arXiv 2401.04928, Table 3; van den Oord et al., arXiv 1807.03748 (InfoNCE).
Aggregation: uniform average. Client state: none.

No FedCL configuration is published. This is the `unsupervised` branch of the released code, which
only repels: the positive is the sample itself (s = 1, no gradient), the negatives are the two most
similar other samples of any class. There is no variant with two augmented views, because the
augmentation for the second one is not published.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.level_contrast import LevelContrast
from protocol.options import more_than, option


def repulsion(phi: Tensor, tau: float) -> Tensor:
    """-log( e^{1/tau} / (e^{1/tau} + e^{s_1/tau} + e^{s_2/tau}) ), a scalar: mean over the batch.

    phi [B, C] of unit length. 0 for a batch of one, which has no negative.
    """
    batch = len(phi)
    s = (phi @ phi.T).masked_fill(torch.eye(batch, dtype=torch.bool, device=phi.device), -torch.inf)
    s = s.topk(min(2, batch), dim=1).values
    one = phi.new_ones(batch, 1)
    return (torch.cat([one, s], dim=1).div(tau).logsumexp(1) - 1 / tau).mean()


@dataclass(frozen=True)
class FedCL(LevelContrast):
    """Repulsion of samples within the batch, at every stage."""

    regularises: ClassVar[str] = "all stages, samples of a batch against each other, without labels"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", default=0.05, source="as FedRCL: 0.05")

    def level_loss(self, phi: Tensor, y: Tensor) -> Tensor:
        """The repulsion; the labels are not read."""
        return repulsion(phi, self.tau)
