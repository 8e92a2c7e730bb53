"""Local-only training, client half: no federation at all, the honest lower bound.

Server half: strategies/local.py, which has nothing to send or to average. Kept between rounds: this
client's whole model, begun from the run's common weights and trained `local-epochs` a round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import Arrays, Method, Update
from client_app.round import RoundContext
from client_app.samples import Step
from client_app.trainer import Duration, copy_of, descend
from models import StagedModel


@dataclass(frozen=True)
class LocalOnly(Method):
    """SGD on the client's own labels, for ever."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    supports_server_optimizer: ClassVar[bool] = False
    shared_part: ClassVar[str] = "nothing"
    keeps: ClassVar[str] = "its whole model"
    paper: ClassVar[str] = "the lower bound"

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The model as kept, or the run's initial weights."""
        ctx.model.load_state_dict(state.get("model") or ctx.initial_weights())
        return ctx.model

    def train(self, ctx: RoundContext) -> Update:
        """Go on from where the last round ended."""
        model = self.personal_model(ctx, ctx.state).train().requires_grad_(True)

        def terms(step: Step) -> dict[str, Tensor]:
            return {"supervised": F.cross_entropy(model(step.x), step.y)}

        train = ctx.config.train
        duration = Duration(train.local_epochs, "epochs")
        descent = descend(ctx, list(model.parameters()), terms, lr=train.lr, duration=duration)
        return Update({}, descent.num_steps, descent.terms, state={"model": copy_of(model)})
