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
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from client_app.method import Update
from client_app.objective import LocalObjective, drift_from
from client_app.round import RoundContext
from client_app.samples import Duration
from client_app.trainer import copy_of, fit
from models import StagedModel
from protocol.arrays import Arrays
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
        default=1.0,
        source="authors' code: 1, or chosen from 0.1, 1 and 2",
        key="lambda",
    )
    personal_epochs: int = option(
        at_least(0), "epochs on the personal model in each round", default=1
    )

    def personal_model(self, ctx: RoundContext, state: Mapping[str, Arrays]) -> StagedModel:
        """v_i; initially the run's initial weights."""
        ctx.model.load_state_dict(state.get("personal") or ctx.initial_weights())
        return ctx.model

    def train(self, ctx: RoundContext) -> Update:
        """The global pass, then the personal one."""
        update = super().train(ctx)
        v = self.personal_model(ctx, ctx.state).train().requires_grad_(True)

        def loss(x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {
                "supervised": F.cross_entropy(v(x), y),
                "penalty": self.lambda_ / 2 * drift_from(v, ctx.received),  # lambda (v - w)
            }

        personal = fit(
            ctx,
            list(v.parameters()),
            lambda step: (step.x, step.y),
            loss,
            lr=ctx.config.train.lr,
            duration=Duration(self.personal_epochs),
            stream="personal",
        )
        terms = update.terms | {f"personal.{name}": v for name, v in personal.terms.items()}
        num_steps = update.num_steps + personal.num_steps
        return Update(update.arrays, num_steps, terms, state={"personal": copy_of(v)})
