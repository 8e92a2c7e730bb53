"""FedNTD: distil the global model's distribution over the not-true classes (client half).

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, arXiv 2106.03097.
Aggregation: weighted average. Client state: none.
z, z_g: logits of the local and the global model; y: the true class.

The default is the paper's CE + beta tau^2 KL. `convex = true` is (1 - beta) CE + beta KL with tau 1
and no tau^2, the code behind FedRCL's tables (there beta = 0.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from models import StagedModel
from protocol.config import RunConfig
from protocol.options import ConfigError, at_least, more_than, option, true_or_false


def not_true(z: Tensor, y: Tensor) -> Tensor:
    """The logits without the true class's, [B, C] -> [B, C - 1]."""
    batch, classes = z.shape
    others = torch.arange(classes - 1, device=z.device).expand(batch, -1)
    return z.gather(1, others + (others >= y[:, None]).long())  # a mask would wait for the GPU


def not_true_divergence(z: Tensor, z_g: Tensor, y: Tensor, tau: float) -> Tensor:
    """KL(q_g || q_l) over the not-true classes, a scalar: sum over classes, mean over the batch.

    z and z_g [B, C] of the same batch, y [B]. Gradient flows through `z` only.
    """
    log_q_l = F.log_softmax(not_true(z, y) / tau, dim=1)
    q_g = F.softmax(not_true(z_g.detach(), y) / tau, dim=1)
    return F.kl_div(log_q_l, q_g, reduction="batchmean")


@dataclass(frozen=True)
class FedNTD(LocalObjective):
    """Not-true distillation from the global model."""

    uses_global: ClassVar[bool] = True
    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"beta": 0.0}
    regularises: ClassVar[str] = "logits of all classes but the label's, towards the global model's"
    paper: ClassVar[str] = "Lee et al. 2022"
    extra_forwards: ClassVar[str] = "1"

    beta: float = option(
        at_least(0), "weight of the distillation term", default=1.0, source="authors' code: 1"
    )
    tau: float = option(more_than(0), "temperature", default=1.0, source="authors' code: 1")
    convex: bool = option(
        true_or_false(),
        "(1 - beta) CE + beta KL with tau 1",
        default=False,
        source="the code of FedRCL's tables, with beta 0.3",
    )

    def __post_init__(self) -> None:
        """Refuse the convex form where its weight of cross entropy, 1 - beta, is not positive."""
        if self.convex and self.beta >= 1:
            raise ConfigError(
                "fedntd.beta",
                f"fedntd.beta = {self.beta!r} with fedntd.convex = true: cross entropy is weighted "
                "by 1 - beta, so beta must be below 1; FedRCL's tables use 0.3",
            )

    def warning(self, config: RunConfig, num_samples: Mapping[str, int]) -> str:
        """A warning if a temperature is set for the convex form, which has none."""
        if not self.convex or self.tau == 1:
            return ""
        return f"fedntd.tau = {self.tau!r} has no effect: with fedntd.convex = true tau is 1"

    def layers(self, model: StagedModel) -> list[str]:
        """The logits."""
        return ["logits"]

    def supervised(self, batch: Batch) -> Tensor:
        """Cross entropy, times 1 - beta in the convex form."""
        loss = F.cross_entropy(batch.logits, batch.y)
        return (1 - self.beta) * loss if self.convex else loss

    def penalty(self, batch: Batch) -> Tensor:
        """beta tau^2 KL; in the convex form beta KL with tau 1."""
        (z_g,) = batch.reps_global
        if self.convex:
            return self.beta * not_true_divergence(batch.logits, z_g, batch.y, 1.0)
        divergence = not_true_divergence(batch.logits, z_g, batch.y, self.tau)
        return self.beta * self.tau**2 * divergence
