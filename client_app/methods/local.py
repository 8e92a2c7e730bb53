"""Local training only: no federation, the lower bound (client half).

Aggregation: none, nothing is sent. Client state: the whole model, which starts from the run's
common weights and is trained for `local-epochs` in each round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import Method, Update
from client_app.round import RoundContext
from client_app.samples import Step
from client_app.trainer import Duration, copy_of, descend
from models import StagedModel
from protocol.messages import Arrays


@dataclass(frozen=True)
class LocalOnly(Method):
    """SGD on the client's own labels."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    supports_server_optimizer: ClassVar[bool] = False
    shared_part: ClassVar[str] = "nothing"
    keeps: ClassVar[str] = "its whole model"
    paper: ClassVar[str] = "the lower bound"

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The client's model, initially the run's initial weights."""
        ctx.model.load_state_dict(state.get("model") or ctx.initial_weights())
        return ctx.model

    def train(self, ctx: RoundContext) -> Update:
        """Continue from the model of the last round."""
        model = self.personal_model(ctx, ctx.state).train().requires_grad_(True)

        def terms(step: Step) -> dict[str, Tensor]:
            return {"supervised": F.cross_entropy(model(step.x), step.y)}

        train = ctx.config.train
        duration = Duration(train.local_epochs, "epochs")
        descent = descend(ctx, list(model.parameters()), terms, lr=train.lr, duration=duration)
        return Update({}, descent.num_steps, descent.terms, state={"model": copy_of(model)})
