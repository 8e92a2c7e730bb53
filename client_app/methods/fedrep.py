"""FedRep, client half: one body for all, a head of its own for each client.

Source: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, arXiv 2102.07078, Algorithm 1. Server half: strategies/body.py, which averages the bodies
(by examples, as the authors' code; `weighting = "uniform"` is the paper). Kept between rounds: the
head. Each round: the received body; `head-epochs` on the head, then `body-epochs` on the body.

FedReCo's tables train 1 + 1 epochs, FedRep's own 10 + 1. `final-head-epochs` tunes the head after
the last round, as the authors' code does with 10. All heads begin the same, from the run's seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Arrays, Method, Update
from client_app.parts import body_of, fine_tune, head_of, train_part, under_own_head
from client_app.round import RoundContext
from models import StagedModel
from protocol.options import at_least, option


@dataclass(frozen=True)
class FedRep(Method):
    """Alternating head and body."""

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
    body_epochs: int = option(at_least(0), "epochs on the extractor in each round")
    final_head_epochs: int = option(
        at_least(0), "epochs on the head after the last round", source="authors' code: 10"
    )

    def depends_on_num_rounds(self) -> bool:
        """The last round is another one if its heads are tuned."""
        return self.final_head_epochs > 0

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The same, its head tuned after the last round if asked for."""
        model = under_own_head(ctx, state)
        if ctx.round == ctx.config.rounds.num_rounds and self.final_head_epochs:
            fine_tune(ctx, model, "head", self.final_head_epochs, ctx.config.train.lr)
        return model

    def train(self, ctx: RoundContext) -> Update:
        """Head, then body, each with an optimiser of its own."""
        model, lr = under_own_head(ctx, ctx.state), ctx.config.train.lr
        head = train_part(ctx, model, "head", self.head_epochs, lr, stream="head")
        body = train_part(ctx, model, "body", self.body_epochs, lr, stream="batches")
        num_steps = head.num_steps + body.num_steps
        return Update(body_of(model), num_steps, body.terms, state={"head": head_of(model)})
