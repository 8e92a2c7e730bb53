"""FedRCL: supervised contrast at every level, with a penalty on collapse (client half).

Seo, Kim, Kim, Han, "Relaxed Contrastive Learning for Federated Learning", CVPR 2024,
arXiv 2401.04928. Equation numbers refer to it.
Aggregation: uniform average. Client state: none; no frozen model either.
phi_l(x): the output of level l, averaged over positions and scaled to unit length;
s_ij = <phi(x_i), phi(x_j)>; the positives of anchor i are the other samples of its class; lambda is
the option `threshold`.

`mining = "all"` is eq. (5), with the mean over positives instead of the sum. `mining = "hard"` is
the authors' code, which produced their tables: it uses only the least similar positive and the two
most similar samples of other classes, and averages over all anchors. An anchor without a positive
is its own positive in the contrast, and no penalty applies to it. `beta = 0` is FedSCL, eq. (2);
`levels = "last"` is the ablation of Table 4. Each level is taken before its final ReLU, as in the
authors' code; the paper does not specify it.

The second logarithm of eq. (5) is at least 1/tau (20 for tau = 0.05). This constant has no
gradient, so the losses here, and the penalty that a run records, omit it and are lower by beta/tau.

With hard mining the features collapse at first and recover late, with the authors' code too. From
random weights at lr 0.1 all features point in one direction within about ten steps (cosines of
different classes 0.99), where the two terms are log 3 and beta log 2. Recovery takes thousands of
steps, so a short run shows only the collapse. With `mining = "all"` the features do not collapse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.level_contrast import LevelContrast
from models import StagedModel
from protocol.options import at_least, between, more_than, one_of, option


def divergence_penalty(s: Tensor, tau: float) -> Tensor:
    """log( sum_k e^{s_ik/tau} + e^{1/tau} ) - 1/tau, [B, K] -> [B], at least 0.

    The last term of eq. (5) less its smallest value. Entries of -inf are left out of the sum.
    """
    one = s.new_ones(len(s), 1)
    return torch.cat([s, one], dim=1).div(tau).logsumexp(1) - 1 / tau


def rcl_all(phi: Tensor, y: Tensor, tau: float, threshold: float, beta: float) -> Tensor:
    """L_RCL, eq. (5) minus beta/tau: mean over positives, then over anchors that have any.

    phi [B, C] of unit length, y [B]. 0, with gradient 0, without a positive in the batch.
    """
    s = phi @ phi.T  # [B, B]
    is_other = ~torch.eye(len(y), dtype=torch.bool, device=y.device)  # k != i
    is_positive = (y[:, None] == y) & is_other
    num_positives = is_positive.sum(1)  # [B]
    s_p = (s * is_positive).sum(1) / num_positives.clamp_min(1)  # [B], mean over the positives j
    others = s.masked_fill(~is_other, -torch.inf).div(tau).logsumexp(1)
    is_too_similar = is_positive & (s > threshold)  # P(x_i)
    divergence = divergence_penalty(s.masked_fill(~is_too_similar, -torch.inf), tau)
    # `others` and `divergence` do not depend on j, so averaging over j leaves them unchanged
    losses = -s_p / tau + others + beta * divergence
    has_positive = num_positives > 0
    return torch.where(has_positive, losses, 0.0).sum() / has_positive.sum().clamp_min(1)


def rcl_hard(phi: Tensor, y: Tensor, tau: float, threshold: float, beta: float) -> Tensor:
    """Eq. (5) minus beta/tau with mined pairs, as in the authors' code: mean over all anchors.

    phi [B, C] of unit length, y [B]. In a batch of one class only the divergence penalty acts.
    """
    s = phi @ phi.T  # [B, B]
    is_same = y[:, None] == y
    is_self = torch.eye(len(y), dtype=torch.bool, device=y.device)
    of_class = s.masked_fill(~is_same, torch.inf).masked_fill(is_self, 1.0)
    s_p = of_class.min(1, keepdim=True).values  # [B, 1]
    of_others = s.masked_fill(is_same, -torch.inf)
    s_n = of_others.topk(min(2, len(y)), dim=1).values  # [B, 2]; -inf where there are fewer
    contrast = torch.cat([s_p, s_n], dim=1).div(tau).logsumexp(1) - s_p.squeeze(1) / tau
    has_no_penalty = (s_p <= threshold) | (is_same.sum(1, keepdim=True) == 1)  # or no positive
    divergence = divergence_penalty(s_p.masked_fill(has_no_penalty, -torch.inf), tau)
    return (contrast + beta * divergence).mean()


MINING: dict[str, Callable[[Tensor, Tensor, float, float, float], Tensor]] = {
    "all": rcl_all,
    "hard": rcl_hard,
}


@dataclass(frozen=True)
class FedRCL(LevelContrast):
    """Supervised contrast within the batch, at every level, with a penalty on collapse."""

    regularises: ClassVar[str] = "all stages, samples of a batch against each other"
    paper: ClassVar[str] = "Seo et al. 2024 (FedRCL)"

    tau: float = option(
        more_than(0), "temperature", default=0.05, source="eq. (5); the paper: 0.05"
    )
    threshold: float = option(
        between(-1, 1),
        "lambda: positive pairs that are more similar than this are pushed apart",
        default=0.7,
        source="eq. (5); the paper: 0.7",
    )
    beta: float = option(
        at_least(0),
        "weight of the divergence penalty; 0: FedSCL",
        default=1.0,
        source="eq. (5); the paper: 1",
    )
    mining: str = option(
        one_of("all", "hard"),
        "all pairs, eq. (5), or hard pairs",
        default="all",
        source="hard: authors' code",
    )

    levels: str = option(one_of("all", "last"), "stages compared", default="all", source="Table 4")

    def layers(self, model: StagedModel) -> list[str]:
        """All stages or the last, before their final ReLU."""
        layers = super().layers(model)
        return layers if self.levels == "all" else layers[-1:]

    def level_loss(self, phi: Tensor, y: Tensor) -> Tensor:
        """L_RCL(phi_l), eq. (5)."""
        return MINING[self.mining](phi, y, self.tau, self.threshold, self.beta)
