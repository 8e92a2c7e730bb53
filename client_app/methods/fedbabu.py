"""FedBABU: only the feature extractor is trained; the head stays as initialised (client half).

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, arXiv 2106.06042.
Aggregation: uniform average of the extractors. Client state: none; the common head comes from the
run's seed.

For evaluation each client fine-tunes a copy: by default the whole model, for 5 epochs at the
constant learning rate 0.001, with momentum 0.9 and without weight decay, as in the authors'
notebook; the run's `clip-norm` applies here too. `fedper-like = true` trains a private head
together with the extractor instead, and stores the head as client state; this is FedPer, which
FedCR's code calls FedBABU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Method, Update
from client_app.round import RoundContext
from client_app.split_model import extractor_of, fit_part, head_of, with_own_head
from models import StagedModel
from protocol.arrays import Arrays
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
    """A trained, averaged extractor under a frozen head; fine-tuned for evaluation."""

    is_personal: ClassVar[bool] = True
    is_stateful: ClassVar[bool] = when_option("fedper_like")  # the private head
    is_adapted_from_global: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = unless_option("fedper_like")
    default_weighting: ClassVar[str] = "uniform"
    shared_part: ClassVar[str] = "extractor"
    client_state: ClassVar[str] = "nothing; its head with `fedbabu.fedper-like`"
    paper: ClassVar[str] = "Oh et al. 2022"

    part: str = option(
        one_of("full", "head", "extractor"), "what is tuned at evaluation", default="full"
    )
    epochs: int = option(
        at_least(0), "epochs of tuning at evaluation", default=5, source="authors' notebook"
    )
    lr: float = option(
        more_than(0), "constant learning rate of tuning", default=0.001, source="authors' notebook"
    )
    fedper_like: bool = option(
        true_or_false(), "train a private head with the extractor, as in FedPer", default=False
    )

    def is_tuned_for_evaluation(self) -> bool:
        """Whether `epochs` is above 0."""
        return self.epochs > 0

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received extractor and its head, tuned on this client's training samples."""
        model = with_own_head(ctx, state)
        stream = "fine-tuning"
        fit_part(ctx, self.part, self.epochs, self.lr, stream, momentum=0.9, decays=False)
        return model

    def train(self, ctx: RoundContext) -> Update:
        """The extractor alone, or with a private head."""
        model, train = with_own_head(ctx, ctx.state), ctx.config.train
        part = "full" if self.fedper_like else "extractor"
        descent = fit_part(ctx, part, train.local_epochs, train.lr)
        state = {"head": head_of(model)} if self.fedper_like else {}
        return Update(extractor_of(model), descent.num_steps, descent.terms, state=state)
