"""FedAvg-FT, client half: FedAvg; to evaluate, each client tunes a copy of the global model.

Source: Collins et al., "FedAvg with Fine Tuning", NeurIPS 2022, arXiv 2205.13692. Server half: the
default weighted average. Kept between rounds: nothing; the tuned model lives for one evaluation.

FedReCo does not say what is tuned. Default: the head, 10 epochs at the run's rate, as FedRep's and
FedCR's code; `part = "full"` tunes everything. The server's model is not touched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Arrays, LocalObjective, Update
from client_app.methods.fedavg import private_update
from client_app.parts import fine_tune
from client_app.round import RoundContext
from client_app.trainer import train_on_objective
from models import StagedModel
from protocol.options import at_least, one_of, option


@dataclass(frozen=True)
class FedAvgFT(LocalObjective):
    """Fine-tuning at evaluation."""

    supports_privacy: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    adapts_global: ClassVar[bool] = True
    paper: ClassVar[str] = "Collins et al. 2022"

    part: str = option(one_of("head", "full"), "what is tuned at evaluation", source="this project")
    epochs: int = option(
        at_least(0), "epochs of tuning at evaluation", source="the code of FedRep and FedCR: 10"
    )
    lr: float = option(at_least(0), "learning rate of tuning; 0: the run's")

    def train(self, ctx: RoundContext) -> Update:
        """As FedAvg, its differential privacy included."""
        return private_update(train_on_objective(self, ctx), ctx)

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received model, tuned on this client's training samples."""
        ctx.model.load_state_dict(ctx.received)
        lr = self.lr or ctx.config.train.lr
        fine_tune(ctx, ctx.model, self.part, self.epochs, lr, decays=not self.lr)
        return ctx.model
