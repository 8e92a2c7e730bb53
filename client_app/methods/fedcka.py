"""FedCKA, client half: keep the taps nearest the input similar to the global model's.

Source: Son, Kim, Chung, "Compare Where It Matters", arXiv 2112.00407; its equation numbers below
(the journal version, Appl. Sci. 12(19) 9943, has the same).
Server half: the default weighted average. Kept between rounds: the model this client ended with.
Symbols: a_n tap n of the local model, a_n^g and a_n^p of the global and previous local one.

Departs from the paper in one thing: CKA of wide taps comes from Gram matrices, which is equal and
cheaper. Its text leaves three choices, made here: kernel CKA's bandwidth is the median distance
between two samples of the batch (Kornblith et al. 2019), and follows it in the gradient too; the
squared Frobenius norm is negated, so that larger is more alike, and divided by the number of
entries; the last of the taps, so that M = 7 exists, is the logits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.gram import centred_gram
from client_app.method import Batch, LocalObjective
from models import StagedModel
from protocol.options import at_least, one_of, option


def features_of(tap: Tensor) -> Tensor:
    """A tap [B, ...] as [B, P]: features in the order of memory, which CKA does not mind."""
    return torch.movedim(tap, 1, -1).flatten(1)  # so no copy of channels-last taps


def rounding(mean: Tensor, batch_size: int) -> Tensor:
    """What is left of the length of equal rows once their mean [P] is taken off, a scalar."""
    length: Tensor = mean.norm()
    return 4 * torch.finfo(mean.dtype).eps * math.sqrt(batch_size) * length


def inverse(length: Tensor, power: float = 1.0) -> Tensor:
    """1 / length^power, but 0, with gradient 0, where there is no length to speak of (scalar).

    That is below the square root of the smallest number, which the gradient's 1 / length^2 needs.
    """
    counts = length > math.sqrt(torch.finfo(length.dtype).tiny)
    return torch.where(counts, torch.where(counts, length, 1.0) ** -power, 0.0)


def alignment(x: Tensor, y: Tensor) -> Tensor:
    """Cosine of the angle between two tensors of one shape, taken as vectors (scalar).

    With all zeros it is 0, with gradient 0.
    """
    return (x * y).sum() * inverse(x.norm()) * inverse(y.norm())


def linear_view(tap: Tensor) -> Tensor:
    """What linear CKA compares of a tap [B, ...]: with X its centred features, X X' / ||X X'||_F.

    [B, B]; of a narrow tap X / sqrt(||X'X||_F), [B, P], which then is cheaper. All zeros if the
    tap does not vary (B = 1, dead units): what is left of it is rounding.
    """
    x = features_of(tap)
    batch_size, width = x.shape
    if 2 * width < batch_size:
        mean = x.mean(0)
        view = x - mean
        varies = view.norm() > rounding(mean.detach(), batch_size)
        length, power = (view.T @ view).norm(), 0.5
    else:
        view, mean = centred_gram(x)
        varies = view.trace().sqrt() > rounding(mean, batch_size)
        length, power = view.norm(), 1.0
    return view * inverse(torch.where(varies, length, 0.0), power)


def linear_alignment(x: Tensor, y: Tensor) -> Tensor:
    """Linear CKA, eq. (3), from 0 to 1 (scalar). Invariant to rotating or scaling x or y.

    x and y: `linear_view` of the same tap and batch in two models.
    """
    if x.shape[0] == x.shape[1]:
        return (x * y).sum()  # ||Y'X||_F^2 = <XX', YY'>, and ||X'X||_F = ||XX'||_F
    return (y.T @ x).square().sum()


def kernel_view(tap: Tensor) -> Tensor:
    """The centred RBF Gram matrix of a tap [B, ...], [B, B]; kernel CKA is the alignment of two."""
    dots, mean = centred_gram(features_of(tap))
    varies = dots.trace().sqrt() > rounding(mean, len(dots))
    norms = dots.diagonal()
    distances = (norms[:, None] + norms - 2 * dots).clamp_min(0)  # squared, [B, B]
    rows, columns = torch.triu_indices(len(dots), len(dots), offset=1, device=dots.device)
    if len(rows) == 0:
        return torch.zeros_like(dots)
    # half of the pairs in one place leave no median distance: a small one then tells them apart
    width = distances[rows, columns].median().clamp_min(1e-6 * distances.mean())
    gram = torch.exp(-distances / (2 * torch.where(width > 0, width, 1.0)))
    gram = gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()
    return torch.where(varies, gram, 0.0)


def unchanged(x: Tensor) -> Tensor:
    """The tap itself."""
    return x


def negative_mean_square(x: Tensor, y: Tensor) -> Tensor:
    """-||x - y||_F^2 / (number of entries), a scalar <= 0: larger is more alike."""
    return -(x - y).square().mean()


@dataclass(frozen=True)
class Similarity:
    """`view` is taken of a tap once, `compare` of two views."""

    view: Callable[[Tensor], Tensor]
    compare: Callable[[Tensor, Tensor], Tensor]


SIMILARITIES = {  # Table 3
    "linear-cka": Similarity(linear_view, linear_alignment),
    "kernel-cka": Similarity(kernel_view, alignment),
    "cosine": Similarity(unchanged, alignment),
    "frobenius": Similarity(unchanged, negative_mean_square),
}


def fedcka_penalty(
    taps: Sequence[Tensor],
    reps_global: Sequence[Tensor],
    reps_previous: Sequence[Tensor],
    similarity: Similarity = SIMILARITIES["linear-cka"],
) -> Tensor:
    """l_cka, eq. (2), a scalar > 0: be more like the global model than like the previous one.

    Element n of each list is tap n of the same batch, [B, ...]; only `taps` carries gradient.
    """
    losses = []
    for a, a_g, a_p in zip(taps, reps_global, reps_previous, strict=True):
        local = similarity.view(a)  # shared by both comparisons
        c_g = similarity.compare(local, similarity.view(a_g.detach()))
        c_p = similarity.compare(local, similarity.view(a_p.detach()))
        losses.append(F.softplus(c_p - c_g))  # -log(e^c_g / (e^c_g + e^c_p)) without overflow
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class FedCKA(LocalObjective):
    """Contrast of linear CKA at the M taps nearest the input."""

    is_stateful: ClassVar[bool] = True
    uses_global: ClassVar[bool] = True
    uses_previous: ClassVar[bool] = True
    keeps: ClassVar[str] = "its previous local model"
    regularises: ClassVar[str] = "first M taps, to the global model's, from its own previous"
    paper: ClassVar[str] = "Son et al. 2022 (FedCKA)"
    extra_forwards: ClassVar[str] = "2"

    mu: float = option(
        at_least(0), "weight of the CKA term", source="eq. (1); tuned over 3, 5 and 10"
    )
    num_layers: int = option(
        at_least(1),
        "M: number of layers compared, nearest the input first",
        source="eq. (2); the paper: 2",
    )
    similarity: str = option(
        one_of("linear-cka", "kernel-cka", "cosine", "frobenius"),
        "similarity of two representations",
        source="Table 3",
    )

    def taps(self, model: StagedModel) -> list[str]:
        """The M taps nearest the input; ValueError if the model has fewer."""
        names = [*model.stage_names, "logits"]
        if self.num_layers > len(names):
            raise ValueError(
                f"fedcka.num-layers = {self.num_layers}: {model.name} has {len(names)} layers to "
                f"compare ({', '.join(names)}); the FedCKA paper uses 2"
            )
        return names[: self.num_layers]

    def penalty(self, batch: Batch) -> Tensor:
        """mu l_cka, the second term of eq. (1)."""
        similarity = SIMILARITIES[self.similarity]
        return self.mu * fedcka_penalty(
            batch.taps, batch.reps_global, batch.reps_previous, similarity
        )
