"""FedRep: a shared feature extractor and a personal head for each client (client half).

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
arXiv 2102.07078, Algorithm 1.
Aggregation: average of the extractors, weighted by examples as in the authors' code
(`weighting = "uniform"` is the paper's). Client state: the head.

Each round loads the received extractor, then trains `head-epochs` on the head and
`extractor-epochs` on the extractor: 10 + 1 in FedRep's tables, 1 + 1 in FedReCo's. While the head
is trained, the extractor's BatchNorm uses its running statistics and leaves them as they are.
`final-head-epochs` tunes the head after the last round; the authors' code uses 10. All heads are
initialised with the same weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Update
from client_app.round import RoundContext
from client_app.split_model import TunedHead, extractor_of, fit_part, head_of, with_own_head
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import at_least, option


@dataclass(frozen=True)
class FedRep(TunedHead):
    """Alternating training of head and extractor."""

    duration_keys: ClassVar[tuple[str, ...]] = ("fedrep.head-epochs", "fedrep.extractor-epochs")
    paper: ClassVar[str] = "Collins et al. 2021"

    head_epochs: int = option(
        at_least(0),
        "epochs on the head in each round",
        default=1,
        source="10 in FedRep's tables, 1 in FedReCo's",
    )
    extractor_epochs: int = option(at_least(0), "epochs on the extractor in each round", default=1)

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received extractor and its own head, tuned after the last round if so configured."""
        model = with_own_head(ctx, state)
        if self.is_tuned_in(ctx):
            fit_part(ctx, "head", self.final_head_epochs, ctx.config.train.lr, "fine-tuning")
        return model

    def train(self, ctx: RoundContext) -> Update:
        """Head, then extractor, each with an optimizer of its own."""
        model, lr = with_own_head(ctx, ctx.state), ctx.config.train.lr
        head = fit_part(ctx, "head", self.head_epochs, lr, stream="head")
        extractor = fit_part(ctx, "extractor", self.extractor_epochs, lr)
        num_steps = head.num_steps + extractor.num_steps
        state = {"head": head_of(model)}
        return Update(extractor_of(model), num_steps, extractor.terms, state=state)
