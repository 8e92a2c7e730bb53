"""Local training only, the baseline without federation (client half).

Aggregation: none, nothing is sent. Client state: the whole model. All clients start from the same
weights and train for `local-epochs` in each round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from client_app.method import Method, Update
from client_app.round import RoundContext
from client_app.split_model import fit_part
from client_app.trainer import copy_of
from models import StagedModel
from protocol.arrays import Arrays


@dataclass(frozen=True)
class LocalOnly(Method):
    """SGD on the client's own labels."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    has_global_model: ClassVar[bool] = False
    sends_weights: ClassVar[bool] = False
    supports_server_optimizer: ClassVar[bool] = False
    shared_part: ClassVar[str] = "nothing"
    client_state: ClassVar[str] = "its whole model"
    paper: ClassVar[str] = "none (baseline)"

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """The client's model, initially the run's initial weights."""
        ctx.model.load_state_dict(state.get("model") or ctx.initial_weights())
        return ctx.model

    def train(self, ctx: RoundContext) -> Update:
        """Continue training the model of the last round; nothing is sent."""
        model, train = self.personal_model(ctx, ctx.state), ctx.config.train
        descent = fit_part(ctx, "full", train.local_epochs, train.lr)
        return Update({}, descent.num_steps, descent.terms, state={"model": copy_of(model)})
