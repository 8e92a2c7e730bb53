"""FedAvg + FitNet: distil pooled features of every stage from the global model (client half).

Romero et al., "FitNets: Hints for Thin Deep Nets", ICLR 2015, arXiv 1412.6550, eq. (3), with the
received global model as the teacher, as in FedRCL's tables.
Aggregation: weighted average. Client state: none.

FedRCL states only lambda. This is the generic feature distillation of its released client: the
mean square over batch and channels, then the mean over layers. Teacher and student have
the same architecture, so there is no regressor; the factor 1/2 is absent. The layers are the
stages, before their final ReLU and averaged over positions, and the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from client_app.objective import Batch, LocalObjective
from client_app.similarity import spatial_mean
from models import StagedModel
from protocol.options import at_least, option


def feature_distance(f: Sequence[Tensor], f_g: Sequence[Tensor]) -> Tensor:
    """FD, a scalar: mean square over batch and entries, then mean over layers.

    Element l of both is layer l of the same batch, [B, ...]. Gradient flows through `f` only.
    """
    pairs = zip(f, f_g, strict=True)
    return torch.stack([(a - b.detach()).square().mean() for a, b in pairs]).mean()


@dataclass(frozen=True)
class FitNet(LocalObjective):
    """Feature distillation from the global model."""

    uses_global: ClassVar[bool] = True
    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"lambda": 0.0}
    regularises: ClassVar[str] = "all stages and the logits, towards the global model's"
    paper: ClassVar[str] = "Romero et al. 2015"
    extra_forwards: ClassVar[str] = "1"

    lambda_: float = option(
        at_least(0),
        "weight of the distillation term",
        default=0.001,
        source="FedRCL, supplement E: 0.001",
        key="lambda",
    )

    def layers(self, model: StagedModel) -> list[str]:
        """Every stage before its activation, and the logits."""
        return [*(f"{stage}:pre" for stage in model.regularised_stages), "logits"]

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """f_l, [B, C] each: averaged over positions."""
        return [spatial_mean(z) for z in outputs]

    def penalty(self, batch: Batch) -> Tensor:
        """lambda FD."""
        return self.lambda_ * feature_distance(batch.reps, batch.reps_global)
