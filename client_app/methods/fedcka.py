"""FedCKA: keep early-layer representations similar to the global model's (client half).

Son, Kim, Chung, "Compare Where It Matters", arXiv 2112.00407; the journal version (Appl. Sci.
12(19) 9943) has the same equation numbers.
Aggregation: weighted average. Client state: the local model of the previous participation.
a_n, a_n^g, a_n^p: the representation at layer n in the local, global and previous local model.

CKA (client_app/similarity.py) is computed from Gram matrices, which is equivalent to eq. (3) and
cheaper. The paper leaves three choices open. Here the bandwidth of kernel CKA is the median
distance between two samples of the batch (Kornblith et al. 2019), and gradient flows through it;
the squared Frobenius norm is negated, so that larger means more similar, and divided by the number
of entries; the logits count as the last layer, which the CNN needs for M = 7.

The paper compares the layers' own outputs. FedIntR's code, which produced the FedCKA rows of
FedIntR's tables, compares them after projection heads (`projection = "mlp-side"`). If a client is
first sampled after round 1, that code uses the run's initial weights as its previous model
(`first-use = "initial"`). Otherwise the regulariser is left out at a client's first participation,
as it is constant; projection heads then stay as received, without weight decay.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import ModelParts
from client_app.objective import Batch, PreviousModelObjective
from client_app.similarity import alignment, kernel_view, linear_alignment, linear_view
from models import StagedModel
from models.registry import PROJECTION_WIDTH
from protocol.options import at_least, one_of, option
from protocol.text import num_of


def unchanged(x: Tensor) -> Tensor:
    """The representation itself."""
    return x


def negative_mean_square(x: Tensor, y: Tensor) -> Tensor:
    """-||x - y||_F^2 / (number of entries), a scalar <= 0."""
    return -(x - y).square().mean()


@dataclass(frozen=True)
class Similarity:
    """A similarity of two representations: compare(view(x), view(y)), a scalar."""

    view: Callable[[Tensor], Tensor]
    compare: Callable[[Tensor, Tensor], Tensor]


SIMILARITIES = {  # Table 3
    "linear-cka": Similarity(linear_view, linear_alignment),
    "kernel-cka": Similarity(kernel_view, alignment),
    "cosine": Similarity(unchanged, alignment),
    "frobenius": Similarity(unchanged, negative_mean_square),
}


def cka_contrast(
    reps: Sequence[Tensor],
    reps_global: Sequence[Tensor],
    reps_previous: Sequence[Tensor],
    similarity: Similarity = SIMILARITIES["linear-cka"],
) -> Tensor:
    """l_cka, eq. (2), mean over layers, a scalar > 0. Gradient flows through `reps` only.

    Element n of each list is the representation of the same batch at layer n, [B, ...].
    """
    losses = []
    for a, a_g, a_p in zip(reps, reps_global, reps_previous, strict=True):
        local = similarity.view(a)  # shared by both similarities
        c_g = similarity.compare(local, similarity.view(a_g.detach()))
        c_p = similarity.compare(local, similarity.view(a_p.detach()))
        losses.append(F.softplus(c_p - c_g))  # -log(e^c_g / (e^c_g + e^c_p)), overflow-safe
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class FedCKA(PreviousModelObjective):
    """CKA contrast at the M layers nearest the input."""

    equals_fedavg_at: ClassVar[Mapping[str, float]] = {"mu": 0.0}
    regularises: ClassVar[str] = "first M layers, towards the global, away from the previous model"
    paper: ClassVar[str] = "Son et al. 2022 (FedCKA)"
    extra_forwards: ClassVar[str] = "2"

    mu: float = option(
        at_least(0), "weight of the CKA term", default=3.0, source="eq. (1); tuned over 3, 5 and 10"
    )
    num_layers: int = option(
        at_least(1),
        "M: number of layers compared, nearest the input first",
        default=2,
        source="eq. (2); the paper: 2",
    )
    similarity: str = option(
        one_of("linear-cka", "kernel-cka", "cosine", "frobenius"),
        "similarity of two representations",
        default="linear-cka",
        source="Table 3",
    )
    projection: str = option(
        one_of("none", "mlp-side"),
        "compare the layers' outputs, or a projection of each",
        default="none",
        source="the paper: none; FedIntR's code: mlp-side",
    )

    def model_parts(self) -> ModelParts:
        """A projection head at each layer compared, with `projection = "mlp-side"`."""
        if self.projection == "none":
            return ModelParts()
        return ModelParts(projection_heads=PROJECTION_WIDTH, head_stages=(None, self.num_layers))

    def represent(self, model: StagedModel, outputs: list[Tensor]) -> list[Tensor]:
        """The layers' outputs, or their projections [B, 256]."""
        if self.projection == "none":
            return outputs
        return model.project(self.layers(model), outputs)

    def layers(self, model: StagedModel) -> list[str]:
        """The M layers nearest the input. ValueError if the model has fewer."""
        has_heads = self.projection != "none"
        names = list(model.regularised_stages) if has_heads else [*model.stage_names, "logits"]
        if self.num_layers > len(names):
            raise ValueError(
                f"fedcka.num-layers = {self.num_layers}: {model.name} has "
                f"{num_of('layer', names)} to compare ({', '.join(names)}); the FedCKA paper uses 2"
            )
        return names[: self.num_layers]

    def penalty(self, batch: Batch) -> Tensor:
        """mu l_cka, the second term of eq. (1)."""
        similarity = SIMILARITIES[self.similarity]
        return self.mu * cka_contrast(
            batch.reps, batch.reps_global, batch.reps_previous, similarity
        )
