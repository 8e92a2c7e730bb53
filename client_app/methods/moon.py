"""MOON: contrast the features with those of the global and the previous local model (client half).

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv 2103.16257.
Aggregation: weighted average. Client state: the local model of the previous participation.
z, z_g, z_p: the classifier's input in the local, global and previous local model.

At a client's first participation the previous model is the global model, so the term is the
constant mu log 2 and is left out. `first-use = "official"` follows the authors' code: the term is
left out only in round 1, and a client first sampled later has random weights as previous model.
`projection = "mlp"` adds the paper's projection head before the classifier, averaged like the rest;
"none" compares the network's own features.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import ModelParts
from client_app.objective import Batch, LocalObjective
from client_app.round import RoundContext
from models import StagedModel
from protocol.messages import Arrays
from protocol.options import at_least, more_than, one_of, option


def model_contrastive_loss(z: Tensor, z_g: Tensor, z_p: Tensor, tau: float) -> Tensor:
    """l_con, eq. (3), mean over the batch, a scalar > 0. Gradient flows through `z` only.

    z, z_g and z_p: [B, d], row b of each is sample b.
    """
    s_g = F.cosine_similarity(z, z_g.detach(), dim=1)  # [B]
    s_p = F.cosine_similarity(z, z_p.detach(), dim=1)
    # -log( e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}) ), overflow-safe
    return F.softplus((s_p - s_g) / tau).mean()


@dataclass(frozen=True)
class MOON(LocalObjective):
    """Contrast at the classifier's input."""

    is_stateful: ClassVar[bool] = True
    uses_global: ClassVar[bool] = True
    uses_previous: ClassVar[bool] = True
    client_state: ClassVar[str] = "its previous local model"
    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"mu": 0.0}
    regularises: ClassVar[str] = (
        "classifier's input, towards the global, away from the previous model"
    )
    paper: ClassVar[str] = "Li et al. 2021"
    extra_forwards: ClassVar[str] = "2"

    mu: float = option(
        at_least(0), "weight of the contrastive term", source="eq. (4); tuned for each data set"
    )
    tau: float = option(more_than(0), "temperature", source="eq. (3); the paper: 0.5")
    projection: str = option(
        one_of("none", "mlp"),
        "compare the classifier's input, or the output of a 2-layer projection",
        source="the paper: mlp",
    )
    first_use: str = option(
        one_of("received", "official"),
        "previous model at a client's first participation",
        source="official: authors' code",
    )

    def model_parts(self) -> ModelParts:
        """The projection head, with `projection = "mlp"`."""
        return ModelParts(projection=self.projection)

    def first_previous(self, ctx: RoundContext) -> Arrays | None:
        """Random weights from round 2 on with `first-use = "official"`."""
        if self.first_use == "received" or ctx.round == 1:
            return None
        return ctx.random_weights("first-use")

    def layers(self, model: StagedModel) -> list[str]:
        """The classifier's input."""
        return ["features"]

    def penalty(self, batch: Batch) -> Tensor:
        """mu l_con, eq. (4)."""
        (z,), (z_g,), (z_p,) = batch.reps, batch.reps_global, batch.reps_previous
        return self.mu * model_contrastive_loss(z, z_g, z_p, self.tau)
