"""MOON, client half: features like the global model's, unlike this client's previous ones.

Source: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, arXiv 2103.16257.
Server half: the default weighted average. Kept between rounds: the model this client ended with.
Symbols: z, z_g, z_p the classifier's input in the local, global and previous local model.

At a client's first participation the previous model is the one received: the term is the constant
mu log 2 and, its gradient being zero, is left out. `first-use = "official"` is the authors' code:
left out in the run's first round alone; a client first sampled later contrasts with a random
initialisation of its own.
`projection = "mlp"` adds the paper's projection head before the classifier, averaged like the rest;
"none" compares the network's own features.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import Arrays, Batch, LocalObjective, ModelParts
from client_app.round import RoundContext
from models import StagedModel
from protocol.options import at_least, more_than, one_of, option


def model_contrastive_loss(z: Tensor, z_g: Tensor, z_p: Tensor, tau: float) -> Tensor:
    """l_con, eq. (3), a scalar > 0: the mean over the batch.

    z, z_g and z_p [B, d]: row b of each is sample b; only `z` carries gradient.
    """
    s_g = F.cosine_similarity(z, z_g.detach(), dim=1)  # [B]
    s_p = F.cosine_similarity(z, z_p.detach(), dim=1)
    # -log( e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}) ) without overflow
    return F.softplus((s_p - s_g) / tau).mean()


@dataclass(frozen=True)
class MOON(LocalObjective):
    """Contrast at the classifier's input."""

    is_stateful: ClassVar[bool] = True
    uses_global: ClassVar[bool] = True
    uses_previous: ClassVar[bool] = True
    keeps: ClassVar[str] = "its previous local model"
    regularises: ClassVar[str] = "classifier's input, to the global model's, from its own previous"
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
        """The projection head, if asked for."""
        return ModelParts(projection=self.projection)

    def first_previous(self, ctx: RoundContext) -> Arrays | None:
        """As the authors' code, from round 2: weights that nobody ever trained."""
        if self.first_use == "received" or ctx.round == 1:
            return None
        return ctx.worker.random_weights(
            ctx.config, ctx.data, ctx.model.name, ctx.seed("first-use")
        )

    def taps(self, model: StagedModel) -> list[str]:
        """What enters the classifier."""
        return ["features"]

    def penalty(self, batch: Batch) -> Tensor:
        """mu l_con, eq. (4)."""
        (z,), (z_g,), (z_p,) = batch.taps, batch.reps_global, batch.reps_previous
        return self.mu * model_contrastive_loss(z, z_g, z_p, self.tau)
