"""FedCL, client half: contrast that knows no labels, an ablation of FedRCL (its Table 3).

Source: Seo et al., arXiv 2401.04928, Table 3; van den Oord et al., arXiv 1807.03748 (InfoNCE).
Server half: the plain mean. Kept between rounds: nothing.

No FedCL configuration is published. This is the `unsupervised` branch of the released code: the
positive is the sample itself (s = 1, no gradient), the negatives its two most similar others of
any class: pure repulsion. `negatives = "all"` takes all others. Two views are not offered: which
augmentation would make the second one is not known.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.method import Batch, LocalObjective
from client_app.methods.fedrcl import level_taps, unit_features
from models import StagedModel
from protocol.options import more_than, one_of, option, true_or_false


def repulsion(phi: Tensor, tau: float, negatives: str) -> Tensor:
    """-log( e^{1/tau} / (e^{1/tau} + sum_n e^{s_n/tau}) ), a scalar: mean over the batch.

    phi [B, C] of length 1. A batch of one has no negative: 0.
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
    regularises: ClassVar[str] = "all stages, of each other's samples, labels unused"
    paper: ClassVar[str] = "Seo et al. 2024 (ablation)"

    tau: float = option(more_than(0), "temperature", source="as FedRCL: 0.05")
    negatives: str = option(
        one_of("hard", "all"), "the two most similar other samples, or all", source="authors' code"
    )
    levels: str = option(one_of("all", "last"), "stages compared", source="FedRCL, Table 4")
    pre_activation: bool = option(
        true_or_false(), "representations before the closing ReLU", source="authors' code"
    )

    def taps(self, model: StagedModel) -> list[str]:
        """All stages or the last, before their activation or after it."""
        return level_taps(model, self.levels, self.pre_activation)

    def penalty(self, batch: Batch) -> Tensor:
        """Mean over levels."""
        levels = [repulsion(unit_features(tap), self.tau, self.negatives) for tap in batch.taps]
        return torch.stack(levels).mean()
