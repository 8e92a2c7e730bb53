"""Ditto: FedAvg, plus a personal model regularised towards the global model (client half).

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
arXiv 2012.04221, Algorithm 1.
Aggregation: weighted average, as in FedAvg. Client state: the personal model v_i, which is never
sent. w: the received global model.

    v <- v - eta ( grad CE(v) + lambda (v - w) )

lambda: the authors' script uses 1, or chooses 0.1, 1 or 2 on validation data. FedCR's code and the
presets of FedReCo's tables use 0.1 and give the personal model as many epochs as the global one.

Each round trains a copy of w as FedAvg does, then v_i (the authors' code alternates between the two
batch by batch). Only the copy of w is sent, so the global model is identical to FedAvg's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.drift import drift_from
from client_app.method import Phases
from client_app.objective import LocalObjective, objective_phases
from client_app.round import RoundContext
from client_app.trainer import Duration, Phase, copy_of
from models import StagedModel
from protocol.messages import Arrays
from protocol.options import at_least, option


@dataclass(frozen=True)
class Ditto(LocalObjective):
    """A personal model regularised towards the received one."""

    is_stateful: ClassVar[bool] = True
    is_personal: ClassVar[bool] = True
    client_state: ClassVar[str] = "its personal model"
    regularises: ClassVar[str] = "all weights of the personal model, towards the global model's"
    paper: ClassVar[str] = "Li et al. 2021 (Ditto)"
    duration_keys: ClassVar[tuple[str, ...]] = ("local-epochs", "ditto.personal-epochs")
    extra_forwards: ClassVar[str] = "1, with backward"

    lambda_: float = option(
        at_least(0),
        "weight of the squared distance to the global model",
        source="authors' code: 1, or chosen from 0.1, 1 and 2",
        key="lambda",
    )
    personal_epochs: int = option(at_least(0), "epochs on the personal model in each round")

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """v_i; initially the run's initial weights."""
        ctx.model.load_state_dict(state.get("personal") or ctx.initial_weights())
        return ctx.model

    def phases(self, ctx: RoundContext) -> Phases:
        """The global pass, then the personal one."""
        update = yield from objective_phases(self, ctx)
        model = self.personal_model(ctx, ctx.state).train().requires_grad_(True)

        def terms(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            x, y = batch
            distance = drift_from(model, ctx.received)
            return {
                "supervised": F.cross_entropy(model(x), y),
                "penalty": self.lambda_ / 2 * distance,  # gradient lambda (v - w)
            }

        personal = yield Phase(
            parameters=model.weights,
            inputs=lambda step: (step.x, step.y),
            terms=terms,
            lr=ctx.config.train.lr,
            duration=Duration(self.personal_epochs, "epochs"),
            stream="personal",
        )
        all_terms = update.terms | {f"personal.{name}": v for name, v in personal.terms.items()}
        num_steps = update.num_steps + personal.num_steps
        state = {"personal": copy_of(model)}
        return replace(update, num_steps=num_steps, terms=all_terms, state=state)
