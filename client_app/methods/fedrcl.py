"""FedRCL, client half: features of one class alike, but at no level more alike than lambda.

Source: Seo, Kim, Kim, Han, "Relaxed Contrastive Learning for Federated Learning", CVPR 2024,
arXiv 2401.04928; its equation numbers below.
Server half: the plain mean (`weighting = "uniform"`). Kept between rounds: nothing, and no frozen
model is needed. Symbols: phi_l(x) tap l, pooled and of length 1; s_ij = <phi(x_i), phi(x_j)>;
positives of anchor i: the other samples of its class; lambda is the option `threshold`.

`mining = "all"` is eq. (5), but for its sum over positives, which is a mean here. `mining = "hard"`
is the authors' code, the source of their tables: of the positives only the least similar one (the
anchor itself if it has none), of the rest only the two most similar of other classes; mean over all
anchors. `beta = 0` is FedSCL, eq. (2); `levels = "last"` the ablation of Table 4. `pre-activation`
takes each level before its closing ReLU, as the authors' code does; the text does not say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.method import Batch, LocalObjective
from models import StagedModel
from protocol.options import at_least, between, more_than, one_of, option, true_or_false


def unit_features(tap: Tensor) -> Tensor:
    """phi: [B, C, ...] averaged over positions and scaled to length 1, [B, C].

    A row of zeros stays one, with gradient 0.
    """
    phi = tap.flatten(2).mean(2) if tap.ndim > 2 else tap
    length = phi.norm(dim=1, keepdim=True)
    return torch.where(length > 0, phi / torch.where(length > 0, length, 1.0), 0.0)


def log_sum_with_one(s: Tensor, tau: float) -> Tensor:
    """log( sum_k e^{s_ik/tau} + e^{1/tau} ), the last term of eq. (5), [B, K] -> [B].

    Entries of -inf are left out of the sum.
    """
    one = s.new_ones(len(s), 1)
    return torch.cat([s, one], dim=1).div(tau).logsumexp(1)


def rcl_all(phi: Tensor, y: Tensor, tau: float, threshold: float, beta: float) -> Tensor:
    """L_RCL, eq. (5), a scalar: mean over the positives of an anchor, then over anchors with any.

    phi [B, C] of length 1, y [B]. Without a positive in the batch 0, with gradient 0.
    """
    s = phi @ phi.T  # [B, B]
    is_other = ~torch.eye(len(y), dtype=torch.bool, device=y.device)  # k != i
    is_positive = (y[:, None] == y) & is_other
    num_positives = is_positive.sum(1)  # [B]
    s_p = (s * is_positive).sum(1) / num_positives.clamp_min(1)  # [B], mean over the positives j
    others = s.masked_fill(~is_other, -torch.inf).div(tau).logsumexp(1)
    is_too_alike = is_positive & (s > threshold)  # P(x_i)
    divergence = log_sum_with_one(s.masked_fill(~is_too_alike, -torch.inf), tau)
    # the last two are the same for every j, hence their own mean over j
    losses = -s_p / tau + others + beta * divergence
    has_positive = num_positives > 0
    return torch.where(has_positive, losses, 0.0).sum() / has_positive.sum().clamp_min(1)


def rcl_hard(phi: Tensor, y: Tensor, tau: float, threshold: float, beta: float) -> Tensor:
    """As the authors' code, a scalar: eq. (5) with mined pairs, mean over all anchors.

    phi [B, C] of length 1, y [B]. A batch of one class meets the divergence penalty alone.
    """
    s = phi @ phi.T  # [B, B]
    is_same = y[:, None] == y
    of_class = s.masked_fill(~is_same, torch.inf).fill_diagonal_(1.0)
    s_p = of_class.min(1, keepdim=True).values  # [B, 1]
    of_others = s.masked_fill(is_same, -torch.inf)
    s_n = of_others.topk(min(2, len(y)), dim=1).values  # [B, 2]; -inf where there are fewer
    contrast = torch.cat([s_p, s_n], dim=1).div(tau).logsumexp(1) - s_p.squeeze(1) / tau
    divergence = log_sum_with_one(s_p.masked_fill(s_p <= threshold, -torch.inf), tau)
    return (contrast + beta * divergence).mean()


MINING: dict[str, Callable[[Tensor, Tensor, float, float, float], Tensor]] = {
    "all": rcl_all,
    "hard": rcl_hard,
}


def level_taps(model: StagedModel, levels: str, pre_activation: bool) -> list[str]:
    """The taps that are levels: all stages or the last, before their activation or after it."""
    stages = model.regularised_stages if levels == "all" else model.regularised_stages[-1:]
    return [f"{stage}:pre" if pre_activation else stage for stage in stages]


@dataclass(frozen=True)
class FedRCL(LocalObjective):
    """Supervised contrast within the batch, at every level, with a penalty on collapse."""

    default_weighting: ClassVar[str] = "uniform"
    regularises: ClassVar[str] = "all stages, of each other's samples in the batch"
    paper: ClassVar[str] = "Seo et al. 2024 (FedRCL)"

    tau: float = option(more_than(0), "temperature", source="eq. (5); the paper: 0.05")
    threshold: float = option(
        between(-1, 1),
        "lambda: positive pairs that are more similar than this are pushed apart",
        source="eq. (5); the paper: 0.7",
    )
    beta: float = option(
        at_least(0), "weight of the divergence penalty; 0: FedSCL", source="eq. (5); the paper: 1"
    )
    mining: str = option(
        one_of("all", "hard"), "all pairs, eq. (5), or hard pairs", source="hard: authors' code"
    )
    levels: str = option(one_of("all", "last"), "stages compared", source="Table 4")
    pre_activation: bool = option(
        true_or_false(), "representations before the closing ReLU", source="authors' code"
    )

    def taps(self, model: StagedModel) -> list[str]:
        """All stages or the last, before their activation or after it."""
        return level_taps(model, self.levels, self.pre_activation)

    def penalty(self, batch: Batch) -> Tensor:
        """(1/L) sum_l L_RCL(phi_l), section 4.4."""
        rcl = MINING[self.mining]
        levels = [
            rcl(unit_features(tap), batch.y, self.tau, self.threshold, self.beta)
            for tap in batch.taps
        ]
        return torch.stack(levels).mean()
