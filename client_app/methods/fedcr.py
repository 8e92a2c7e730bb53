"""FedCR: stochastic features, pulled towards a global Gaussian per class (client half).

Zhang et al., "FedCR: Personalized Federated Learning Based on Across-Client Common Representation
with Conditional Mutual Information Regularization", ICML 2023, PMLR 202. Server half:
strategies/fedcr.py, which multiplies the clients' Gaussians.
Aggregation: uniform average of the extractors. Client state: the head.
The extractor's last layer outputs mu and s = softplus(raw) > 0 for each sample, [B, dz] each;
z = mu + s eps; G_y = N(M_y, S_y^2): the global Gaussian of class y, initially N(0, I).

Loss: CE, mean over batch and `samples` draws, plus beta KL( G_y || N(mu, s^2) ), summed over dz,
mean over the batch. This is the direction of the KL in the authors' code. KL(local || global),
which follows from the paper's bound, diverges as S_y shrinks.

The authors' command sets beta = 1e-4 with dz = 512. Here dz is 256, the default of their code,
whose default beta is 0.001.

`keel predict` and `load_model` use the mean mu instead of drawing samples.

The authors' code trains the heads of all clients for 10 final epochs (`final-head-epochs`), and
evaluates each client's model after local training, before aggregation. Here, as with the other
methods that share an extractor, the personal model uses the newest global extractor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from client_app.method import ModelParts, Update
from client_app.round import RoundContext, cached
from client_app.samples import Duration, Step
from client_app.split_model import TunedHead, extractor_of, head_of, unfreeze, with_own_head
from client_app.trainer import fit
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import at_least, between, option

smallest = 1e-8  # standard deviations shrink like 1 / sqrt(samples): keep their logarithms finite


def gaussian(raw: Tensor) -> tuple[Tensor, Tensor]:
    """(mu, s) [B, dz] of the last layer's outputs raw [B, 2 dz]."""
    mu, scale = raw.chunk(2, dim=1)
    return mu, F.softplus(scale).clamp_min(smallest)


def divergence(mu_1: Tensor, s_1: Tensor, mu_2: Tensor, s_2: Tensor) -> Tensor:
    """KL( N(mu_1, s_1^2) || N(mu_2, s_2^2) ), [B]: summed over dz; all [B, dz]."""
    ratio = (s_1 / s_2).square()
    kl = 0.5 * (ratio + ((mu_1 - mu_2) / s_2).square() - 1 - ratio.log())
    return kl.sum(1)


def sampled_cross_entropy(head: nn.Module, mu: Tensor, s: Tensor, y: Tensor, eps: Tensor) -> Tensor:
    """Mean over the batch and the draws z = mu + s eps of CE(head(z), y), a scalar.

    mu and s [B, dz], y [B], eps [draws, B, dz] from N(0, 1).
    """
    logits = head((mu + s * eps).flatten(0, 1))
    return F.cross_entropy(logits, y.repeat(len(eps)))


class Product:
    """The product of the posteriors of a client's samples, per class: again a Gaussian.

    1/S^2 = sum of 1/s^2, M = S^2 times the sum of mu/s^2; [C, dz]. It is that of the last epoch.
    """

    def __init__(self, num_classes: int, width: int, device: torch.device) -> None:
        self.precision = torch.zeros(num_classes, width, device=device)
        self.weighted = torch.zeros(num_classes, width, device=device)
        self.epoch = 0

    def begin(self, epoch: int) -> None:
        """Begin anew where this step's epoch is another than the last step's."""
        if epoch != self.epoch:
            self.precision.zero_()
            self.weighted.zero_()
        self.epoch = epoch

    def add(self, mu: Tensor, s: Tensor, y: Tensor) -> None:
        """Multiply in the posteriors of one batch: detached mu and s [B, dz]."""
        precision = s.square().reciprocal()
        self.precision.index_add_(0, y, precision)
        self.weighted.index_add_(0, y, mu * precision)

    def read(self) -> Arrays:
        """M and S [C, dz], and which classes were seen [C]; (0, 1) for a class that was not."""
        seen = self.precision[:, :1] > 0
        precision = torch.where(seen, self.precision, 1.0)
        return {
            "M": self.weighted / precision,
            "S": precision.rsqrt(),
            "seen": seen.squeeze(1).float(),
        }


