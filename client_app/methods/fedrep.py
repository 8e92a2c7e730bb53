"""FedRep: a shared feature extractor, and a head of its own for each client (client half).

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
arXiv 2102.07078, Algorithm 1.
Aggregation: weighted average of the extractors, by examples as in the authors' code
(`weighting = "uniform"` is the paper). Client state: the head.

Each round: the received extractor; `head-epochs` on the head, then `extractor-epochs` on the
extractor. FedReCo's tables train 1 + 1 epochs, FedRep's own 10 + 1. `final-head-epochs` tunes the
head after the last round, as the authors' code does with 10. All heads start from the run's seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Method, Update
from client_app.round import RoundContext
from client_app.split_model import extractor_of, head_of, train_part, with_own_head
from models import StagedModel
from protocol.messages import Arrays
from protocol.options import at_least, option


@dataclass(frozen=True)
class FedRep(Method):
    """Alternating training of head and extractor."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    adapts_global: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    shared_part: ClassVar[str] = "extractor"
    keeps: ClassVar[str] = "its head"
    paper: ClassVar[str] = "Collins et al. 2021"

    head_epochs: int = option(
        at_least(0),
        "epochs on the head in each round",
        source="10 in FedRep's tables, 1 in FedReCo's",
    )
    extractor_epochs: int = option(at_least(0), "epochs on the extractor in each round")
    final_head_epochs: int = option(
        at_least(0), "epochs on the head after the last round", source="authors' code: 10"
    )

    def depends_on_num_rounds(self) -> bool:
        """The last round tunes the heads with `final-head-epochs`."""
        return self.final_head_epochs > 0

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received extractor and its own head, tuned after the last round if so configured."""
        model = with_own_head(ctx, state)
        if ctx.round == ctx.config.rounds.num_rounds and self.final_head_epochs:
            lr = ctx.config.train.lr
            train_part(ctx, model, "head", self.final_head_epochs, lr, "fine-tuning")
        return model

    def train(self, ctx: RoundContext) -> Update:
        """Head, then extractor, each with an optimizer of its own."""
        model, lr = with_own_head(ctx, ctx.state), ctx.config.train.lr
        head = train_part(ctx, model, "head", self.head_epochs, lr, stream="head")
        extractor = train_part(ctx, model, "extractor", self.extractor_epochs, lr, stream="batches")
        num_steps = head.num_steps + extractor.num_steps
        state = {"head": head_of(model)}
        return Update(extractor_of(model), num_steps, extractor.terms, state=state)
