"""FedIntR: contrast every layer's representation, weighted by its similarity (client half).

Tun et al., "Federated Learning with Intermediate Representation Regularization", BigComp 2023,
arXiv 2210.15827. Equation numbers refer to it.
Aggregation: weighted average. Client state: the local model of the previous participation.
z^k = q_k(flatten(output of stage k)), k = 1..K, with q_k the projection head of stage k, a part of
the model.

Where the paper leaves a choice open, this follows the authors' code: the cosines are averaged over
the batch before eqs. (2) and (4) (`reduction = "sample"`: the equations per sample, then the mean),
and gradient flows through alpha_k. `layer-weights = "average"` is
eq. (6), Table V. At a client's first participation z_p = z_g, so l_k is the constant log 2 and the
regulariser is left out. The projection heads then stay as received, without weight decay.

The code differs from the paper in four ways, each available as an option. A client that is first
sampled after round 1 has the run's initial model as its previous one (`first-use = "initial"`).
Frozen models with BatchNorm stay in training mode (`frozen-statistics = "batch"`). All layers of
its ResNet-20, heads included, are initialised by fan-in (`init = "fan-in"`). The projection heads
have weight decay at a first participation too (`decay-heads`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import ModelParts
from client_app.objective import Batch, PreviousModelObjective
from models import StagedModel
from protocol.options import at_least, between, more_than, one_of, option, true_or_false


def cosines(z: Sequence[Tensor], z_other: Sequence[Tensor]) -> Tensor:
    """sim of eq. (3) for every layer and sample, [K, B]. Gradient flows through `z` only.

    Element k of both is z^k of the same batch in two models, [B, d].
    """
    pairs = zip(z, z_other, strict=True)
    return torch.stack([F.cosine_similarity(a, b.detach(), dim=1) for a, b in pairs])


def representation_losses(s_g: Tensor, s_p: Tensor, tau: float) -> Tensor:
    """l_k, eq. (2), [K, ...] like the similarities s_g and s_p to the global and previous model."""
    return F.softplus((s_p - s_g) / tau)  # -log(e^{s_g/tau} / (e^{s_g/tau} + e^{s_p/tau}))


def similarity_weights(s_g: Tensor, tau: float) -> Tensor:
    """alpha_k, eq. (4), [K, ...]: larger the more similar a layer is to the global model's."""
    return torch.softmax(s_g / tau, dim=0)


@dataclass(frozen=True)
class FedIntR(PreviousModelObjective):
    """Contrast at every stage, each through its own projection head."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"mu": 0.0}
    regularises: ClassVar[str] = "all stages, towards the global, away from the previous model"
    paper: ClassVar[str] = "Tun et al. 2023 (FedIntR)"
    extra_forwards: ClassVar[str] = "2"

    mu: float = option(
        at_least(0),
        "weight of the regulariser",
        default=1.0,
        source="eq. (5); tuned for each data set",
    )
    tau: float = option(
        more_than(0), "temperature", default=0.5, source="eqs. (2) and (4); the paper: 0.5"
    )
    layer_weights: str = option(
        one_of("similarity", "average"),
        "alpha_k: softmax of the similarities, eq. (4), or 1/K, eq. (6)",
        default="similarity",
        source="Table V",
    )
    reduction: str = option(
        one_of("batch", "sample"),
        "batch: average the cosines first; sample: equations per sample",
        default="batch",
        source="authors' code: batch",
    )
    projection_width: int = option(
        between(1, 65_536),
        "d: outputs of each projection head",
        default=256,
        source="Sec. IV; the paper: 256",
    )

    decay_heads: bool = option(
        true_or_false(),
        "weight decay on the projection heads where the contrast is left out, too",
        default=False,
        source="authors' code: true",
    )

    def model_parts(self) -> ModelParts:
        """A projection head q_k for every stage."""
        return ModelParts(projection_heads=self.projection_width)

    def layers(self, model: StagedModel) -> list[str]:
        """All stages of the network."""
        return list(model.regularised_stages)

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """z^k, [B, d] each, through the projection heads of `model` itself."""
        return model.project(self.layers(model), outputs)

    def supervised(self, batch: Batch) -> Tensor:
        """Cross entropy; with `decay_heads` the projection heads have a gradient, of zero.

        Without one, weight decay and momentum pass them by.
        """
        loss = super().supervised(batch)
        if self.decay_heads:
            heads = batch.ctx.model.projection_heads.parameters()
            loss = loss + 0.0 * sum(parameter.sum() for parameter in heads)
        return loss

    def penalty(self, batch: Batch) -> Tensor:
        """mu sum_k alpha_k l_k, the second term of eq. (5)."""
        s_g = cosines(batch.reps, batch.reps_global)  # [K, B]
        s_p = cosines(batch.reps, batch.reps_previous)
        if self.reduction == "batch":
            s_g, s_p = s_g.mean(1), s_p.mean(1)  # [K]
        if self.layer_weights == "similarity":
            alpha = similarity_weights(s_g, self.tau)
        else:
            alpha = torch.full_like(s_g, 1 / len(s_g))  # eq. (6)
        losses = representation_losses(s_g, s_p, self.tau)
        # sum over k, then, with `reduction = "sample"`, mean over samples
        return self.mu * (alpha * losses).sum(0).mean()
