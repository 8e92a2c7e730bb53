"""FedAvg-FT: FedAvg, then each client fine-tunes a copy for evaluation (client half).

Collins et al., "FedAvg with Fine Tuning", NeurIPS 2022, arXiv 2205.13692.
Aggregation: weighted average. Client state: none; the tuned model is discarded after evaluation.
The FedReCo paper does not say what is tuned. The default is the head, for 10 epochs at the run's
learning rate, with its decays, as in FedRep's and FedCR's code; BatchNorm then uses its running
statistics. `part = "full"` tunes the whole model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.methods.fedavg import FedAvg
from client_app.round import RoundContext
from client_app.split_model import fit_part
from models import StagedModel
from protocol.arrays import Arrays
from protocol.options import at_least, one_of, option


@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    """Fine-tuning at evaluation."""

    is_personal: ClassVar[bool] = True
    is_adapted_from_global: ClassVar[bool] = True
    paper: ClassVar[str] = "Collins et al. 2022"

    part: str = option(
        one_of("head", "full"),
        "what is tuned at evaluation",
        default="head",
        source="the code of FedRep and FedCR",
    )
    epochs: int = option(
        at_least(0),
        "epochs of tuning at evaluation",
        default=10,
        source="the code of FedRep and FedCR: 10",
    )

    def is_tuned_for_evaluation(self) -> bool:
        """Whether `epochs` is above 0."""
        return self.epochs > 0

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The received model, tuned on this client's training samples."""
        ctx.model.load_state_dict(ctx.received)
        fit_part(ctx, self.part, self.epochs, ctx.config.train.lr, "fine-tuning")
        return ctx.model
