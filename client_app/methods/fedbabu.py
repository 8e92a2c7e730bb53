"""FedBABU, client half: only the body learns; every head stays as the seed drew it.

Source: Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, arXiv 2106.06042. Server half: strategies/body.py (the paper's mean is uniform). Kept
between rounds: nothing; the common head comes from the run's seed. At evaluation each client tunes
its copy: the whole model by default, 5 epochs at rate 0.001, as the authors' notebook.

`fedper-like = true` trains a private head with the body instead, which is FedPer and what one
public comparison calls FedBABU; then the head is kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Arrays, Method, Update
from client_app.parts import body_of, fine_tune, head_of, train_part, under_own_head
from client_app.round import RoundContext
from models import StagedModel
from protocol.options import (
    at_least,
    more_than,
    one_of,
    option,
    true_or_false,
    unless_option,
    when_option,
)


@dataclass(frozen=True)
class FedBABU(Method):
    """Body aggregation under a frozen head."""

    is_personal: ClassVar[bool] = True
    is_stateful: ClassVar[bool] = when_option("fedper_like")  # the private head
    adapts_global: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = unless_option("fedper_like")
    default_weighting: ClassVar[str] = "uniform"
    shared_part: ClassVar[str] = "extractor"
    keeps: ClassVar[str] = "nothing (the head, if fedper-like)"
    paper: ClassVar[str] = "Oh et al. 2022"

    part: str = option(one_of("full", "head", "body"), "what is tuned at evaluation")
    epochs: int = option(at_least(0), "epochs of tuning at evaluation", source="authors' notebook")
    lr: float = option(more_than(0), "learning rate of tuning", source="authors' notebook")
    fedper_like: bool = option(
        true_or_false(), "train a private head with the extractor instead, which is FedPer"
    )

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The same, tuned on this client's training samples."""
        model = under_own_head(ctx, state)
        fine_tune(ctx, model, self.part, self.epochs, self.lr, momentum=0.9, decays=False)
        return model

    def train(self, ctx: RoundContext) -> Update:
        """The body alone."""
        model, train = under_own_head(ctx, ctx.state), ctx.config.train
        part = "full" if self.fedper_like else "body"
        descent = train_part(ctx, model, part, train.local_epochs, train.lr, stream="batches")
        state = {"head": head_of(model)} if self.fedper_like else {}
        return Update(body_of(model), descent.num_steps, descent.terms, state=state)