class Sampled(nn.Module):
    """A trained network that averages the logits of `num_samples` seeded draws."""

    def __init__(self, model: StagedModel, num_samples: int, seed: int) -> None:
        super().__init__()
        self.model, self.num_samples = model, num_samples
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, C]."""
        _, (raw,) = self.model.run(x, [self.model.stage_names[-1]], to_logits=False)
        mu, s = gaussian(raw)
        eps = torch.randn(self.num_samples, *mu.shape, generator=self.generator).to(mu.device)
        logits: Tensor = self.model.classifier(mu + s * eps)  # [num_samples, B, C]
        return logits.mean(0)


@dataclass(frozen=True)
class FedCR(TunedHead):
    """Stochastic features pulled towards their class's global Gaussian; a private head."""

    has_own_server_half: ClassVar[bool] = True
    default_weighting: ClassVar[str] = "uniform"
    regularises: ClassVar[str] = "stochastic features, towards a global Gaussian for each class"
    paper: ClassVar[str] = "Zhang et al. 2023"
    extra_forwards: ClassVar[str] = "`fedcr.samples` of the head"

    beta: float = option(
        at_least(0),
        "weight of the divergence from the class's global Gaussian",
        default=0.0001,
        source="authors' code: 1e-4",
    )
    samples: int = option(
        between(1, 10_000),
        "draws of the features per sample, in training and evaluation",
        default=18,
        source="authors' code",
    )

    def model_parts(self) -> ModelParts:
        """A last layer that outputs mean and standard deviation."""
        return ModelParts(projection="gaussian")

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> nn.Module:
        """The network with sampled features, its head tuned after the last round if configured."""
        model = with_own_head(ctx, state)
        if self.is_tuned_in(ctx):
            self._tune_head(ctx, model)
        return Sampled(model, self.samples, ctx.seed("evaluation"))

    def _tune_head(self, ctx: RoundContext, model: StagedModel) -> None:
        """Train the head alone, on sampled features as in evaluation."""
        head, last_stage = unfreeze(model, "head"), model.stage_names[-1]
        duration, draw = Duration(self.final_head_epochs), self._draws(ctx, "fine-tuning")
        raw_of = cached(ctx, lambda x: model.run(x, [last_stage], to_logits=False)[1][0], duration)

        def loss(raw: Tensor, y: Tensor, eps: Tensor) -> dict[str, Tensor]:
            return {"supervised": sampled_cross_entropy(model.classifier, *gaussian(raw), y, eps)}

        fit(
            ctx,
            head,
            lambda step: (raw_of(step), step.y, draw(step)),
            loss,
            lr=ctx.config.train.lr,
            duration=duration,
            stream="fine-tuning",
        )

    def _draws(self, ctx: RoundContext, stream: str) -> Callable[[Step], Tensor]:
        """The function from a step to its eps [draws, B, dz], of this client's random stream."""
        generator = torch.Generator(ctx.device).manual_seed(ctx.seed("dropout", stream))
        width = ctx.model.feature_width
        return lambda step: torch.randn(
            *(self.samples, len(step.y), width), generator=generator, device=ctx.device
        )

    def train(self, ctx: RoundContext) -> Update:
        """Extractor and head together; the class products are those of the last epoch."""
        train = ctx.config.train
        model = with_own_head(ctx, ctx.state).train().requires_grad_(True)
        m, deviation = ctx.extra["M"], ctx.extra["S"].clamp_min(smallest)  # [C, dz]
        product = Product(model.num_classes, model.feature_width, ctx.device)
        last_stage, draw = model.stage_names[-1], self._draws(ctx, "batches")

        def inputs(step: Step) -> tuple[Tensor, ...]:
            product.begin(step.epoch)
            return step.x, step.y, draw(step), m[step.y], deviation[step.y]

        def loss(x: Tensor, y: Tensor, eps: Tensor, m_y: Tensor, s_y: Tensor) -> dict[str, Tensor]:
            _, (raw,) = model.run(x, [last_stage], to_logits=False)
            mu, s = gaussian(raw)
            product.add(mu.detach(), s.detach(), y)
            kl = divergence(m_y, s_y, mu, s)
            return {
                "supervised": sampled_cross_entropy(model.classifier, mu, s, y, eps),
                "penalty": self.beta * kl.mean(),
            }

        descent = fit(
            ctx,
            list(model.parameters()),
            inputs,
            loss,
            lr=train.lr,
            duration=Duration(train.local_epochs),
        )
        return Update(
            extractor_of(model),
            descent.num_steps,
            descent.terms,
            extra=product.read(),
            state={"head": head_of(model)},
        )
