"""MOON: contrast the features with those of the global and the previous local model (client half).

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv 2103.16257.
Aggregation: weighted average. Client state: the local model of the previous participation.
z, z_g, z_p: the representation in the local, global and previous local model.

`projection` chooses z:
"none": the classifier's input;
"mlp": the output of a two-layer projection before the classifier, as in MOON's paper and code;
"mlp-side": the output of a projection head on the last stage, which only the contrast reads, as in
FedIntR's code, which produced the MOON rows of FedIntR's tables.
Either projection is averaged like the rest of the model. `reduction = "batch"`, also from FedIntR's
code, averages the cosines over the batch before eq. (3).

At a client's first participation the previous model is the global model (`first-use = "received"`),
so the term is the constant mu log 2 and is left out; a projection head of "mlp-side" then stays as
received, without weight decay. A client that is first sampled after round 1 has the run's initial
model instead with "initial" (FedIntR's code).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import ModelParts
from client_app.objective import Batch, PreviousModelObjective
from models import StagedModel
from models.registry import PROJECTION_WIDTH
from protocol.options import at_least, more_than, one_of, option


def model_contrastive_loss(
    z: Tensor, z_g: Tensor, z_p: Tensor, tau: float, reduction: str = "sample"
) -> Tensor:
    """l_con, eq. (3), mean over the batch, a scalar > 0. Gradient flows through `z` only.

    z, z_g and z_p: [B, d], row b of each is sample b. reduction: "batch" averages the cosines over
    the batch before the equation.
    """
    s_g = F.cosine_similarity(z, z_g.detach(), dim=1)  # [B]
    s_p = F.cosine_similarity(z, z_p.detach(), dim=1)
    if reduction == "batch":
        s_g, s_p = s_g.mean(), s_p.mean()
    # -log( e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}) ), overflow-safe
    return F.softplus((s_p - s_g) / tau).mean()


@dataclass(frozen=True)
class MOON(PreviousModelObjective):
    """Contrast at the classifier's input, or at a projection."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"mu": 0.0}
    regularises: ClassVar[str] = (
        "classifier's input, towards the global, away from the previous model"
    )
    paper: ClassVar[str] = "Li et al. 2021"
    extra_forwards: ClassVar[str] = "2"

    mu: float = option(
        at_least(0),
        "weight of the contrastive term",
        default=1.0,
        source="eq. (4); tuned for each data set",
    )
    tau: float = option(more_than(0), "temperature", default=0.5, source="eq. (3); the paper: 0.5")
    projection: str = option(
        one_of("none", "mlp", "mlp-side"),
        "compare the classifier's input, the output of a projection before the classifier, or that "
        "of a side branch on the last stage",
        default="none",
        source="mlp: MOON's paper and code; mlp-side: FedIntR's code",
    )
    reduction: str = option(
        one_of("sample", "batch"),
        "eq. (3) of each sample, or of the batch's mean cosines",
        default="sample",
        source="batch: FedIntR's code",
    )

    def model_parts(self) -> ModelParts:
        """The projection, in line or as a head of the last stage."""
        if self.projection == "mlp-side":
            return ModelParts(projection_heads=PROJECTION_WIDTH, head_stages=(-1, None))
        return ModelParts(projection=self.projection)

    def layers(self, model: StagedModel) -> list[str]:
        """The classifier's input; the last stage's output where the projection is a side branch."""
        return [model.regularised_stages[-1]] if self.projection == "mlp-side" else ["features"]

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """z, [B, d]."""
        if self.projection != "mlp-side":
            return outputs
        return model.project(self.layers(model), outputs)

    def penalty(self, batch: Batch) -> Tensor:
        """mu l_con, eq. (4)."""
        (z,), (z_g,), (z_p,) = batch.reps, batch.reps_global, batch.reps_previous
        return self.mu * model_contrastive_loss(z, z_g, z_p, self.tau, self.reduction)
