"""FedPAC: align features with global class prototypes, combine the clients' heads (client half).

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, arXiv 2306.11867. Server half: strategies/fedpac.py, which averages
prototypes and mixes the heads.
Aggregation: weighted average of the extractors. Client state: the head.
f: features (the head's input); p(k): this client's class frequencies; mu_k: its class mean
features; h[k] = p(k) mu_k; v: the variance of h.

Each round starts from the received extractor: compute h and v; train the head for one epoch at
`head-lr`, which does not decay, on features in eval mode, as those of h and v; train the extractor
for `extractor-epochs` on CE + lambda MSE(f, t_y); compute the class means with the trained model.
t_y is the global prototype of the label or, where there is none, this client's own mean before
training. The first round has no alignment term. MSE is the mean over batch and features, as in the
authors' code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from client_app.method import Update
from client_app.prototypes import class_means, class_sums, feature_sums
from client_app.round import RoundContext
from client_app.samples import Duration
from client_app.split_model import OwnHead, extractor_of, fit_part, head_of, unfreeze, with_own_head
from client_app.trainer import fit
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import at_least, more_than, option


def head_statistics(means: Tensor, counts: Tensor, mean_square: Tensor) -> tuple[Tensor, Tensor]:
    """(h [C, d], v scalar): h[k] = p(k) mu_k and v = (E||f||^2 - ||h||_F^2) / n.

    means [C, d] and counts [C] per class; mean_square: the mean of ||f||^2 over all n samples.
    """
    n = counts.sum()
    h = means * (counts / n)[:, None]
    return h, (mean_square - h.square().sum()) / n


def targets(prototypes: Tensor, is_known: Tensor, own_means: Tensor) -> Tensor:
    """t [C, d]: the global prototype of each class, this client's own mean where there is none."""
    return torch.where(is_known[:, None] > 0, prototypes, own_means)


@dataclass(frozen=True)
class FedPAC(OwnHead):
    """Features aligned with class prototypes; each head a mix of all clients' heads."""

    has_own_server_half: ClassVar[bool] = True
    regularises: ClassVar[str] = "classifier's input, towards the global class prototypes"
    paper: ClassVar[str] = "Xu et al. 2023"
    duration_keys: ClassVar[tuple[str, ...]] = ("fedpac.extractor-epochs",)
    extra_forwards: ClassVar[str] = "2 passes over its data per round"

    lambda_: float = option(
        at_least(0),
        "weight of the feature alignment",
        default=1.0,
        source="authors' code: 1",
        key="lambda",
    )
    head_lr: float = option(
        more_than(0), "constant learning rate of the head", default=0.1, source="authors' code: 0.1"
    )
    extractor_epochs: int = option(at_least(0), "epochs on the extractor in each round", default=1)

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received extractor and the head that the server mixed for this client, or its own."""
        mixed = {k.removeprefix("head."): a for k, a in ctx.extra.items() if k.startswith("head.")}
        return with_own_head(ctx, {"head": state.get("head", {}) | mixed})

    def train(self, ctx: RoundContext) -> Update:
        """Statistics, head, extractor, class means."""
        model = self.personal_model(ctx, ctx.state)
        sums, counts, mean_square = feature_sums(model, ctx.train_samples)
        own_means = class_means(sums, counts)
        h, v = head_statistics(own_means, counts, mean_square)
        t: Tensor | None = None
        if "prototypes" in ctx.extra:
            t = targets(ctx.extra["prototypes"], ctx.extra["is-known"], own_means)

        def loss(x: Tensor, y: Tensor, t_y: Tensor | None) -> dict[str, Tensor]:
            logits, (f,) = model.run(x, ["features"])
            assert logits is not None
            terms = {"supervised": F.cross_entropy(logits, y)}
            if t_y is not None:
                terms["penalty"] = self.lambda_ * F.mse_loss(f, t_y)
            return terms

        head = fit_part(ctx, "head", 1, self.head_lr, stream="head", decays=False)
        extractor = fit(
            ctx,
            unfreeze(model, "extractor"),
            lambda step: (step.x, step.y, None if t is None else t[step.y]),
            loss,
            lr=ctx.config.train.lr,
            duration=Duration(self.extractor_epochs),
        )
        trained_sums, _ = class_sums(model, ctx.train_samples)
        own_head = head_of(model)
        extra = {f"head.{name}": array for name, array in own_head.items()}
        extra |= {"h": h, "v": v.reshape(1)}
        extra |= {"means": class_means(trained_sums, counts), "counts": counts}
        num_steps = head.num_steps + extractor.num_steps
        state = {"head": own_head}
        return Update(extractor_of(model), num_steps, extractor.terms, extra, state)
